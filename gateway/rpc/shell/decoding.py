"""Requests from bytes. gRPC would answer bytes that are no message with UNKNOWN and a traceback in the log; here they
are the client's mistake like any other: INVALID_ARGUMENT, naming the field where a text is not UTF-8.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from disagg.gateway.auth.auth import CALLER
from disagg.gateway.event_loop.shell.turns import LoopTurns, rest_after, run_cooperatively
from disagg.gateway.requests.part_counts import SMALL_BYTES, count_fields, find_broken_text
from disagg.gateway.status import abort_on_error
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb

M = TypeVar("M", bound=Message)

_METHODS: Final = {
    f"/{service.full_name}/{method.name}": GetMessageClass(method.input_type)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Our methods by their path, with the message that they take."""


class DecodeRequests(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Lets our methods, which all take one message, decode it themselves.

    Args:
        turns: for large messages, see `decode`.
        max_numbers: in one list of a message.
    """

    def __init__(self, turns: LoopTurns, max_numbers: int) -> None:
        self._turns = turns
        self._max_numbers = max_numbers

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
        return wrap(self._decoding(method, kind), response_serializer=handler.response_serializer)

    def _decoding(self, method: Any, kind: type[Message]) -> Any:
        """The method as one that takes bytes."""

        async def call(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with abort_on_error(context):
                request = await decode(raw, kind, self._turns, self._max_numbers)
            return await method(request, context)

        return call


async def decode(raw: bytes, kind: type[M], turns: LoopTurns, max_numbers: int) -> M:
    """The message of `kind` in `raw`. A large one waits for its turn, is counted in pieces, and then parsed in one: so
    many that arrive at once are not parsed in the same turn of the event loop.

    Raises:
        InvalidRequestError: if it is none, or has too many fields, or more than `max_numbers` numbers in one.
        OverloadedError: if too many bytes wait.
    """
    if len(raw) <= SMALL_BYTES:
        return await _parse(raw, kind)
    async with turns.of(CALLER.get().tenant, len(raw)):
        await run_cooperatively(count_fields(raw, cast(Descriptor, kind.DESCRIPTOR), max_numbers))
        began = time.monotonic()
        try:
            return await _parse(raw, kind)
        finally:
            await rest_after(began)


async def _parse(raw: bytes, kind: type[M]) -> M:
    descriptor = cast(Descriptor, kind.DESCRIPTOR)
    try:
        return kind.FromString(raw)
    except DecodeError:
        field = await run_cooperatively(find_broken_text(raw, descriptor))
        if field is None:
            raise InvalidRequestError("request", f"is no {descriptor.full_name} message") from None
        raise InvalidRequestError(field.removeprefix("request."), "is not UTF-8") from None
