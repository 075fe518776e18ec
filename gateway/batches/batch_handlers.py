"""`/v1/batches`: many requests in a file, run with what interactive requests leave."""

from __future__ import annotations

import time
import uuid
from typing import Any, Final

import msgspec

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.batches.file_handlers import NotFoundError
from disagg.gateway.batches.lines import ENDPOINTS, line_of
from disagg.gateway.batches.schema import DEFAULT_BATCHES, MAX_BATCHES, WINDOW, BatchBody, page_of
from disagg.gateway.batches.service import BatchService
from disagg.gateway.batches.store import Batch
from disagg.gateway.http.query import read_query
from disagg.gateway.http.shell.exchange import BodyLimits, Exchange
from disagg.gateway.openai.schema import decoded
from disagg.gateway.requests.part_counts import Cooperative
from disagg.proto.errors import InvalidRequestError

_WINDOW_S: Final = 86_400.0


_BODY: Final = msgspec.json.Decoder(BatchBody)


class Batches:
    """Handlers. A tenant sees its own batches only.

    Args:
        batches: where they are kept.
        limits: of bodies.
    """

    def __init__(self, batches: BatchService, limits: BodyLimits) -> None:
        self._batches = batches
        self._limits = limits

    async def create(self, exchange: Exchange, request_id: str) -> None:
        """Handle `POST /v1/batches`: add a batch to the store and wake the runner."""
        body = await self._limits.read(exchange, lambda raw: decoded(raw, _BODY, _as_it_is))
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequestError("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        if body.completion_window != WINDOW:
            raise InvalidRequestError("completion_window", f"must be {WINDOW}")
        caller, batch_id = CALLER.get(), f"batch_{uuid.uuid4().hex}"
        notes = None if body.metadata is None else msgspec.json.encode(body.metadata).decode()
        batch = await self._batches.call(
            lambda store: store.create(
                batch_id,
                caller.tenant,
                body.endpoint,
                body.input_file_id,
                time.time(),
                _WINDOW_S,
                notes,
                caller.credential,
            )
        )
        self._batches.wake()
        await exchange.respond_json(shown(batch))

    async def list(self, exchange: Exchange, request_id: str) -> None:
        """`GET /v1/batches`, the latest first: `limit`, `after`."""
        tenant, most = CALLER.get().tenant, 2 * self._batches.options.max_batches
        found = await self._batches.call(lambda store: store.batches(tenant, most))
        await exchange.respond_json(
            page_of(read_query(exchange.scope), [shown(batch) for batch in found], DEFAULT_BATCHES, MAX_BATCHES)
        )

    async def one(self, exchange: Exchange, request_id: str) -> None:
        """Handle `GET /v1/batches/{batch}`: show one batch of the caller's tenant."""
        tenant, batch_id = CALLER.get().tenant, exchange.path_params["batch"]
        await self._send_found(exchange, await self._batches.call(lambda store: store.batch(tenant, batch_id)))

    async def cancel(self, exchange: Exchange, request_id: str) -> None:
        """Handle `POST /v1/batches/{batch}/cancel`: running lines are given up, and answers so far are kept."""
        tenant, batch_id = CALLER.get().tenant, exchange.path_params["batch"]
        await self._send_found(exchange, await self._batches.call(lambda store: store.cancel(tenant, batch_id)))

    async def _send_found(self, exchange: Exchange, batch: Batch | None) -> None:
        if batch is None:
            raise NotFoundError("there is no such batch")
        await exchange.respond_json(shown(batch))


def shown(batch: Batch) -> dict[str, Any]:
    """A batch as OpenAI's API shows it."""
    ended = None if batch.ended is None else int(batch.ended)
    errors = None
    if batch.error is not None:
        code, param = ("no_room", None) if batch.total else ("invalid_input", "input_file_id")
        error = {"code": code, "message": batch.error, "param": param, "line": line_of(batch.error)}
        errors = {"object": "list", "data": [error]}
    times = {f"{name}_at": ended for name in ("completed", "failed", "expired", "cancelled") if batch.status == name}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created),
        "expires_at": int(batch.expires),
        **times,
        "request_counts": {"total": batch.total, "completed": batch.num_completed, "failed": batch.num_failed},
        "metadata": None if batch.metadata is None else msgspec.Raw(batch.metadata.encode()),
    }


def _as_it_is(body: BatchBody) -> Cooperative[BatchBody]:
    yield from ()
    return body
