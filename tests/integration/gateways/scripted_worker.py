"""A worker made of a gRPC server and a script: records what a gateway sends, sends what the test orders.

async with ScriptedWorker("p0") as p0: ...      dispatch = await p0.next_dispatch()      p0.say(update)
await p0.break_session()                        await p0.restart()                        same address, new incarnation
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc
import msgspec

from disagg.connections.shell.guard import ClusterGuard
from disagg.proto.ids import AttemptKey, Incarnation
from disagg.proto.messages import (
    AuditReport,
    AuditRequest,
    Cancel,
    Dispatch,
    ForgetTenant,
    GatewayToWorker,
    SessionHello,
    StepUpdate,
    WatchRequest,
    WorkerInfo,
    WorkerReport,
    encode,
)
from disagg.proto.services import (
    AUDIT,
    GATEWAY_ID_METADATA,
    SERVER_OPTIONS,
    SESSION,
    WATCH,
    WORKER_SERVICE,
    service_and_method,
)
from tests.support.router import worker_info
from tests.support.secret import SECRET

WAIT_S = 60.0
_Context = grpc.aio.ServicerContext[Any, Any]
_down: msgspec.msgpack.Decoder[GatewayToWorker] = msgspec.msgpack.Decoder(GatewayToWorker)


class ScriptedWorker:
    """Accepts one session at a time."""

    def __init__(self, worker_id: str, **info: Any) -> None:
        self.info: WorkerInfo = worker_info(worker_id, address="127.0.0.1:0", **info)
        self.hello: bytes | None = None
        """Sent in place of a proper hello."""
        self.greets = True
        self.gateways: list[str] = []
        """Who opened a session, by metadata."""
        self.num_watches = 0
        self._dispatches: asyncio.Queue[Dispatch] = asyncio.Queue()
        self._cancels: asyncio.Queue[Cancel] = asyncio.Queue()
        self.forgotten: asyncio.Queue[bytes] = asyncio.Queue()
        """Tags of tenants that are to be forgotten."""
        self._up: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._reports: asyncio.Queue[WorkerReport | None] = asyncio.Queue()
        self._calls: set[asyncio.Task[Any]] = set()
        """What serves the streams that are open."""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_listening()

    async def listen(self) -> None:
        """Take the address (any free port the first time)."""
        self._server = grpc.aio.server(interceptors=(ClusterGuard(SECRET),), options=SERVER_OPTIONS)
        handlers = {
            service_and_method(SESSION)[1]: grpc.stream_stream_rpc_method_handler(self._session),
            service_and_method(WATCH)[1]: grpc.unary_stream_rpc_method_handler(self._watch),
            service_and_method(AUDIT)[1]: grpc.unary_unary_rpc_method_handler(self._audit),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(WORKER_SERVICE, handlers),))
        port = self._server.add_insecure_port(self.info.address)
        self.info = msgspec.structs.replace(self.info, address=f"127.0.0.1:{port}")
        await self._server.start()

    async def stop_listening(self) -> None:
        """Like a process that ends: all streams break."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None
            if self._calls:
                await asyncio.wait(self._calls, timeout=WAIT_S)
            # gRPC's own task around each of them ends a few turns of the loop later.
            for _ in range(10):
                await asyncio.sleep(0)
        self._up, self._reports = asyncio.Queue(), asyncio.Queue()

    async def restart(self, incarnation: str) -> None:
        """Another incarnation at the same address."""
        await self.stop_listening()
        self.info = msgspec.structs.replace(self.info, incarnation=Incarnation(incarnation))
        await self.listen()

    def say(self, update: StepUpdate) -> None:
        """Send an update on the session."""
        self._up.put_nowait(encode(update))

    def say_raw(self, frame: bytes) -> None:
        """Send any bytes on the session."""
        self._up.put_nowait(frame)

    def end_session(self) -> None:
        """Close the session from this side, in good order."""
        self._up.put_nowait(None)

    def report(self, report: WorkerReport) -> None:
        """Send a report on the watch stream."""
        self._reports.put_nowait(report)

    def end_watch(self) -> None:
        """Close the report stream from this side."""
        self._reports.put_nowait(None)

    async def next_dispatch(self) -> Dispatch:
        """The next dispatch that arrives."""
        return await asyncio.wait_for(self._dispatches.get(), WAIT_S)

    async def next_cancel(self) -> AttemptKey:
        """The next cancel that arrives."""
        cancel = await asyncio.wait_for(self._cancels.get(), WAIT_S)
        return AttemptKey(cancel.request_id, cancel.attempt)

    async def _session(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        self._note_call()
        metadata = dict(context.invocation_metadata() or ())
        self.gateways.append(str(metadata[GATEWAY_ID_METADATA]))
        if not self.greets:
            await asyncio.Event().wait()
        yield self.hello or encode(SessionHello(info=self.info))
        reader = asyncio.create_task(self._read(requests))
        up = self._up = asyncio.Queue()
        try:
            while (frame := await up.get()) is not None:
                yield frame
        finally:
            reader.cancel()

    def _note_call(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for frame in requests:
            match _down.decode(frame):
                case Dispatch() as dispatch:
                    self._dispatches.put_nowait(dispatch)
                case Cancel() as cancel:
                    self._cancels.put_nowait(cancel)
                case ForgetTenant(tenant_tag=tag):
                    self.forgotten.put_nowait(tag)

    async def _watch(self, frame: bytes, context: _Context) -> AsyncIterator[bytes]:
        self._note_call()
        msgspec.msgpack.decode(frame, type=WatchRequest)
        self.num_watches += 1
        reports = self._reports = asyncio.Queue()
        while (report := await reports.get()) is not None:
            yield encode(report)

    async def _audit(self, frame: bytes, context: _Context) -> bytes:
        msgspec.msgpack.decode(frame, type=AuditRequest)
        return encode(
            AuditReport(worker_id=self.info.worker_id, incarnation=self.info.incarnation, counts={"sequences": 0})
        )
