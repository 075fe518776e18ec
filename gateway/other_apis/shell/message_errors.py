"""Errors as Anthropic's API writes them: `{"type": "error", "error": {type, message}, "request_id"}`, with the status
and headers of ours: its clients retry by the same ones."""

from __future__ import annotations

from typing import Final

import msgspec

from disagg.gateway.http.errors import short_message
from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.other_apis.shared.answers import typed_event
from disagg.proto.errors import DisaggError
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
