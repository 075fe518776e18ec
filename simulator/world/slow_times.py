"""Times in which a machine, or a link, is slower than its model says: a core that is taken away, a backup, swapping.

Work that is under way when such a time begins or ends continues at the other pace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.proto.ids import WorkerId
from disagg.simulator.world.clock import EventLoop
from disagg.step_times.interface import StepTimes, StepWork


@dataclass(frozen=True, kw_only=True)
class SlowTime:
    """A time, from `begins_s` to `ends_s`, in which steps or transfers take `factor` times as long; overlapping ones
    multiply. Workers measure their steps at their start within a time that begins before 0 and ends at 0."""

    begins_s: float
    ends_s: float = math.inf
    factor: float
    worker_id: WorkerId | None = None
    """The slow worker; None for all workers."""
    what: Literal["steps", "links"] = "steps"

    def __post_init__(self) -> None:
        if not self.begins_s < self.ends_s:
            raise ValueError(f"slow_times: expected an end after the begin at {self.begins_s}; got {self.ends_s}")
        if not 0.0 < self.factor < math.inf:
            raise ValueError(f"slow_times: expected a factor above 0; got {self.factor}")

    def concerns(self, worker_id: WorkerId, what: str) -> bool:
        """Whether it slows down the steps or the links of this worker."""
        return self.what == what and self.worker_id in (None, worker_id)


def factor_at(slow_times: Sequence[SlowTime], now: float) -> float:
    """The slowdown from `now` on."""
    return math.prod(each.factor for each in slow_times if each.begins_s <= now < each.ends_s)


def factor_before(slow_times: Sequence[SlowTime], now: float) -> float:
    """The slowdown just before `now`."""
    return math.prod(each.factor for each in slow_times if each.begins_s < now <= each.ends_s)


class SlowedSteps:
    """The step times of one worker with its slow times. Implements `StepTimes`."""

    def __init__(self, times: StepTimes, slow_times: Sequence[SlowTime], loop: EventLoop) -> None:
        self._times = times
        self._slow_times = slow_times
        self._loop = loop
        self._changes = sorted({when for each in slow_times for when in (each.begins_s, each.ends_s)})

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step that begins now."""
        left_s, began = self._times.step_s(work), self._loop.now
        now = began
        for change in self._changes:
            if change <= now:
                continue
            factor = factor_at(self._slow_times, now)
            if now + left_s * factor <= change:
                break
            left_s -= (change - now) / factor
            now = change
        return now + left_s * factor_at(self._slow_times, now) - began
