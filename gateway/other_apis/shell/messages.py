"""The handlers of `/v1/messages`, and the errors as Anthropic's API writes them: `{"type": "error", "error": {type,
message}, "request_id"}`, with the status and headers of ours: its clients retry by the same ones."""

from __future__ import annotations

from typing import Final

import msgspec

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.calls import CallScope, Events
from disagg.gateway.http.errors import short_message
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.openai.schema import decoded
from disagg.gateway.openai.shell.completions import Completions
from disagg.gateway.openai.to_input import ParsedCall
from disagg.gateway.other_apis.messages.answer import ID_PREFIX, MessageWriter
from disagg.gateway.other_apis.messages.schema import MessagesBody
from disagg.gateway.other_apis.messages.to_input import Conversation, read_conversation, read_messages
from disagg.gateway.other_apis.shared.answers import PartReader, typed_event
from disagg.gateway.other_apis.shared.bodies import sampling_of
from disagg.gateway.other_apis.shell.sending import write_answer
from disagg.gateway.requests.part_counts import Cooperative
from disagg.gateway.requests.validate import check_chat
from disagg.proto.errors import DisaggError, InvalidRequestError
from disagg.proto.ids import RequestId

MESSAGES: Final = "/v1/messages"
"""The path of the API; all paths that begin with it have errors of this form."""
_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""`type` by status. Others are `invalid_request_error` below 500, and `api_error` from there on."""


def answer_as_anthropic(exchange: Exchange, request_id: RequestId) -> None:
    """Set the form of the API's errors, and the header with the id that its clients read."""
    exchange.add_header(b"request-id", request_id.encode())
    exchange.error_body = lambda error: msgspec.json.encode({"type": "error", **_fields(error, request_id)})
    exchange.error_event = lambda error: typed_event("error", _fields(error, request_id))


def _fields(error: DisaggError, request_id: RequestId) -> dict[str, object]:
    status = error.http_status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"error": {"type": kind, "message": short_message(error)}, "request_id": request_id}


_BODY: Final = msgspec.json.Decoder(MessagesBody)


class Messages:
    """Handlers.

    Args:
        completions: the way of every request.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/messages`."""
        await self._completions.run(exchange, request_id, _read, self._write, ID_PREFIX)

    async def count_tokens(self, exchange: Exchange, request_id: RequestId) -> None:
        """`POST /v1/messages/count_tokens`: those of the prompt that the chat template makes."""
        model, asked = await self._completions.limits.read(exchange, lambda raw: decoded(raw, _BODY, _read_count))
        generator = self._completions.models.find(CALLER.get(), model)
        try:
            prompt = check_chat(asked.prompt.turns, generator.limits, asked.prompt.tools, asked.prompt.options)
            token_ids = await generator.tokenize(prompt)
        except InvalidRequestError as error:
            raise asked.names.rename(error) from None
        await exchange.respond_json({"input_tokens": len(token_ids)})

    async def _write(self, exchange: Exchange, scope: CallScope, parsed: ParsedCall, events: Events) -> None:
        reader = PartReader(parsed.tools is not None and parsed.tools.parallel)
        model, shows_reasoning = parsed.inputs[0].model, parsed.shows_reasoning
        writer = MessageWriter(model, scope.call.request_id, reader, exchange.error_event, shows_reasoning)
        await write_answer(exchange, events, writer, parsed.stream, scope.finished)


def _read(raw: bytes) -> Cooperative[ParsedCall]:
    return decoded(raw, _BODY, read_messages)


def _read_count(body: MessagesBody) -> Cooperative[tuple[str, Conversation]]:
    model = sampling_of(body)["model"]
    return model, (yield from read_conversation(body))
