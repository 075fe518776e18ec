"""Steps that a worker without sequences measures by itself, so that what routers think of it does not stay as it was
when they stopped using it. Pure.

    nothing to do ──FIRST_PAUSE_S──> a few steps ──pause, doubled──> one step ──...──> one each LONGEST_PAUSE_S
                                                  └─ slower than at its best, or otherwise than the last one:
                                                     again after FIRST_PAUSE_S

A router predicts what a worker can do from the steps that it reports, and uses it by what it predicts: of a worker that
was slow for a while nobody would ever see that it is as fast as before, since it gets nothing to do. The same holds for
one whose machine was busy when it calibrated. One small step each few seconds shows it, and costs no request anything.

A step is one prompt of `NUM_TOKENS` tokens, in a block that is allocated for it. A command that comes waits for that
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.core.calibration import PREFILLS
from disagg.engine.plan import ModelRunner, ScheduledSequence, StepPlan
from disagg.engine.request import WindowTable, dummy_sequence
from disagg.proto.messages import StepSample

NUM_TOKENS = PREFILLS[0][0]
"""The first step of a calibration."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
NUM_CHANGED = 3
"""Steps in a row after work, and where one takes far less than the last: so many show a router a change of pace."""
CHANGED = 1.5
"""Far more, or far less: more than so many times as long, or less than the inverse."""
MOST_OF_TIME = 0.2
"""The largest share of an idle worker's time that goes there."""


class IdleSteps:
    """When the next one is due, and what it computes. Owner: the engine core.

    Args:
        runner: computes them.
        groups: the blocks of each cache group; they take one of each.
        calibration: steps that were measured at the start.
        fits: whether `NUM_TOKENS` are within the limits of a step.
    """

    def __init__(
        self, runner: ModelRunner, groups: Seq[BlockManager], calibration: Seq[StepSample], *, fits: bool
    ) -> None:
        self._runner = runner
        self._groups = groups
        self._fits = fits and runner.max_model_len > NUM_TOKENS
        self._best_ms = min((each.ms for each in calibration if _is_alike(each)), default=math.inf)
        self._last_ms = math.inf
        self._due: float | None = None
        """Time of the next idle step; None while the worker has something to do."""
        self._pause_s = FIRST_PAUSE_S
        self._num_left = NUM_CHANGED
        """Steps in a row that are still to be made."""
        self._taken: list[int] = []
        """Block of each group of the idle step under way; empty without one."""

    def worked(self) -> None:
        """The worker computed, or has, something else."""
        self._due = None

    def due_at(self, now: float) -> float:
        """When the next step is due if nothing comes; the worker has nothing to do at present."""
        if self._due is None:
            self._due, self._pause_s, self._num_left = now + FIRST_PAUSE_S, FIRST_PAUSE_S, NUM_CHANGED
        return self._due if self._fits else math.inf

    def begin(self) -> StepPlan:
        """The step that is due; empty where there is no block for it."""
        if not self._taken and all(blocks.num_available for blocks in self._groups):
            self._taken = [blocks.allocate(1, reserved=False)[0] for blocks in self._groups]
        if not self._taken:
            return StepPlan()
        first, *others = self._taken
        prompt = dummy_sequence(NUM_TOKENS, first, self._runner.block_size)
        prompt.windows = [WindowTable([block], 0, 0, 0, 1) for block in others]
        return StepPlan(prefills=(ScheduledSequence(prompt, 0, NUM_TOKENS, samples=True),))

    def end(self, ms: float | None, now: float) -> None:
        """It took so long; None where it was not computed, which ends these steps until the worker has computed
        something else."""
        for blocks, block in zip(self._groups, self._taken, strict=False):
            blocks.release([block], is_copy=True)
        self._taken = []
        if ms is None:
            self._due = math.inf
            return
        if ms * CHANGED < self._last_ms < math.inf:
            self._num_left = max(self._num_left, NUM_CHANGED)
        is_steady = ms < CHANGED * self._best_ms and ms < CHANGED * self._last_ms
        self._last_ms, self._best_ms = ms, min(ms, self._best_ms)
        self._num_left = max(0, self._num_left - 1)
        if self._num_left:
            self._due = now
            return
        self._due = now + max(self._pause_s, ms / 1e3 / MOST_OF_TIME)
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s) if is_steady else FIRST_PAUSE_S


def _is_alike(sample: StepSample) -> bool:
    pairs = NUM_TOKENS * (NUM_TOKENS + 1) // 2
    return (sample.prefill_tokens, sample.prefill_attended, sample.num_decodes) == (NUM_TOKENS, pairs, 0)
