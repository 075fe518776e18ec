from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from disagg.gateway.event_loop.shell.heartbeat import HeartbeatConnection
from disagg.proto.ids import GatewayId
from tests.support.secret import SECRET


class Stopped(threading.Event):
    """Waits for nothing, and is set after so many waits."""

    def __init__(self, num_waits: int) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._num_waits = num_waits

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if len(self.waits) == self._num_waits:
            self.set()
        return self.is_set()


class Connection(HeartbeatConnection):
    """Its calls break with an error, each after so many heartbeats."""

    def __init__(self, *num_heartbeats: int) -> None:
        super().__init__(GatewayId("g0"), lambda: "", SECRET, lambda: (0.0, ""))
        self.stopped = Stopped(len(num_heartbeats) + sum(max(0, count - 1) for count in num_heartbeats))
        self._stopped = self.stopped
        self._script = iter(num_heartbeats)

    def _replies(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        for _ in range(next(self._script)):
            next(messages)
        raise grpc.RpcError


def test_the_pause_grows_while_no_call_stands_and_is_short_after_one_that_did() -> None:
    connection = Connection(0, 1, 1, 1, 1, 1, 3, 1, 2)
    connection._run()
    beat_s = 0.5
    assert connection.stopped.waits == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, beat_s, beat_s, 0.1, 0.2, beat_s, 0.1]
