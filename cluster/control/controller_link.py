"""A process's connection to the controller: a worker registers, again whenever the connection breaks, and sends
heartbeats; the controller may reject it. And one blocking call, for operators' programs and for launchers.

    start(info) ──Register──> welcome, heartbeats ... ──break──> pause ──> resolve() ──Register──> ...
                              proven ──> reported in later hellos
                              rejected ──> on_rejected()

Without the controller the worker serves on, and tries to connect for ever. The connection has a thread of its own with
blocking calls, so that the worker's event loop stays the only one of its process.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import grpc
import msgspec

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.blocking_stream import MAX_PAUSE_S, MIN_PAUSE_S, BlockingStream, Resolve
from disagg.connections.shell.channels import open_blocking_channel
from disagg.proto.control import (
    HEARTBEAT_S,
    ControllerToWorker,
    ControlReply,
    ControlRequest,
    ForgetTenants,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerHello,
    WorkerProven,
    WorkerRejected,
    WorkerStarting,
)
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import WorkerId
from disagg.proto.messages import Message, WorkerInfo, decoder, encode
from disagg.proto.services import CONTROL, REGISTER

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 10.0
STAGE_S = 0.5
"""Stages of a start that end sooner than this, in seconds, are not reported."""
STAGE_TIMEOUT_S = 2.0


class RegisterLink(BlockingStream):
    """Registers one worker from `start` to `stop`.

    Args:
        resolve: called before every try, because the controller may have moved.
        secret: the cluster's secret.
        on_rejected: called once, on the link's thread, when the worker is to end; must not block.
        heartbeat: the worker's next heartbeat; called on a thread of gRPC.
        forget: called with tags of tenants whose KV is to be dropped, on the link's thread; must not block.
    """

    def __init__(
        self,
        resolve: Resolve,
        secret: ClusterSecret,
        on_rejected: Callable[[], None],
        heartbeat: Callable[[], WorkerHeartbeat] = WorkerHeartbeat,
        forget: Callable[[Sequence[bytes]], None] = lambda tags: None,
    ) -> None:
        super().__init__(REGISTER, resolve, secret)
        self._forget = forget
        self._heartbeat = heartbeat
        self._on_rejected = on_rejected

    def start(self, info: WorkerInfo) -> None:
        """Begin to register this incarnation of the worker; returns at once."""
        self._start("register", lambda: self._run(info))

    def _run(self, info: WorkerInfo) -> None:
        pause_s, decode, is_proven = MIN_PAUSE_S, decoder(ControllerToWorker).decode, False
        while not self._stopped.is_set():
            welcome = False
            try:
                for frame in self._replies(self._messages(WorkerHello(info=info, is_proven=is_proven))):
                    reply = decode(frame)
                    welcome = True
                    is_proven = is_proven or isinstance(reply, WorkerProven)
                    if isinstance(reply, ForgetTenants):
                        self._forget(reply.tenant_tags)
                    if isinstance(reply, WorkerRejected):
                        logger.warning("%s: the controller rejected it: %s; stopping", info.worker_id, reply.reason)
                        self._on_rejected()
                        return
            except (grpc.RpcError, msgspec.MsgspecError) as error:
                logger.info(
                    "%s: the connection to the controller broke: %s; reconnecting", info.worker_id, _describe(error)
                )
            except Exception as error:  # of `resolve`
                logger.info("%s: the controller cannot be found: %r; trying again", info.worker_id, error)
            pause_s = MIN_PAUSE_S if welcome else min(2 * pause_s, MAX_PAUSE_S)
            self._stopped.wait(pause_s)

    def _messages(self, hello: WorkerHello) -> Iterator[bytes]:
        """Messages of the worker; gRPC reads them, one ahead, until the call ends."""
        yield encode(hello)
        while not self._stopped.wait(HEARTBEAT_S):
            yield encode(self._heartbeat())


def report_failure(
    resolve: Resolve,
    secret: ClusterSecret,
    worker_id: WorkerId,
    error: str,
    start_id: str = "",
    timeout_s: float = REPORT_TIMEOUT_S,
) -> bool:
    """Report to the controller that this start of the worker failed. Returns whether the report arrived within about
    `timeout_s`."""
    try:
        _tell(resolve, secret, WorkerFailed(worker_id=worker_id, error=error, start_id=start_id), timeout_s)
    except Exception as failure:  # of `resolve` or gRPC
        logger.warning("%s: the failed start could not be reported to the controller: %r", worker_id, failure)
        return False
    return True


class StageReports:
    """Reports the stages of a worker's start to the controller, if they take `STAGE_S` or longer. Has a thread of its
    own until `close`.

    Args:
        resolve, secret: as in `RegisterLink`.
        worker_id, start_id: those of the worker that starts.
    """

    def __init__(self, resolve: Resolve, secret: ClusterSecret, worker_id: WorkerId, start_id: str) -> None:
        self._resolve, self._secret = resolve, secret
        self._worker_id, self._start_id = worker_id, start_id
        self._told: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stages", daemon=True).start()

    def __call__(self, doing: str) -> None:
        """Enter a stage; returns at once."""
        self._told.put(doing)

    def close(self) -> None:
        """End the reports. Idempotent."""
        self._told.put(None)

    def _run(self) -> None:
        begun = self._told.get()
        while (doing := begun) is not None:
            try:
                begun = self._told.get(timeout=STAGE_S)
            except queue.Empty:
                self._send(doing)
                begun = self._told.get()

    def _send(self, doing: str) -> None:
        message = WorkerStarting(worker_id=self._worker_id, doing=doing, start_id=self._start_id)
        try:
            _tell(self._resolve, self._secret, message, STAGE_TIMEOUT_S)
        except Exception as error:  # as above
            logger.info("%s: the controller could not be told that it %s: %r", self._worker_id, doing, error)


def _tell(resolve: Resolve, secret: ClusterSecret, message: Message, timeout_s: float) -> None:
    with open_blocking_channel(resolve(), secret) as channel:
        register = channel.stream_stream(REGISTER, None, None)
        frames = iter((encode(message),))
        for _ in register(frames, timeout=timeout_s, metadata=secret.metadata, wait_for_ready=True):
            pass


def call_controller(
    address: str, request: ControlRequest, secret: ClusterSecret, timeout_s: float = 5.0
) -> ControlReply:
    """Call the controller at `address`. Raises `UnavailableError` when it does not answer."""
    try:
        with open_blocking_channel(address, secret) as channel:
            control = channel.unary_unary(CONTROL, None, None)
            frame = control(encode(request), timeout=timeout_s, metadata=secret.metadata)
    except grpc.RpcError as error:
        details = cast(grpc.Call, error).details()
        message = f"the controller at {address} does not answer: {details}"
        raise UnavailableError(message, "controller_away") from error
    reply: ControlReply = decoder(ControlReply).decode(frame)
    return reply


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
