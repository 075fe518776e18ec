"""The calls that run on the gRPC server, so that a stop can wait for their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio


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
