"""Errors as this API writes them: a status, headers, and `{"error": {message, type, param, code}}`.

Clients of this API retry 408, 409, 429 and 5xx by themselves. An error that may be retried has the time
(`retry-after-ms`); one where that is pointless, because the router has retried or the answer would be the same, has
`x-should-retry: false`.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from disagg.proto.errors import (
    AuthenticationError,
    DisaggError,
    InvalidRequestError,
    ModelDeniedError,
    ModelNotFoundError,
    PermissionDeniedError,
    retry_after_s,
)

Headers = list[tuple[bytes, bytes]]

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "cancelled",
}
"""`type` by status. Others are `invalid_request_error` below 500, and `server_error` from there on."""
_MAX_MESSAGE_CHARS: Final = 1000


class UnknownUrlError(DisaggError):
    """There is no such path."""

    http_status = 404
    grpc_code = "UNIMPLEMENTED"
    code = "unknown_url"


class MethodNotAllowedError(DisaggError):
    """The path takes other methods."""

    http_status = 405
    grpc_code = "UNIMPLEMENTED"
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class SlowBodyError(DisaggError):
    """The body did not arrive in time."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    code = "timeout"


class ForeignSiteError(PermissionDeniedError):
    """A page of another web site must not call this gateway."""

    code = "foreign_site"


class ContentTypeError(DisaggError):
    """The body is not announced as JSON."""

    http_status = 415
    grpc_code = "INVALID_ARGUMENT"
    code = "unsupported_media_type"


class ErrorDetail(msgspec.Struct, frozen=True):
    """The `error` object of a response: message, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON body of every error response."""

    error: ErrorDetail


def error_json(error: DisaggError) -> bytes:
    """The JSON of an error, for a response's body or a stream's event."""
    status = error.http_status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(short_message(error), kind, _param(error), error.code)))


def short_message(error: DisaggError) -> str:
    """The message of an error, cut after `_MAX_MESSAGE_CHARS`."""
    message = error.message
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[:_MAX_MESSAGE_CHARS] + "..."


def error_event(error: DisaggError) -> bytes:
    """An error as the last event of a stream."""
    return b"data: " + error_json(error) + b"\n\n"


def error_headers(error: DisaggError) -> Headers:
    """Headers of an error response: whether and when to try again, and those that the status requires."""
    if (retry_s := retry_after_s(error)) is not None:
        return [
            (b"retry-after-ms", b"%d" % max(1, math.ceil(retry_s * 1000))),
            (b"retry-after", b"%d" % max(1, math.ceil(retry_s))),
        ]
    headers: Headers = []
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", error.allowed.encode()))
    if error.http_status in (408, 429) or error.http_status >= 500:
        headers.append((b"x-should-retry", b"false"))
    return headers


def _param(error: DisaggError) -> str | None:
    if isinstance(error, InvalidRequestError):
        return error.field
    return "model" if isinstance(error, ModelNotFoundError | ModelDeniedError) else None
