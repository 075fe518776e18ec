"""The page for operators at `/`, and the data that it shows.

    /, /ui/*.js, ...     files, which are the same for everybody, and so need no key
    /ui/state            the cluster and the latest requests; asked for once a second by each open page
    /ui/requests/{id}    one request, as `disagg explain --json` has it
    /ui/usage            what the caller's key used by day, an admin's all; asked for twice a minute

The first two kinds of data come from `AdminService`, with the rights that its calls have: a caller who is no admin sees
no addresses, no requests of other tenants and no models that its key is not for, and without `metrics` no load.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from disagg.gateway.auth.auth import CALLER, Caller
from disagg.gateway.auth.shell.rights import may_use, usage_of
from disagg.gateway.http.errors import Headers
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.operators.admin_answers import explanation_json
from disagg.gateway.usage.counts import DEFAULT_DAYS, NO_USAGE, UsageView
from disagg.gateway.usage.handler import usage_json
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import RequestId
from disagg.v1 import inference_pb2 as pb

FOLDER: Final = Path(__file__).parents[1] / "ui"
TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Content security policy: the page runs only its own files, and cannot make HTML of any string."""
SECURITY_HEADERS: Final[Headers] = [
    (b"content-security-policy", POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
]
MAX_AGE_S: Final = 0.5
"""Maximum age of a state in seconds. However many pages are open, it is made at most twice a second for each set of
rights."""
MAX_WORKERS: Final = 256
MAX_PAIRS: Final = 64
"""Maximum number of worker pairs shown; those with the most bytes between them are."""
MAX_REQUESTS: Final = 20
MAX_USAGE_ROWS: Final = 100


class Views(Protocol):
    """The data of the page, from `AdminService`."""

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        """The cluster at most `max_age_s` seconds ago."""
        ...

    def recent(self, limit: int) -> AsyncIterator[pb.ExplainRequestResponse]:
        """The latest requests of all tenants, newest first."""
        ...

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        """A running or recent request. Raises `RequestNotFoundError`."""
        ...


class _File(NamedTuple):
    body: bytes
    content_type: bytes
    etag: bytes


class Page:
    """Handlers. Reads all files when it is made; they have some tens of kilobytes.

    Args:
        views: what is shown.
        model_names: that requests use, now.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        usage: what keys used; None where it is not known.
    """

    def __init__(
        self,
        views: Views,
        model_names: Callable[[], Sequence[str]],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        usage: UsageView | None = None,
    ) -> None:
        self._usage = usage
        self._views = views
        self._model_names = model_names
        self._clock = clock
        self._wall_clock = wall_clock
        self._files = _read_files()
        self._made: dict[tuple[bool, bool, frozenset[str] | None, tuple[str, ...]], tuple[float, bytes]] = {}
        """States as (time made, JSON), by what the caller may see."""
        self._making = asyncio.Lock()

    @property
    def paths(self) -> tuple[str, ...]:
        """URL paths of the page's files."""
        return tuple(self._files)

    async def file(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /` and the files that the page names."""
        found = self._files[exchange.scope["path"]]
        headers = [*SECURITY_HEADERS, (b"etag", found.etag), (b"cache-control", b"no-cache")]
        if exchange.headers.get("if-none-match", "").encode() == found.etag:
            await exchange.respond(304, b"", found.content_type, headers)
        else:
            await exchange.respond(200, found.body, found.content_type, headers)

    async def state(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /ui/state`: the cluster as the caller may see it."""
        await _send(exchange, await self._latest(CALLER.get()))

    async def request(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /ui/requests/{request_id}`: one request as JSON."""
        found = self._views.explain(RequestId(exchange.path_params["request_id"]), CALLER.get())
        await _send(exchange, msgspec.json.encode(explanation_json(found)))

    async def usage(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `GET /ui/usage`: the same as `/v1/usage`, and `data` is null if none is kept."""
        shown: dict[str, Any] = {"data": None}
        if self._usage is not None:
            try:
                page = await self._usage.read(DEFAULT_DAYS, usage_of(CALLER.get(), ""), MAX_USAGE_ROWS)
                shown = usage_json(page)
            except UnavailableError as error:
                if error.code != NO_USAGE:
                    raise
        await _send(exchange, msgspec.json.encode(shown))

    async def _latest(self, caller: Caller) -> bytes:
        models = tuple(name for name in self._model_names() if may_use(caller, name))
        # By all models of the key: it may see workers of one that requests may no longer name.
        rights = caller.is_admin, caller.sees_counts, caller.models, models
        async with self._making:  # all that wait get what the first one makes
            now = self._clock()
            self._made = {key: made for key, made in self._made.items() if now - made[0] <= MAX_AGE_S}
            if (made := self._made.get(rights)) is not None:
                return made[1]
            body = msgspec.json.encode(await self._make(caller, models))
            self._made[rights] = self._clock(), body
            return body

    async def _make(self, caller: Caller, models: Sequence[str]) -> dict[str, Any]:
        shown = state_json(await self._views.state(caller, MAX_AGE_S))
        requests = None
        if caller.is_admin:
            requests = [request_json(each) async for each in self._views.recent(MAX_REQUESTS)]
        return {"now": self._wall_clock(), "models": list(models), **shown, "requests": requests}


def state_json(state: pb.GetClusterStateResponse) -> dict[str, Any]:
    """The part of a cluster's state that the page shows, of any size: lists are cut, and their full lengths are
    given."""
    pairs = heapq.nlargest(MAX_PAIRS, state.transfers, key=lambda pair: pair.bytes)
    return {
        "pools": [{"name": pool.name, "desired": pool.desired, "ready": pool.ready} for pool in state.pools],
        "workers": [_worker(worker) for worker in state.workers[:MAX_WORKERS]],
        "num_workers": len(state.workers),
        "pairs": [
            {
                "src": pair.prefill_worker,
                "dst": pair.decode_worker,
                "transport": pair.transport,
                "transfers": pair.transfers,
                "bytes": pair.bytes,
                "failures": pair.failures,
            }
            for pair in pairs
        ],
        "num_pairs": len(state.transfers),
        "has_controller": bool(state.pools or state.gateways),
        "has_load": not state.load_left_out,
        "queued": state.queued_requests,
        "running": state.running_requests,
        "stages": {entry.stage: entry.requests for entry in state.stages},
        "targets": {entry.slo: [entry.met, entry.total] for entry in state.slos},
        "requests_per_s": state.requests_per_s,
        "output_tokens_per_s": state.output_tokens_per_s,
    }


def request_json(request: pb.ExplainRequestResponse) -> dict[str, Any]:
    """One line of the page's list of requests."""
    at_ms = {entry.stage: entry.at_ms for entry in request.stages}
    return {
        "id": request.request_id,
        "arrived_at": request.arrived_at,
        "outcome": request.outcome,
        "prefill": request.prefill_worker,
        "decode": request.decode_worker,
        "prompt_tokens": request.prompt_tokens,
        "completion_tokens": request.completion_tokens,
        "kv_bytes": request.kv_bytes,
        "ttft_ms": at_ms.get("first_token"),
        "total_ms": at_ms.get("end"),
        "is_probe": request.is_probe,
    }


def _worker(worker: pb.WorkerState) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "roles": list(worker.roles),
        "phase": worker.phase,
        "detail": worker.detail,
        "sequences": worker.sequences,
        "blocks": worker.kv_blocks_total,
        "active": worker.kv_blocks_active,
        "reserved": worker.kv_blocks_reserved,
        "cached": worker.kv_blocks_cached,
    }


def _read_files() -> dict[str, _File]:
    files = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
            url = "/" if path.name == "index.html" else f"/ui/{path.name}"
            files[url] = _File(body, TYPES[path.suffix], etag)
    return files


async def _send(exchange: Exchange, body: bytes) -> None:
    await exchange.respond(200, body, headers=[(b"cache-control", b"no-store")])
