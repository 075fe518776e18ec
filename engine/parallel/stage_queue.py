"""The step queue of a worker with stages: while one of them computes a step of prompts, those before it compute later
ones.

    rank 0           Step n to all, launch n ── Step n+1 to all, launch n+1 ── ... ── result n ── ...
    stage 1, 2, ..   compute n as the rows of the stage before come, then n+1
    the last one     Mark n behind step n ──> `Done`: step n is computed

Ranks carry out commands in their order, so all that rank 0 does behind the launch of a step is behind it on each rank.
The logits of rows that sample come to rank 0 by the exchange; that a step without such rows is computed is known by the
`Mark` alone, as is the time of either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from typing_extensions import override

from disagg.engine.parallel.followers import RankLostError
from disagg.engine.parallel.interfaces import Followers, ShardRunner
from disagg.engine.plan import QueuedStep, StepPlan, StepQueue, StepResult
from disagg.engine.rank_messages import Done, Mark, encode_step
from disagg.proto.clock.process_clock import process_clock


class StageQueue(StepQueue):
    """Launches steps of prompts on the ranks of all stages. Owner: `GroupRunner`.

    Args:
        local: rank 0's runner, of several stages.
        followers: the other ranks.
        on_fault: called with what ends the worker: a step that fails.
        before: called before each step.
    """

    kind = "prompts"
    max_decodes = 0

    def __init__(
        self,
        local: ShardRunner,
        followers: Followers,
        on_fault: Callable[[BaseException], None],
        before: Callable[[], None],
    ) -> None:
        shard = local.shard
        self.max_ahead = shard.stages
        self._last_stage = (shard.stages - 1) * shard.size
        """Number of the first rank of the last stage."""
        self._local = local
        self._followers = followers
        self._on_fault = on_fault
        self._before = before
        self._wake: Callable[[], None] = _nobody_waits

    @override
    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        self._before()
        arrays = self._local.arrays(plan)
        command = encode_step(arrays)
        step = _LaunchedStep(plan, self._on_fault, lambda: self._wake())
        try:
            self._followers.broadcast(command)
            self._followers.call(self._last_stage, Mark(call=0), step.computed)
            step.launched = self._local.launch(plan, arrays)
        except Exception as error:
            self._on_fault(error)
            raise
        return step

    @override
    def watch(self, wake: Callable[[], None]) -> bool:
        self._wake = wake
        return True


def _nobody_waits() -> None:
    """Before `watch`."""


class _LaunchedStep(QueuedStep):
    """A step that rank 0's stage has computed."""

    launched: QueuedStep
    """What rank 0 waits for; set when it is launched."""

    def __init__(self, plan: StepPlan, on_fault: Callable[[BaseException], None], wake: Callable[[], None]) -> None:
        self._samples = any(entry.samples for entry in plan.entries)
        self._on_fault = on_fault
        self._wake = wake
        self._done: Done | None = None
        self._is_computed = threading.Event()
        self._ended_at: float | None = None

    @property
    @override
    def ended_at(self) -> float | None:
        return self._ended_at

    def computed(self, done: Done) -> None:
        """The last stage has computed it, or is lost. Any thread."""
        self._done, self._ended_at = done, process_clock().now()
        self._is_computed.set()
        self._wake()

    @override
    def result(self) -> StepResult:
        """Raises `RankLostError` if a rank is lost, which ends the worker, as any other error here does."""
        try:
            if not self._samples:  # The logits of those that do tell that they are computed.
                self._is_computed.wait()
            if self._done is not None and not self._done.ok:
                raise RankLostError(f"the last stage did not compute a step: {self._done.error}")
            result = self.launched.result()
        except Exception as error:
            self._on_fault(error)
            raise
        if self._ended_at is None:
            self._ended_at = process_clock().now()
        return result
