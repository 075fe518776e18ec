"""Failed calls as the errors of `disagg.proto.errors`, by their status and the details that came with it."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from disagg.proto.errors import (
    AuthenticationError,
    ContentFilterError,
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    LimitError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    RequestNotFoundError,
    UnavailableError,
)

_REQUEST_ID = "x-disagg-request-id"


def error_of(error: grpc.RpcError) -> DisaggError:
    """Convert a failed call to an error, by its status and the details that came with it."""
    call = cast(grpc.Call, error)
    code, message = call.code().name, call.details() or call.code().name
    found = _details(call)
    info = cast(error_details_pb2.ErrorInfo, found.get("ErrorInfo", error_details_pb2.ErrorInfo()))
    if code == UnavailableError.grpc_code:
        unavailable = UnavailableError(message, info.reason or "unreachable")
        unavailable.message = message  # the server's
        return unavailable
    if isinstance(bad := found.get("BadRequest"), error_details_pb2.BadRequest) and bad.field_violations:
        kind = _FIELD_ERRORS.get(info.reason, InvalidRequestError)
        return kind(bad.field_violations[0].field, bad.field_violations[0].description)
    retry = cast(error_details_pb2.RetryInfo | None, found.get("RetryInfo"))
    if retry is not None or info.reason == LimitError.code:
        overloaded = OverloadedError(message, None if retry is None else retry.retry_delay.ToMilliseconds() / 1000)
        overloaded.code = info.reason or overloaded.code
        return overloaded
    if known := _BY_REASON.get(info.reason) or _BY_CODE.get(code):
        other = known.__new__(known)
        DisaggError.__init__(other, message)  # the server's message, not one that the class would make
        other.code = info.reason or known.code
        return other
    other = DisaggError(message)
    other.grpc_code, other.code = code, info.reason or code.lower()
    return other


def was_taken(error: grpc.RpcError) -> bool:
    """Whether a gateway had accepted the call that failed: it sends the request's id first."""
    sent = cast(grpc.Call, error).initial_metadata() or ()
    return any(key == _REQUEST_ID for key, _ in sent)


_BY_CODE: dict[str, type[DisaggError]] = {
    kind.grpc_code: kind
    for kind in (
        AuthenticationError,
        PermissionDeniedError,
        DeadlineError,
        RequestCancelledError,
        InternalError,
    )
}
_FIELD_ERRORS: dict[str, type[InvalidRequestError]] = {
    kind.code: kind for kind in (ContextLengthError, ContentFilterError)
}
_BY_REASON: dict[str, type[DisaggError]] = {kind.code: kind for kind in (ModelNotFoundError, RequestNotFoundError)}


def _details(call: grpc.Call) -> dict[str, ProtoMessage]:
    """The `google.rpc` details of the kinds below, by name; empty where gRPC itself or a proxy made the status."""
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):
        return {}
    found: dict[str, ProtoMessage] = {}
    for packed in status.details if status is not None else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if packed.Is(kind.DESCRIPTOR):
                found[kind.DESCRIPTOR.name] = kind.FromString(packed.value)
    return found
