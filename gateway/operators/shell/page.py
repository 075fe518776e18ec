"""The page for operators at `/`, and the data that it shows.

    /, /ui/*.js, ...     files, which are the same for everybody, and so need no key
    /ui/state            the cluster, what its charts do not have yet, and the latest requests; asked for once a second
                         by each open page. Query: `after` (seconds since the epoch: the samples later than that), and
                         `id`, `model`, `state`, `worker` of the requests (`RequestFilter`)
    /ui/requests/{id}    one request, as `disagg explain --json` has it
    /ui/usage            what the caller's key used by day, an admin's all; asked for twice a minute

The first two kinds of data come from `AdminService`, with the rights that its calls have: a caller who is no admin sees
no addresses, no requests of other tenants and no models that its key is not for, and without `metrics` no load.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from disagg.gateway.auth.auth import CALLER, Caller
from disagg.gateway.auth.shell.rights import may_use, usage_of
from disagg.gateway.http.errors import Headers
from disagg.gateway.http.query import read_query
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.operators.admin_answers import explanation_json
from disagg.gateway.operators.history import History, Sample
from disagg.gateway.operators.requests_list import FoundRequests, RequestFilter
from disagg.gateway.usage.counts import DEFAULT_DAYS, NO_USAGE, UsageView
from disagg.gateway.usage.handler import usage_json
from disagg.proto.errors import DisaggError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.v1 import inference_pb2 as pb

logger = logging.getLogger(__name__)

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
MAX_STRIPS: Final = 32
"""Maximum number of workers with a history of their own; the page draws more of them as the cells of a heat map."""
MAX_REQUESTS: Final = 50
MAX_USAGE_ROWS: Final = 100


class Views(Protocol):
    """The data of the page, from `AdminService`."""

    async def state(self, caller: Caller, max_age_s: float) -> pb.GetClusterStateResponse:
        """The cluster at most `max_age_s` seconds ago."""
        ...

    def find(self, wanted: RequestFilter, limit: int) -> FoundRequests:
        """The latest requests of all tenants that a filter lets through, newest first."""
        ...

    async def sample(self) -> Sample:
        """The cluster now, for the history."""
        ...

    def explain(self, request_id: RequestId, caller: Caller) -> pb.ExplainRequestResponse:
        """A running or recent request. Raises `RequestNotFoundError`."""
        ...


class _File(NamedTuple):
    body: bytes
    content_type: bytes
    etag: bytes


class _Made(NamedTuple):
    """A state without its history."""

    at: float
    """When it was made, in monotonic seconds."""
    body: bytes
    """A JSON object."""
    workers: frozenset[str]
    """Those whose history is shown with it."""


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
        self._history = History()
        self._made: dict[Hashable, _Made] = {}
        """By what the caller may see and wants to see."""
        self._making = asyncio.Lock()

    @property
    def paths(self) -> tuple[str, ...]:
        """URL paths of the page's files."""
        return tuple(self._files)

    def content_type(self, path: str) -> str:
        """The type of a file, without its parameters."""
        return self._files[path].content_type.decode().split(";", 1)[0]

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
        caller, query = CALLER.get(), read_query(exchange.scope)
        made = await self._latest(caller, RequestFilter(*(query.get(name, "") for name in RequestFilter._fields)))
        samples = self._history.after(_seconds(query.get("after", "")), made.workers) if caller.sees_counts else []
        # The history differs between pages, the rest does not, and is the larger part.
        await _send(exchange, b'%b,"history":%b}' % (made.body[:-1], msgspec.json.encode(samples)))

    async def keep_history(self) -> None:
        """Take a sample once a second, until it is cancelled."""
        while True:
            await self.take_sample()
            await asyncio.sleep(1.0 - self._wall_clock() % 1.0)  # soon after the next second begins

    async def take_sample(self) -> None:
        """Add a sample to the history, or none where there is no view."""
        try:
            self._history.add(await self._views.sample())
        except DisaggError as error:
            logger.debug("no sample for the charts of the page: %s", error)

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

    async def _latest(self, caller: Caller, wanted: RequestFilter) -> _Made:
        models = tuple(name for name in self._model_names() if may_use(caller, name))
        # By all models of the key: it may see workers of one that requests may no longer name.
        rights = caller.is_admin, caller.sees_counts, caller.models, models, wanted if caller.is_admin else None
        async with self._making:  # all that wait get what the first one makes
            now = self._clock()
            self._made = {key: made for key, made in self._made.items() if now - made.at <= MAX_AGE_S}
            if (made := self._made.get(rights)) is not None:
                return made
            shown = await self._make(caller, models, wanted)
            workers = [worker["id"] for worker in shown["workers"]]
            if len(workers) > MAX_STRIPS:
                workers = []
            made = self._made[rights] = _Made(self._clock(), msgspec.json.encode(shown), frozenset(workers))
            return made

    async def _make(self, caller: Caller, models: Sequence[str], wanted: RequestFilter) -> dict[str, Any]:
        shown = state_json(await self._views.state(caller, MAX_AGE_S))
        found = self._views.find(wanted, MAX_REQUESTS)._asdict() if caller.is_admin else {"requests": None}
        return {"now": self._wall_clock(), "models": list(models), **shown, **found}


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
        "tokens_per_step": round(worker.tokens_per_step, 3),
        "drafted": worker.drafted_tokens,
        "accepted": worker.accepted_tokens,
        "prompt": worker.prompt_tokens,
        "loaded": worker.loaded_tokens,
        "fetched": worker.fetched_tokens,
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


def _seconds(text: str) -> float:
    """A time in seconds; 0 for what is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


async def _send(exchange: Exchange, body: bytes) -> None:
    await exchange.respond(200, body, headers=[(b"cache-control", b"no-store")])
