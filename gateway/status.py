"""The error tree as gRPC statuses, with `google.rpc` details that a program can read.

Every error has `ErrorInfo(reason=code, domain="disagg")`; a wrong field has `BadRequest`, what may be
tried again `RetryInfo`.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from disagg.proto.errors import (
    DisaggError,
    InternalError,
    InvalidRequestError,
    LimitError,
    retry_after_s,
)

ERROR_DOMAIN = "disagg"

_MAX_MESSAGE_BYTES = 1000
"""Statuses travel in HTTP/2 headers, of which clients take 8 KiB; the message goes up to three times, once with three
bytes for each that is not ASCII."""

logger = logging.getLogger(__name__)


def to_rpc_status(error: DisaggError, request_id: str = "") -> status_pb2.Status:
    """The status of an error, with details; `request_id` goes into `ErrorInfo.metadata`."""
    metadata = {"request_id": request_id} if request_id else {}
    if isinstance(error, LimitError):
        metadata["limit"] = error.limit
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.code, domain=ERROR_DOMAIN, metadata=metadata),
    ]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_clip(error.message.removeprefix(f"{error.field}: "))
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, LimitError):
        exceeded = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{error.tenant}", description=_clip(error.message)
        )
        details.append(error_details_pb2.QuotaFailure(violations=[exceeded]))
    if (retry_s := retry_after_s(error)) is not None:
        delay = Duration()
        delay.FromMilliseconds(round(retry_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = grpc.StatusCode[error.grpc_code].value[0]
    return status_pb2.Status(code=code, message=_clip(error.message), details=[_pack(detail) for detail in details])


class abort_on_error:  # noqa: N801 - used as `async with abort_on_error(context):`
    """Turns what is raised inside into the call's status. What is no `DisaggError` is logged and becomes `INTERNAL`."""

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], request_id: str = "") -> None:
        self._context = context
        self._request_id = request_id

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, DisaggError):
            await _abort(self._context, error, self._request_id)
        if isinstance(error, Exception):
            logger.error(
                "request %s: failed by a bug; the client gets an internal error",
                self._request_id or "none",
                exc_info=error,
            )
            await _abort(self._context, InternalError("the gateway failed; its log has the reason"), self._request_id)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: DisaggError, request_id: str) -> NoReturn:
    status = rpc_status.to_status(to_rpc_status(error, request_id))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _clip(text: str) -> str:
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= _MAX_MESSAGE_BYTES else raw[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
