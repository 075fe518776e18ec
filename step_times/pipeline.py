"""Steps that pass the stages of a worker one after the other, several of them at once (pipeline parallelism).

stage 0   | 1 | 2 | 3 |
stage 1       | 1 | 2 | 3 |        n equal steps over p stages take n + p - 1 stage times
stage 2           | 1 | 2 | 3 |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Pipeline:
    """The times at which the stages of one worker are free. As many steps are under way at once as there are stages."""

    def __init__(self, num_stages: int) -> None:
        self._free = [0.0] * num_stages
        """For each stage, when it has ended its last step, in seconds."""
        self._ends: deque[float] = deque(maxlen=num_stages)
        """When the latest steps end, of which no more are under way than there are stages."""

    @property
    def next_at(self) -> float:
        """The earliest time in seconds at which another step can begin: the first stage is free by then, and a step
        fewer than there are stages is under way."""
        oldest = self._ends[0] if len(self._ends) == len(self._free) else 0.0
        return max(self._free[0], oldest)

    @property
    def ended(self) -> float:
        """When the last stage ends the latest step, in seconds; 0 before the first step."""
        return self._free[-1]

    def launch(self, at: float, stages_s: Sequence[float]) -> float:
        """Begin a step at `at`, or once the first stage is free; the stages take `stages_s`. Returns when it ends."""
        for stage, seconds in enumerate(stages_s):
            at = max(at, self._free[stage]) + seconds
            self._free[stage] = at
        self._ends.append(at)
        return at

    def launch_equal(self, stages_s: Sequence[float], number: int) -> None:
        """Begin `number` equal steps, one as soon as the one before it has left the first stage: each further step
        leaves a stage as much later as the slowest stage up to there takes."""
        self.launch(0.0, stages_s)
        slowest = 0.0
        for stage, seconds in enumerate(stages_s):
            slowest = max(slowest, seconds)
            self._free[stage] += (number - 1) * slowest
