"""Requests from bytes. gRPC would answer bytes that are no message with UNKNOWN and a traceback in the log; here they
are the client's mistake like any other: INVALID_ARGUMENT, naming the field where a text is not UTF-8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from disagg.proto.errors import InvalidRequestError
from disagg.router.gateway.status import answered
from disagg.v1 import inference_pb2 as pb

M = TypeVar("M", bound=Message)

_METHODS: Final = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Our methods by their path, with the message that they take."""

_LENGTH_DELIMITED: Final = 2
"""The wire type of strings and messages."""


class DecodeRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Lets our methods, which all take one message, decode it themselves."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Every call passes here before its request is read."""
        handler = await continuation(handler_call_details)
        kind = _METHODS.get(handler_call_details.method)
        if kind is None:
            return handler
        method = handler.unary_stream if handler.response_streaming else handler.unary_unary
        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return wrap(_decoding(method, kind), response_serializer=handler.response_serializer)


def _decoding(method: Any, kind: type[Message]) -> Any:
    """The method as one that takes bytes."""

    async def call(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with answered(context):
            request = decode(raw, kind)
        return await method(request, context)

    return call


def decode(raw: bytes, kind: type[M]) -> M:
    """The message of `kind` in `raw`. Raises `InvalidRequestError`."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        descriptor = cast(Descriptor, kind.DESCRIPTOR)
        field = find_broken_text(raw, descriptor)
        if field is None:
            raise InvalidRequestError("request", f"is no {descriptor.full_name} message") from None
        raise InvalidRequestError(field.removeprefix("request."), "is not UTF-8") from None


def find_broken_text(raw: bytes, kind: Descriptor) -> str | None:
    """The path of the first string in `raw`, a message of `kind`, that is not UTF-8; None where there is none."""
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(raw))  # the stubs do not know that it can be iterated
    except DecodeError:
        return None
    seen: Counter[int] = Counter()
    for field in fields:
        known = kind.fields_by_number.get(field.field_number)
        if known is None or field.wire_type != _LENGTH_DELIMITED:
            continue
        path = _path(known, seen[known.number])
        seen[known.number] += 1
        if known.type == FieldDescriptor.TYPE_STRING and not _is_utf8(field.data):
            return path
        if known.message_type is not None and (inner := find_broken_text(field.data, known.message_type)):
            return f"{path}.{inner}"
    return None


def _path(field: FieldDescriptor, index: int) -> str:
    """The field as our errors name it, see `validate`."""
    if field.full_name == "disagg.v1.GenerateRequest.text":
        return "prompt.text"
    return f"{field.name}[{index}]" if field.is_repeated else field.name


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
