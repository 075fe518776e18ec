"""What probes and Prometheus read over HTTP: whether the gateway is alive and ready, its metrics and its version."""

from __future__ import annotations

import msgspec

from disagg import __version__
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.auth.shell.rights import require_counts
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.metrics.registry import GatewayMetrics
from disagg.gateway.readiness import Readiness
from disagg.proto.ids import RequestId


class Probes:
    """Handlers.

    Args:
        readiness: whether new requests are taken.
        metrics: what `/metrics` shows.
    """

    def __init__(self, readiness: Readiness, metrics: GatewayMetrics) -> None:
        self._readiness = readiness
        self._metrics = metrics

    async def alive(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /livez`: the process answers."""
        await exchange.respond_json({"status": "alive"})

    async def health(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /health`: 200 if some worker can serve; 503 if none can or the gateway drains."""
        num_workers = self._readiness.num_decode_workers
        state = self._readiness.state if num_workers else "no decode worker"
        body: dict[str, object] = {"status": "ok" if state == "ready" else state, "decode_workers": num_workers}
        if tiers_off := self._readiness.tiers_off:
            body["tiers_off"] = tiers_off
        await exchange.respond(200 if state == "ready" else 503, msgspec.json.encode(body))

    async def ready(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /readyz`: 200 if new requests should be sent here, 503 if not."""
        state = self._readiness.state
        await exchange.respond(200 if state == "ready" else 503, msgspec.json.encode({"status": state}))

    async def metrics(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /metrics`: what is exact to a request is not for every tenant."""
        require_counts(CALLER.get())
        body, content_type = self._metrics.render(exchange.headers.get("accept", ""))
        await exchange.respond(200, body, content_type.encode())

    async def version(self, exchange: Exchange, request_id: RequestId) -> None:
        """`GET /version`."""
        await exchange.respond_json({"version": __version__})
