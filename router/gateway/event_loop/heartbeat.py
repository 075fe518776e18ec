"""The gateway's beats to the controller, from a thread: they go on while the event loop is held by work.

    start ──Follow──> beats, each with the length of the loop's present turn ──break──> pause ──> Follow ...

So the controller can tell a gateway that is busy from a process that is stopped, and a loop that will never go on from
both. Membership goes over `ControllerLink`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import grpc

from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections.channels import open_blocking_channel
from disagg.proto.control import HEARTBEAT_S, GatewayHeartbeat
from disagg.proto.ids import GatewayId
from disagg.proto.messages import encode
from disagg.proto.services import FOLLOW

logger = logging.getLogger(__name__)

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
JOIN_TIMEOUT_S = 5.0


class HeartbeatConnection:
    """Owner of its thread and channel.

    Args:
        gateway_id: whose beats they are.
        resolve: host:port of the controller now; may block.
        secret: of the cluster.
        state: for how long the loop has been in its present turn, and what it does; called on a thread of gRPC.
    """

    def __init__(
        self,
        gateway_id: GatewayId,
        resolve: Callable[[], str],
        secret: ClusterSecret,
        state: Callable[[], tuple[float, str]],
    ) -> None:
        self._gateway_id = gateway_id
        self._resolve = resolve
        self._secret = secret
        self._state = state
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        """Cancelled by `stop`; guarded by the lock, which also orders it against `stop`."""
        self._stood = False
        """Whether the controller took a beat on the latest line: gRPC asks for the next one when one was sent."""
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """End it. Idempotent."""
        with self._lock:
            self._stopped.set()
            if self._call is not None:
                self._call.cancel()  # type: ignore[no-untyped-call]
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)  # longer only where `resolve` hangs

    def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        while not self._stopped.is_set():
            self._stood = False
            try:
                self._send_beats()
            except Exception as error:  # whatever `resolve` or gRPC met
                logger.debug("the line of beats to the controller broke: %r", error)
            if self._stood:
                pause_s = MIN_PAUSE_S
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _send_beats(self) -> None:
        with open_blocking_channel(self._resolve(), self._secret) as channel:
            with self._lock:
                if self._stopped.is_set():
                    return
                follow = channel.stream_stream(FOLLOW, None, None)
                self._call = call = follow(self._beats(), metadata=self._secret.metadata)
            try:
                for _ in call:
                    pass
            finally:
                with self._lock:
                    self._call = None

    def _beats(self) -> Iterator[bytes]:
        """Read by gRPC, one ahead, until the line breaks."""
        while True:
            turn_s, doing = self._state()
            yield encode(GatewayHeartbeat(gateway_id=self._gateway_id, pid=os.getpid(), turn_s=turn_s, doing=doing))
            if self._stopped.wait(HEARTBEAT_S):
                return
            self._stood = True
