"""The gateway's heartbeats to the controller, from a thread: they continue while the event loop is busy.

    start ──Follow──> heartbeats, each with the length of the loop's present turn ──break──> pause ──> Follow ...

So the controller can distinguish a gateway that is busy, a process that is stopped, and a loop that will never go on.
The membership goes over `ControllerLink`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.blocking_stream import MAX_PAUSE_S, MIN_PAUSE_S, BlockingStream, Resolve
from disagg.proto.control import HEARTBEAT_S, GatewayHeartbeat
from disagg.proto.ids import GatewayId
from disagg.proto.messages import encode
from disagg.proto.services import FOLLOW

logger = logging.getLogger(__name__)


class HeartbeatConnection(BlockingStream):
    """Sends heartbeats from `start` to `stop`.

    Args:
        gateway_id: of the sender.
        resolve: host:port of the controller now; may block.
        secret: of the cluster.
        name: of its process.
        state: for how long the loop has been in its present turn, and what it does; called on a thread of gRPC.
    """

    def __init__(
        self,
        gateway_id: GatewayId,
        resolve: Resolve,
        secret: ClusterSecret,
        state: Callable[[], tuple[float, str]],
        name: str = "gateway",
    ) -> None:
        super().__init__(FOLLOW, resolve, secret)
        self._gateway_id, self._name = gateway_id, name
        self._state = state
        self._was_sent = False
        """Whether the controller took a heartbeat in the latest call: gRPC reads the next one after it has sent one."""

    def start(self) -> None:
        """Start the heartbeat thread; returns at once."""
        self._start("heartbeat", self._run)

    def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        while not self._stopped.is_set():
            self._was_sent = False
            try:
                for _ in self._replies(self._heartbeats()):
                    pass
            except Exception as error:  # of `resolve` or gRPC
                logger.debug("the heartbeat connection to the controller broke, next try in %.1f s: %r", pause_s, error)
            if self._was_sent:
                pause_s = MIN_PAUSE_S
            self._stopped.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _heartbeats(self) -> Iterator[bytes]:
        """Yield encoded heartbeats. gRPC reads them, one ahead, until the call ends."""
        while True:
            turn_s, doing = self._state()
            yield encode(
                GatewayHeartbeat(
                    gateway_id=self._gateway_id, pid=os.getpid(), turn_s=turn_s, doing=doing, name=self._name
                )
            )
            if self._stopped.wait(HEARTBEAT_S):
                return
            self._was_sent = True
