"""Interceptors of the public gRPC server: authentication of every call, and the calls that run, so that a stop can wait
for their ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from typing_extensions import override

from disagg.gateway.auth.audit import Audit
from disagg.gateway.auth.auth import AUTHORIZATION, CALLER, UNAUTHENTICATED, Authenticator, Caller, RefusedError
from disagg.gateway.auth.shell.rights import require_inference
from disagg.gateway.auth.shell.tls import name_of_peer
from disagg.gateway.status import abort_on_error
from disagg.proto.errors import PermissionDeniedError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only in the stubs
Context = grpc.aio.ServicerContext[Any, Any]

_CHECK = "/grpc.health.v1.Health/Check"
"""Answered without a key, as `/livez` of HTTP: for load balancers."""
_WATCH = "/grpc.health.v1.Health/Watch"
"""The same, but its streams without a key are few: see `WatchPlaces`. A key that is refused counts as none."""
_INFERENCE = "/disagg.v1.InferenceService/"
_MODELS = f"{_INFERENCE}ListModels"
"""A method that every caller may use."""


class Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Authenticates the caller before anything of the call is read, and refuses unknown ones. Reflection needs a key,
    too. Where a certificate can stand for a key, a call without a key is authenticated when it begins: gRPC shows
    the certificate no earlier."""

    def __init__(self, authenticator: Authenticator, audit: Audit) -> None:
        self._authenticator = authenticator
        self._audit = audit

    @override
    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Runs in the task of the call, whose context it sets."""
        if handler_call_details.method == _CHECK:
            return await continuation(handler_call_details)
        try:
            caller = self._authenticator.authenticate(_authorization(handler_call_details))
            CALLER.set(caller)
            _authorize(caller, handler_call_details.method)
        except PermissionDeniedError as error:
            return _refusing(partial(self._deny, error))
        except RefusedError as error:
            if handler_call_details.method == _WATCH:
                CALLER.set(UNAUTHENTICATED)
                return await continuation(handler_call_details)
            if error.reason in ("missing", "certificate") and self._authenticator.takes_certificates:
                return self._by_certificate(await continuation(handler_call_details), handler_call_details.method)
            return _refusing(partial(self._refuse, error))
        return await continuation(handler_call_details)

    async def _refuse(self, error: RefusedError, requests: object, context: Context) -> None:
        async with abort_on_error(context):
            self._audit.refused("grpc", error.reason, context.peer())
            raise error

    async def _deny(self, error: PermissionDeniedError, requests: object, context: Context) -> None:
        async with abort_on_error(context):
            raise error

    async def _identify(self, context: Context, method: str) -> None:
        async with abort_on_error(context):
            try:
                caller = self._authenticator.authenticate(None, name_of_peer(context.auth_context()))
                CALLER.set(caller)
                _authorize(caller, method)
            except RefusedError as error:
                self._audit.refused("grpc", error.reason, context.peer())
                raise

    def _by_certificate(self, handler: Handler | None, method: str) -> Handler:
        """The handler behind a look at the client's certificate."""
        if handler is None:  # there is no such method
            return handler  # type: ignore[return-value]  # gRPC answers UNIMPLEMENTED
        kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
        name = "_".join(kind)
        behaviour: Callable[..., Any] = getattr(handler, name)
        make: Callable[..., Handler] = getattr(grpc, f"{name}_rpc_method_handler")
        if inspect.isasyncgenfunction(behaviour):

            async def stream(request: object, context: Context) -> AsyncIterator[object]:
                await self._identify(context, method)
                async for response in behaviour(request, context):
                    yield response

            return make(stream, handler.request_deserializer, handler.response_serializer)

        async def run(request: object, context: Context) -> object:
            await self._identify(context, method)
            return await behaviour(request, context)

        return make(run, handler.request_deserializer, handler.response_serializer)


def _authorize(caller: Caller, method: str) -> None:
    """Raises `PermissionDeniedError` for prompts of a caller who may send none."""
    if method.startswith(_INFERENCE) and method != _MODELS:
        require_inference(caller)


def _refusing(refuse: Callable[..., Awaitable[None]]) -> Handler:
    """A streaming handler, which reads no message: a unary one would read the complete request first."""
    return grpc.stream_stream_rpc_method_handler(refuse)


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata or ():
        if key == AUTHORIZATION and isinstance(value, str):
            return value
    return None


class RunningCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """The tasks of the running calls: `grpc.aio.Server.stop` cancels them, and returns before they have ended."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Every call passes here, in the task that it runs in."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await continuation(handler_call_details)

    def cancel(self) -> None:
        """Cancel all that run."""
        for task in self._tasks:
            task.cancel()

    async def ended(self) -> None:
        """Wait until no call runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.sleep(0)  # grpc's own task of a call ends after ours
