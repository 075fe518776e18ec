"""The gateway's streams to one worker: its session, and its reports. The death of a worker is detected here, by the
break of its session; the session of a worker that hangs does not break (`connections/failure_detector.py`).

    connect ──hello──> WorkerUp ──frames──> FromWorker, WorkerReported ──break──> WorkerLost ──pause──> connect

A link writes its session from one bounded queue; a worker that reads nothing until the queue is full is treated as
lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc.aio
import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import first_to_end, is_stale, open_channel
from disagg.proto.errors import DisaggError, UnavailableError
from disagg.proto.ids import GatewayId
from disagg.proto.messages import AuditReport, AuditRequest, WatchRequest, WorkerInfo, encode
from disagg.proto.services import AUDIT, GATEWAY_ID_METADATA, SESSION, WATCH
from disagg.router.config import RouterConfig
from disagg.router.requests.events import Event, FromWorker, WorkerLost, WorkerReported, WorkerUp
from disagg.router.shell import wire

logger = logging.getLogger(__name__)

_SessionCall = grpc.aio.StreamStreamCall[bytes, bytes]
_FAULTS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, msgspec.MsgspecError, DisaggError, TimeoutError)
"""Expected faults of a stream. Each ends the stream, but not the link."""


class WorkerLink:
    """The gateway's streams to one worker. Owner of its channel, queue and tasks."""

    def __init__(
        self,
        info: WorkerInfo,
        gateway_id: GatewayId,
        secret: ClusterSecret,
        config: RouterConfig,
        on_event: Callable[[Event], None],
    ) -> None:
        self.info = info
        self._gateway_id = gateway_id
        self._secret = secret
        self._config = config
        self._on_event = on_event
        self._channel = open_channel(info.address, secret)
        self._opened_at = time.time()
        self._outbox: asyncio.Queue[wire.Outgoing] = asyncio.Queue(config.outbox_frames)
        self._overflow = asyncio.Event()
        self._watch_again = False
        self._is_up = False
        self._had_session = False
        """Whether the latest try established a session."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether the session is established."""
        return self._is_up

    def start(self) -> None:
        """Begin to connect, and to connect again whenever the session breaks."""
        self._task = asyncio.create_task(self._run(), name=f"link-{self.info.worker_id}")

    async def stop(self, flush_s: float) -> None:
        """Send the queued frames, for at most `flush_s` seconds, then close. With 0 the tasks are cancelled at once."""
        if self._is_up and flush_s:
            try:
                await asyncio.wait_for(self._outbox.join(), flush_s)
            except TimeoutError:
                logger.warning(
                    "worker %s: %d frames were not sent before the link was closed",
                    self.info.worker_id,
                    self._outbox.qsize(),
                )
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close(None)

    def send(self, message: wire.Outgoing) -> None:
        """Queue a frame for the session. Without a session it is dropped: the core gets `WorkerLost` anyway."""
        if not self._is_up:
            return
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflow.set()

    def watch_again(self) -> None:
        """Open a new report stream after the present report."""
        self._watch_again = True

    async def audit(self, timeout_s: float) -> AuditReport:
        """The holdings of the worker. Raises `UnavailableError` if it does not answer."""
        try:
            call = self._channel.unary_unary(AUDIT, None, None)
            frame = await call(encode(AuditRequest()), timeout=timeout_s, metadata=self._secret.metadata)
            return wire.audit_report(frame)
        except grpc.aio.AioRpcError as error:
            message = f"{self.info.worker_id} does not answer: {error.details()}"
            raise UnavailableError(message, "worker_lost") from error

    async def _run(self) -> None:
        pause_s = self._config.min_reconnect_s
        while True:
            self._had_session = False
            try:
                await self._connect()
            except _FAULTS as error:
                logger.info(
                    "worker %s at %s: no session (%s); connecting again",
                    self.info.worker_id,
                    self.info.address,
                    _describe(error),
                )
            except Exception:
                # A bug. It ends the session only: the worker counts as lost, its requests are requeued.
                logger.exception("worker %s: session ended by a bug; connecting again", self.info.worker_id)
            pause_s = (
                self._config.min_reconnect_s if self._had_session else min(2 * pause_s, self._config.max_reconnect_s)
            )
            await asyncio.sleep(pause_s)

    async def _connect(self) -> None:
        if is_stale(self._opened_at, self._secret, time.time()):
            await self._channel.close(None)
            self._channel, self._opened_at = open_channel(self.info.address, self._secret), time.time()
        open_session = self._channel.stream_stream(SESSION, None, None)
        call: _SessionCall = open_session(
            None, metadata=((GATEWAY_ID_METADATA, self._gateway_id), *self._secret.metadata)
        )
        try:
            frame = await asyncio.wait_for(_read(call), self._config.hello_timeout_s)
            await self._session(call, wire.hello(frame, self.info.worker_id))
        finally:
            call.cancel()

    async def _session(self, call: _SessionCall, info: WorkerInfo) -> None:
        self.info = info
        self._outbox = asyncio.Queue(self._config.outbox_frames)
        self._overflow.clear()
        self._is_up = self._had_session = True
        try:
            self._on_event(WorkerUp(info))
            await first_to_end(self._read_session(call), self._write_session(call), self._watch(), self._overflowed())
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
        """Read reports while the session is established, on one stream after the other."""
        while True:
            self._watch_again = False
            call = self._channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=self._secret.metadata)
            try:
                async for frame in call:
                    self._on_event(WorkerReported(wire.report(frame)))
                    if self._watch_again:
                        break
            except _FAULTS as error:
                logger.info(
                    "worker %s: report stream broke, opening it again: %s", self.info.worker_id, _describe(error)
                )
            finally:
                call.cancel()
            if not self._watch_again:
                await asyncio.sleep(self._config.min_reconnect_s)


async def _read(call: _SessionCall) -> bytes:
    frame = await call.read()
    if not isinstance(frame, bytes):  # EOF
        raise UnavailableError("the worker closed the session", "worker_lost")
    return frame


def _describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
