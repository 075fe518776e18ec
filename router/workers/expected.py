"""Workers that will come, by the controller's messages: requests wait for them if no present worker could take them.
Pure.

Owner: the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from disagg.proto.ids import WorkerId, kind_of
from disagg.proto.messages import RoleName

CONNECT_S = 5.0
"""Seconds for which a worker that is no longer expected is still waited for: it may be ready and not connected yet."""


class ExpectedWorkers:
    """The time on the router's clock at which each worker is expected to be ready."""

    def __init__(self) -> None:
        self._expected: dict[WorkerId, tuple[float, float]] = {}
        """For each worker: when it is expected, and until when it is waited for."""

    def expect(self, in_s: Mapping[WorkerId, float], now: float) -> None:
        """Expect these workers, in that many seconds, and no others."""
        kept = {
            worker_id: (min(at, now), min(until, now + CONNECT_S))
            for worker_id, (at, until) in self._expected.items()
            if worker_id not in in_s and until > now
        }
        self._expected = kept | {worker_id: (now + seconds, math.inf) for worker_id, seconds in in_s.items()}

    def came(self, worker_id: WorkerId) -> None:
        """Stop expecting a worker that is connected."""
        self._expected.pop(worker_id, None)

    def next_in_s(self, role: RoleName, now: float) -> float | None:
        """Seconds until the next worker of a role is expected; None where none is."""
        waits = [
            max(0.0, at - now)
            for worker_id, (at, until) in self._expected.items()
            if until > now and _may_have(worker_id, role)
        ]
        return min(waits, default=None)

    def known_until(self, now: float) -> float:
        """When fewer workers may be expected without another message; infinite if that does not happen."""
        return min((until for _, until in self._expected.values() if until > now), default=math.inf)


def _may_have(worker_id: WorkerId, role: RoleName) -> bool:
    """Whether a worker may have a role, by the pool in its name: workers of other pools have both roles."""
    pool = kind_of(worker_id).rpartition("-")[0]
    return pool == role or pool not in ("prefill", "decode")
