"""A worker process's line to the controller: registers, registers again whenever the line breaks, shows that the worker
lives, and hears when it is not wanted.

    start(info) ──Register──> welcome, beats ... ──break──> pause ──> resolve() ──Register──> ...
                              unwanted ──> on_unwanted()

Losing the controller ends nothing: the worker serves on, and the line is tried again for ever. It runs on a thread of
its own with blocking calls, so that the worker's event loop stays the only one of its process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc
import msgspec

from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections.channels import open_blocking_channel
from disagg.proto.control import (
    HEARTBEAT_S,
    ControllerToWorker,
    WorkerFailed,
    WorkerHeartbeat,
    WorkerHello,
    WorkerRejected,
)
from disagg.proto.ids import WorkerId
from disagg.proto.messages import WorkerInfo, decoder, encode
from disagg.proto.services import REGISTER

logger = logging.getLogger(__name__)

Resolve = Callable[[], str]
"""host:port of the controller now; may block. What it raises counts as a controller that is away."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
REPORT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 5.0


class RegisterLink:
    """Owner of its thread and channel.

    Args:
        resolve: asked before every try, because the controller may have moved.
        secret: of the cluster.
        on_unwanted: called on the link's thread when the worker is to end, once; must not block.
        turn_s: for how long the worker's engine has been in its present turn; called on a thread of gRPC.
    """

    def __init__(
        self,
        resolve: Resolve,
        secret: ClusterSecret,
        on_unwanted: Callable[[], None],
        turn_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._turn_s = turn_s
        self._resolve = resolve
        self._secret = secret
        self._on_unwanted = on_unwanted
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        """Cancelled by `stop`; guarded by the lock, which also orders it against `stop`."""
        self._thread: threading.Thread | None = None

    def start(self, info: WorkerInfo) -> None:
        """Begin to register this life of the worker; returns at once."""
        self._thread = threading.Thread(target=self._run, args=(info,), name="register", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave. Idempotent; must not be called by `on_unwanted`."""
        with self._lock:
            self._stopped.set()
            if self._call is not None:
                self._call.cancel()  # type: ignore[no-untyped-call]
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)  # longer only where `resolve` hangs

    def _run(self, info: WorkerInfo) -> None:
        pause_s = MIN_PAUSE_S
        while not self._stopped.is_set():
            welcome = False
            try:
                for reply in self._replies(WorkerHello(info=info)):
                    welcome = True
                    if isinstance(reply, WorkerRejected):
                        logger.warning("%s is not wanted: %s", info.worker_id, reply.reason)
                        self._on_unwanted()
                        return
            except (grpc.RpcError, msgspec.MsgspecError) as error:
                logger.info("%s: the line to the controller broke: %s", info.worker_id, _describe(error))
            except Exception as error:  # whatever `resolve` met
                logger.info("%s: the controller cannot be found: %r", info.worker_id, error)
            pause_s = MIN_PAUSE_S if welcome else min(2 * pause_s, MAX_PAUSE_S)
            self._stopped.wait(pause_s)

    def _messages(self, hello: WorkerHello) -> Iterator[bytes]:
        """Read by gRPC, one ahead, until the line breaks."""
        yield encode(hello)
        while not self._stopped.wait(HEARTBEAT_S):
            yield encode(WorkerHeartbeat(turn_s=self._turn_s()))

    def _replies(self, hello: WorkerHello) -> Iterator[ControllerToWorker]:
        with open_blocking_channel(self._resolve(), self._secret) as channel:
            with self._lock:
                if self._stopped.is_set():
                    return
                register = channel.stream_stream(REGISTER, None, None)
                self._call = call = register(self._messages(hello), metadata=self._secret.metadata)
            try:
                for frame in call:
                    yield decoder(ControllerToWorker).decode(frame)
            finally:
                with self._lock:
                    self._call = None


def report_failure(
    resolve: Resolve,
    secret: ClusterSecret,
    worker_id: WorkerId,
    error: str,
    start_id: str = "",
    timeout_s: float = REPORT_TIMEOUT_S,
) -> bool:
    """Tell the controller that this start of the worker failed; whether that arrived within about `timeout_s`."""
    message = encode(WorkerFailed(worker_id=worker_id, error=error, start_id=start_id))
    try:
        with open_blocking_channel(resolve(), secret) as channel:
            register = channel.stream_stream(REGISTER, None, None)
            for _ in register(iter((message,)), timeout=timeout_s, metadata=secret.metadata, wait_for_ready=True):
                pass
    except Exception as failure:  # whatever `resolve` met, or gRPC
        logger.warning("%s: cannot tell the controller that the start failed: %r", worker_id, failure)
        return False
    return True


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return repr(error)
