from __future__ import annotations

from base64 import b64encode
from urllib.parse import quote

import grpc
import pytest
from google.protobuf.any_pb2 import Any as PackedAny
from google.rpc import error_details_pb2 as details_pb
from grpc_status import rpc_status

from disagg.gateway.status import to_rpc_status
from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InternalError,
    InvalidRequestError,
    LimitError,
    ModelNotFoundError,
    OverloadedError,
    RequestCancelledError,
    RequestNotFoundError,
    UnavailableError,
)

CASES: list[tuple[DisaggError, grpc.StatusCode, str]] = [
    (InvalidRequestError("sampling.top_p", "is wrong"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_value"),
    (ContextLengthError("prompt.text", "is long"), grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded"),
    (ModelNotFoundError("m", ["n"]), grpc.StatusCode.NOT_FOUND, "model_not_found"),
    (RequestNotFoundError("x"), grpc.StatusCode.NOT_FOUND, "request_not_found"),
    (DeadlineError("late"), grpc.StatusCode.DEADLINE_EXCEEDED, "timeout"),
    (RequestCancelledError("gone"), grpc.StatusCode.CANCELLED, "cancelled"),
    (LimitError("a", "queued", "too many wait", 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_exceeded"),
    (OverloadedError("full", 0.25), grpc.StatusCode.RESOURCE_EXHAUSTED, "slow_down"),
    (UnavailableError("lost", "kv_transfer_failed"), grpc.StatusCode.UNAVAILABLE, "kv_transfer_failed"),
    (InternalError("oops"), grpc.StatusCode.INTERNAL, "server_error"),
]


def unpack(packed: PackedAny) -> object:
    for kind in (details_pb.ErrorInfo, details_pb.BadRequest, details_pb.QuotaFailure, details_pb.RetryInfo):
        if packed.Is(kind.DESCRIPTOR):
            return kind.FromString(packed.value)
    raise AssertionError(packed.type_url)


@pytest.mark.parametrize(("error", "code", "reason"), CASES)
def test_code_message_and_details(error: DisaggError, code: grpc.StatusCode, reason: str) -> None:
    status = to_rpc_status(error, "r1")
    assert rpc_status.to_status(status).code is code
    assert status.message == error.message
    info = details_pb.ErrorInfo(reason=reason, domain="disagg", metadata={"request_id": "r1"})
    expected: list[object] = [info]
    if isinstance(error, LimitError):
        info.metadata["limit"] = "queued"
        quota = details_pb.QuotaFailure.Violation(subject="tenant:a", description=error.message)
        expected.append(details_pb.QuotaFailure(violations=[quota]))
    if isinstance(error, InvalidRequestError):
        description = error.message.removeprefix(f"{error.field}: ")
        violation = details_pb.BadRequest.FieldViolation(field=error.field, description=description)
        expected.append(details_pb.BadRequest(field_violations=[violation]))
    found = [unpack(packed) for packed in status.details]
    assert found[: len(expected)] == expected
    retries = [one.retry_delay.ToMilliseconds() for one in found if isinstance(one, details_pb.RetryInfo)]
    assert retries == {"slow_down": [250], "rate_limit_exceeded": [500], "kv_transfer_failed": [1000]}.get(reason, [])
    assert len(found) == len(expected) + len(retries)


@pytest.mark.parametrize("char", ["x", "é", "🙂", "\ud800"])
def test_a_long_message_fits_into_headers(char: str) -> None:
    """Clients take 8 KiB of headers, of which gRPC writes the message with %XX for each byte that is not ASCII, and
    the status in base64."""
    status = to_rpc_status(InvalidRequestError("x", char * 100_000))
    assert status.message.startswith(f"x: {char if char.isprintable() else '?'}")
    assert status.message.endswith("...")
    assert len(quote(status.message)) + len(b64encode(status.SerializeToString())) < 7000


def test_what_will_never_be_taken_says_no_time() -> None:
    status = to_rpc_status(LimitError("a", "tokens_per_minute", "too many", None))
    assert status.message == "tokens_per_minute: too many"
    assert [type(unpack(packed)) for packed in status.details] == [details_pb.ErrorInfo, details_pb.QuotaFailure]
