"""The standard gRPC health service, for callers with and without a key."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2
from typing_extensions import override

from disagg.gateway.auth.auth import CALLER, UNAUTHENTICATED
from disagg.gateway.rpc.watch_places import WatchPlaces, address_of
from disagg.gateway.status import abort_on_error


class Health(health.aio.HealthServicer):  # type: ignore[misc]  # the library has no types
    """Health, without the method that the library declares and does not implement: gRPC would log a traceback a
    call."""

    def __init__(self, keyless: WatchPlaces) -> None:
        super().__init__()
        self._keyless = keyless

    @override
    async def List(self, request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is Check and Watch")

    @override
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Without a key there are few streams."""
        if CALLER.get() is not UNAUTHENTICATED:
            await super().Watch(request, context)
            return
        address = address_of(context.peer())
        async with abort_on_error(context):
            self._keyless.take(address)
        try:
            await super().Watch(request, context)
        finally:
            self._keyless.give_back(address)
