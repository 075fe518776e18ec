"""The handler of `/v1/responses`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from disagg.proto.ids import RequestId
from disagg.router.gateway.answers.generation import Delta, Finish, Generator
from disagg.router.gateway.http.completions import Completions
from disagg.router.gateway.http.exchange import Exchange
from disagg.router.gateway.http.foreign.answers import PartReader, write_answer
from disagg.router.gateway.http.responses.answer import ResponseWriter
from disagg.router.gateway.http.responses.schema import ResponsesBody
from disagg.router.gateway.http.responses.to_input import ParsedResponse, read_response
from disagg.router.gateway.http.schema import decoded
from disagg.router.gateway.requests.request import Call

_BODY: Final = msgspec.json.Decoder(ResponsesBody)


class Responses:
    """Handlers.

    Args:
        completions: the way of every request.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/responses`."""
        await self._completions.run(exchange, request_id, lambda raw: decoded(raw, _BODY, read_response), self._write)

    async def _write(
        self,
        generator: Generator,
        exchange: Exchange,
        parsed: ParsedResponse,
        call: Call,
        events: AsyncGenerator[Delta | Finish, None],
    ) -> None:
        reader = PartReader(generator.model.tokenizer, parsed.tools)
        created = int(self._completions.wall_clock())
        writer = ResponseWriter(parsed, call.request_id, created, reader)
        await write_answer(exchange, events, writer, parsed.stream)
