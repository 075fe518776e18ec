"""Adapters over HTTP, for admins, in vLLM's form: `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec

from disagg.gateway.auth.audit import Audit
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.http.shell.exchange import BodyLimits, Exchange
from disagg.gateway.openai.schema import LoadAdapterBody, UnloadAdapterBody, decode
from disagg.gateway.operators.admin_answers import adapters_in
from disagg.gateway.operators.decode_placement_log import MAX_CHARS
from disagg.gateway.operators.shell.admin import Control
from disagg.gateway.requests.part_counts import Cooperative
from disagg.proto.control import AddAdapter, RemoveAdapter
from disagg.proto.errors import InvalidRequestError, PermissionDeniedError
from disagg.proto.ids import RequestId

_LOAD: Final = msgspec.json.Decoder(LoadAdapterBody)
_UNLOAD: Final = msgspec.json.Decoder(UnloadAdapterBody)
_TEXT: Final = b"text/plain; charset=utf-8"
_FIELDS: Final = {"name": "lora_name", "path": "lora_path", "base": "base_model_name"}


class AdapterHandlers:
    """Handlers.

    Args:
        control: calls the controller.
        limits: of bodies.
        audit: logs changes.
    """

    def __init__(self, control: Control, limits: BodyLimits, audit: Audit) -> None:
        self._control = control
        self._limits = limits
        self._audit = audit

    async def load(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `POST /v1/load_lora_adapter`. A name that is served is refused, unless `load_inplace` is set."""
        async with self._change(exchange, "add an adapter"):
            body = await self._limits.read(exchange, _read_load)
            asked = AddAdapter(
                name=body.lora_name,
                path=body.lora_path,
                base=body.base_model_name or "",
                replaces=body.load_inplace,
            )
            adapters_in(await self._control(asked))
        await _answer(exchange, body.lora_name, "added")

    async def unload(self, exchange: Exchange, request_id: RequestId) -> None:
        """Handle `POST /v1/unload_lora_adapter`."""
        async with self._change(exchange, "remove an adapter"):
            body = await self._limits.read(exchange, _read_unload)
            adapters_in(await self._control(RemoveAdapter(name=body.lora_name)))
        await _answer(exchange, body.lora_name, "removed")

    @asynccontextmanager
    async def _change(self, exchange: Exchange, what: str) -> AsyncIterator[None]:
        """Log the change that an admin makes inside, with fields by their names here. Raises `PermissionDeniedError`
        for other callers."""
        caller = CALLER.get()
        with self._audit.change(what, caller, exchange.peer):
            if not caller.is_admin:
                raise PermissionDeniedError("this needs a key with the scope admin")
            try:
                yield
            except InvalidRequestError as error:
                if error.field not in _FIELDS:
                    raise
                message = error.message.removeprefix(f"{error.field}: ")
                raise InvalidRequestError(_FIELDS[error.field], message) from None


def _read_load(raw: bytes) -> Cooperative[LoadAdapterBody]:
    yield from ()
    return decode(raw, _LOAD)


def _read_unload(raw: bytes) -> Cooperative[UnloadAdapterBody]:
    yield from ()
    return decode(raw, _UNLOAD)


async def _answer(exchange: Exchange, name: str, what: str) -> None:
    text = f"Success: LoRA adapter '{name[:MAX_CHARS]}' {what} successfully."
    await exchange.respond(200, text.encode("utf-8", "replace"), _TEXT)
