"""The shell around the router core: sockets, clock and tasks. It decides nothing.

    RouterServer   feeds every event to the core, executes its commands, wakes it in time      one per gateway
    WorkerLink     one worker: channel, session, report stream; comes back after a break       one per worker

    link: connect ──hello──> WorkerUp ──frames──> FromWorker, WorkerReported ──break──> WorkerLost ──pause──> connect

Everything runs on one event loop. A link writes its session from one bounded queue; a worker that reads nothing until
the queue is full is treated as lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

import grpc.aio
import msgspec

from disagg.proto.errors import DisaggError, UnavailableError
from disagg.proto.ids import GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import AuditReport, AuditRequest, WatchRequest, WorkerInfo, encode
from disagg.proto.services import AUDIT, CHANNEL_OPTIONS, GATEWAY_ID_METADATA, SESSION, WATCH
from disagg.router import wire
from disagg.router.api import ClusterView, RequestHandle, RequestTrace, RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.core import RouterCore
from disagg.router.events import (
    CancelOn,
    CancelRequest,
    Command,
    ConnectPair,
    Dispatch,
    DrainWorker,
    Emit,
    Event,
    Fail,
    Finish,
    FromWorker,
    Submit,
    Tick,
    WatchAgain,
    WorkerIsDrained,
    WorkerLost,
    WorkerReported,
    WorkerUp,
)
from disagg.router.handle import Handle

logger = logging.getLogger(__name__)

_SessionCall = grpc.aio.StreamStreamCall[bytes, bytes]
_FAULTS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, msgspec.MsgspecError, DisaggError, TimeoutError)
"""What may happen to a stream; all of it ends the stream, and none of it the link."""

_FLUSH_S = 0.5
"""How long `RouterServer.stop` lets the last cancels go out."""


class WorkerLink:
    """The gateway's streams to one worker. Owner of its channel, queue and tasks; see the module docstring."""

    def __init__(
        self, info: WorkerInfo, gateway_id: GatewayId, config: RouterConfig, on_event: Callable[[Event], None]
    ) -> None:
        self.info = info
        self._gateway_id = gateway_id
        self._config = config
        self._on_event = on_event
        self._channel = grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS)
        self._outbox: asyncio.Queue[wire.Outgoing] = asyncio.Queue(config.outbox_frames)
        self._overflow = asyncio.Event()
        self._watch_again = False
        self._is_up = False
        self._greeted = False
        """Whether the latest try got as far as a session."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the worker greeted and the session stands."""
        return self._is_up

    def start(self) -> None:
        """Begin to connect, and to connect again whenever the session breaks."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self.info.worker_id}")

    async def stop(self, flush_s: float) -> None:
        """Send what is queued, for at most `flush_s` seconds, then close. With 0 the tasks are cancelled at once."""
        if self._is_up and flush_s:
            try:
                await asyncio.wait_for(self._outbox.join(), flush_s)
            except TimeoutError:
                logger.warning("%s: %d frames were not sent", self.info.worker_id, self._outbox.qsize())
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    def send(self, message: wire.Outgoing) -> None:
        """Queue a frame for the session. Without a session it is dropped: the core hears of the loss anyway."""
        if not self._is_up:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflow.set()

    def watch_again(self) -> None:
        """Open a new report stream once the report at hand is dealt with."""
        self._watch_again = True

    async def audit(self, timeout_s: float) -> AuditReport:
        """What the worker holds. Raises `UnavailableError` if it does not answer."""
        try:
            call = self._channel.unary_unary(AUDIT, None, None)
            return wire.audit_report(await call(encode(AuditRequest()), timeout=timeout_s))
        except grpc.aio.AioRpcError as error:
            message = f"{self.info.worker_id} does not answer: {error.details()}"
            raise UnavailableError(message, "worker_lost") from error

    async def _run(self) -> None:
        pause_s = self._config.min_reconnect_s
        while True:
            self._greeted = False
            try:
                await self._connect()
            except _FAULTS as error:
                logger.info("%s at %s: %s", self.info.worker_id, self.info.address, _describe(error))
            except Exception:
                # A fault of ours. The link is the barrier: the worker counts as lost, its requests go elsewhere.
                logger.exception("%s: the session failed", self.info.worker_id)
            pause_s = self._config.min_reconnect_s if self._greeted else min(2 * pause_s, self._config.max_reconnect_s)
            await asyncio.sleep(pause_s)

    async def _connect(self) -> None:
        open_session = self._channel.stream_stream(SESSION, None, None)
        call: _SessionCall = open_session(None, metadata=((GATEWAY_ID_METADATA, self._gateway_id),))
        try:
            frame = await asyncio.wait_for(_read(call), self._config.hello_timeout_s)
            await self._session(call, wire.hello(frame, self.info.worker_id))
        finally:
            call.cancel()

    async def _session(self, call: _SessionCall, info: WorkerInfo) -> None:
        self.info = info
        self._outbox = asyncio.Queue(self._config.outbox_frames)
        self._overflow.clear()
        self._is_up = self._greeted = True
        try:
            self._on_event(WorkerUp(info))
            await _first_to_end(self._read_session(call), self._write_session(call), self._watch(), self._overflowed())
        finally:
            self._is_up = False
            self._on_event(WorkerLost(info.worker_id, info.incarnation))

    async def _read_session(self, call: _SessionCall) -> None:
        while True:
            update = wire.step_update(await _read(call))
            self._on_event(FromWorker(self.info.worker_id, self.info.incarnation, update))

    async def _write_session(self, call: _SessionCall) -> None:
        while True:
            message = await self._outbox.get()
            await call.write(encode(message))
            self._outbox.task_done()

    async def _overflowed(self) -> None:
        await self._overflow.wait()
        raise UnavailableError(f"{self._outbox.qsize()} frames wait for {self.info.worker_id}", "worker_lost")

    async def _watch(self) -> None:
        """Follow the reports for as long as the session stands, on one stream after the other."""
        while True:
            self._watch_again = False
            call = self._channel.unary_stream(WATCH, None, None)(encode(WatchRequest()))
            try:
                async for frame in call:
                    self._on_event(WorkerReported(wire.report(frame)))
                    if self._watch_again:
                        break
            except _FAULTS as error:
                logger.info("%s: reports broke: %s", self.info.worker_id, _describe(error))
            finally:
                call.cancel()
            if not self._watch_again:
                await asyncio.sleep(self._config.min_reconnect_s)


class RouterServer:
    """Implements `api.Router`. Owner of the core and of all links; lives on one event loop.

    Raises (at construction):
        ValueError: if two workers have one id.
    """

    def __init__(
        self,
        config: RouterConfig,
        gateway_id: GatewayId,
        workers: Sequence[WorkerInfo],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._gateway_id = gateway_id
        self._clock = clock
        self._core = RouterCore(config, gateway_id)
        self._initial = {info.worker_id: info for info in workers}
        if len(self._initial) != len(workers):
            raise ValueError("two workers have one id")
        self._links: dict[WorkerId, WorkerLink] = {}
        self._draining: dict[WorkerId, Incarnation] = {}
        self.on_drained: Callable[[WorkerId, Incarnation], None] = lambda worker_id, incarnation: None
        """Called when nothing runs any more on a worker that was drained; set by whoever drains."""
        self._handles: dict[RequestId, Handle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._link_came_up = asyncio.Event()
        self._stopped = False

    # ---------------------------------------------------------------- life

    async def start(self) -> None:
        """Begin to connect to the workers; returns at once. See `wait_until_connected`."""
        for info in self._initial.values():
            await self.add_worker(info)

    async def wait_until_connected(self, timeout_s: float) -> None:
        """Until every worker greeted. Raises `TimeoutError` naming those that did not."""
        try:
            async with asyncio.timeout(timeout_s):
                while not all(link.is_up for link in self._links.values()):
                    self._link_came_up.clear()
                    await self._link_came_up.wait()
        except TimeoutError:
            missing = sorted(worker_id for worker_id, link in self._links.items() if not link.is_up)
            raise TimeoutError(f"no session with {', '.join(missing)} after {timeout_s:g} s") from None

    async def stop(self) -> None:
        """Fail what still runs, tell the workers, and end every task."""
        for handle in list(self._handles.values()):
            handle.fail(UnavailableError("the router is stopping", "shutting_down"))
            self._cancel(handle.request_id)
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(link.stop(_FLUSH_S) for link in self._links.values()))
        self._links.clear()

    async def add_worker(self, info: WorkerInfo) -> None:
        """Follow a worker from now on; a link to the same worker id (an earlier address) is replaced."""
        await self.remove_worker(info.worker_id)
        link = WorkerLink(info, self._gateway_id, self._config, self._handle_event)
        self._links[info.worker_id] = link
        link.start()

    async def remove_worker(self, worker_id: WorkerId) -> None:
        """Follow a worker no longer; its attempts are placed elsewhere. Does nothing for an unknown one."""
        link = self._links.get(worker_id)
        if link is not None:
            # First the core, which must not dispatch to a link that is gone.
            self._handle_event(WorkerLost(worker_id, link.info.incarnation))
            del self._links[worker_id]
            self._draining.pop(worker_id, None)
            await link.stop(flush_s=0)

    def drain_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Place nothing on that life of a worker any more; `on_drained` says when nothing of ours runs there."""
        link = self._links.get(worker_id)
        if link is None or self._draining.get(worker_id) == incarnation:
            return
        self._draining[worker_id] = incarnation
        if link.is_up and link.info.incarnation == incarnation:
            self._handle_event(DrainWorker(worker_id, incarnation))
        else:
            self.on_drained(worker_id, incarnation)

    # ---------------------------------------------------------------- api.Router

    def submit(self, request: RoutedRequest, arrival: float) -> RequestHandle:
        """See `api.Router`."""
        if self._stopped:
            raise UnavailableError("the router is stopping", "shutting_down")
        handle = Handle(request.request_id, self._cancel)
        if self._handles.setdefault(request.request_id, handle) is not handle:
            raise ValueError(f"request id {request.request_id} is in use")
        self._handle_event(Submit(request, arrival))
        if handle.error is not None:
            raise handle.error
        return handle

    def view(self) -> ClusterView:
        """See `api.Router`."""
        return self._core.view()

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        """See `api.Router`."""
        return self._core.trace(request_id)

    # ---------------------------------------------------------------- for operators and tests

    def holdings(self) -> dict[str, int]:
        """See `RouterCore.holdings`."""
        return self._core.holdings()

    def check_integrity(self) -> list[str]:
        """See `RouterCore.check_integrity`."""
        return self._core.check_integrity()

    def counters(self) -> dict[str, int]:
        """See `RouterCore.counters`."""
        return dict(self._core.counters)

    async def audit(self, timeout_s: float = 5.0) -> list[AuditReport]:
        """What every worker holds. Raises `UnavailableError` if one does not answer."""
        return list(await asyncio.gather(*(link.audit(timeout_s) for link in self._links.values())))

    # ---------------------------------------------------------------- events and commands

    def _cancel(self, request_id: RequestId) -> None:
        self._handle_event(CancelRequest(request_id))

    def _handle_event(self, event: Event) -> None:
        if self._stopped:
            return
        if isinstance(event, WorkerUp):
            self._link_came_up.set()
        for command in self._core.handle(event, self._clock()):
            self._execute(command)
        self._set_timer()
        self._keep_draining(event)

    def _keep_draining(self, event: Event) -> None:
        """A worker that drains is empty when its session breaks, and drains on when it is back."""
        if isinstance(event, WorkerLost) and self._draining.get(event.worker_id) == event.incarnation:
            self.on_drained(event.worker_id, event.incarnation)
        elif isinstance(event, WorkerUp) and self._draining.get(event.info.worker_id) == event.info.incarnation:
            self._handle_event(DrainWorker(event.info.worker_id, event.info.incarnation))

    def _execute(self, command: Command) -> None:
        match command:
            case Emit(request_id=request_id, token_ids=token_ids):
                self._handles[request_id].put(token_ids)
            case Dispatch(worker_id=worker_id, message=message):
                self._links[worker_id].send(message)
            case CancelOn(worker_id=worker_id, key=key):
                self._links[worker_id].send(wire.cancel(key))
            case ConnectPair(prefill_id=prefill_id, decode_peer=peer):
                self._links[prefill_id].send(wire.connect(peer))
            case Finish(request_id=request_id, completion=completion):
                self._handles.pop(request_id).finish(completion)
            case Fail(request_id=request_id, error=error):
                self._handles.pop(request_id).fail(error)
            case WatchAgain(worker_id=worker_id):
                self._links[worker_id].watch_again()
            case WorkerIsDrained(worker_id=worker_id, incarnation=incarnation):
                self.on_drained(worker_id, incarnation)

    def _set_timer(self) -> None:
        due = self._core.next_wakeup()
        if due == self._timer_due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due, self._timer = due, None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_due = None
        self._handle_event(Tick())


async def _read(call: _SessionCall) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):  # EOF
        raise UnavailableError("the worker closed the session", "worker_lost")
    return frame


async def _first_to_end(*coroutines: Coroutine[None, None, None]) -> None:
    """Run all until one ends; end the others, wait for them, and raise what the first one raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
