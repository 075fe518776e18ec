"""The handler of `/v1/responses`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import msgspec

from disagg.gateway.calls import CallScope, Events, Origin
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.openai.schema import decoded
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.other_apis.responses.answer import ID_PREFIX, ResponseWriter
from disagg.gateway.other_apis.responses.schema import ResponsesBody
from disagg.gateway.other_apis.responses.to_input import ParsedResponse, read_response
from disagg.gateway.other_apis.shared.answers import PartReader
from disagg.gateway.other_apis.shell.sending import whole_answer, write_answer
from disagg.gateway.requests.part_counts import Cooperative
from disagg.proto.ids import RequestId

RESPONSES: Final = "/v1/responses"
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
        await self._completions.run(exchange, request_id, _read, self._write, ID_PREFIX)

    async def line(self, body: bytes, origin: Origin) -> bytes:
        """The answer to a line of a batch. Raises as a request."""
        return await self._completions.run_line(body, replace(origin, id_prefix=ID_PREFIX), _read, self._whole)

    async def _write(self, exchange: Exchange, scope: CallScope, parsed: ParsedResponse, events: Events) -> None:
        await write_answer(exchange, events, self._writer(scope, parsed), parsed.stream, scope.finished)

    async def _whole(self, scope: CallScope, parsed: ParsedResponse, events: Events) -> bytes:
        return await whole_answer(events, self._writer(scope, parsed))

    def _writer(self, scope: CallScope, parsed: ParsedResponse) -> ResponseWriter:
        reader = PartReader(parsed.tools is not None and parsed.tools.parallel)
        return ResponseWriter(parsed, scope.call.request_id, int(self._completions.wall_clock()), reader)


def _read(raw: bytes) -> Cooperative[ParsedResponse]:
    return decoded(raw, _BODY, read_response)
