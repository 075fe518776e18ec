"""What the gateway counts, and the whole cluster as Prometheus sees it.

calls answered, per protocol and outcome ──┐
request timelines as they end           ───┼──> registry ──render──> `/metrics`
the router's view: loads, WorkerMetrics ───┘
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder

from disagg.router.api import ClusterView

Protocol = Literal["grpc", "http"]


class GatewayMetrics:
    """One registry, owned by one gateway; nothing is registered globally.

    Args:
        view: the cluster now.
        model: name of the served model, a label of the `vllm:*` aliases.
    """

    def __init__(self, view: Callable[[], ClusterView], model: str) -> None:
        self._view = view
        self._model = model
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "disagg_calls",
            "Calls of clients that were answered, by protocol and outcome (ok, or the error's code).",
            ("protocol", "outcome"),
            registry=self._registry,
        )

    def count_call(self, protocol: Protocol, outcome: str) -> None:
        """A call that asked for an answer ended: `ok`, or with the code of an error."""
        self._calls.labels(protocol, outcome).inc()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, as the header `Accept` asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
