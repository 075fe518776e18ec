"""What stands before every gRPC method of the public server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from disagg.proto.errors import AuthenticationError
from disagg.router.gateway.auth import CALLER, KEY_NEEDED, Authenticator
from disagg.router.gateway.status import answered

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in the stubs

AUTHORIZATION = "authorization"
_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
"""Answered without a key, as `/livez` of HTTP: balancers ask them."""


class Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Finds out who calls before anything of the call is read, and refuses who is unknown. Reflection needs a key,
    too."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        # Of the kind that reads no message: a unary one would take in the whole request first.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`. Runs in the task of the call, whose context it sets."""
        if handler_call_details.method.startswith(_OPEN_SERVICES):
            return await continuation(handler_call_details)
        try:
            CALLER.set(self._authenticator.authenticate(_authorization(handler_call_details)))
        except AuthenticationError:
            return self._refusal
        return await continuation(handler_call_details)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == AUTHORIZATION and isinstance(value, str):
            return value
    return None


async def _refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    async with answered(context):
        raise AuthenticationError(KEY_NEEDED)
