"""A fake runner of several stages, in simulated time: each stage carries out its commands in their order, as late as
they may be.

Rank 0's stage computes a step when it is launched, which takes its time there. What the other stages have to do, steps
and copies, waits until the result of a step, or a copy, is asked for; then each of them does all that was given before.
Each stage has pages of its own, in place of its layers, and each reads a step's tokens back from these: a block that
had another owner too early, or a copy that came too late, gives other tokens, or others than the other stages.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from typing_extensions import override

from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer, Copying, QueuedStep, ScheduledSequence, StepPlan, StepQueue, StepResult
from disagg.engine.request import SequenceState
from disagg.proto.messages import ONE_RANK, ParallelShape
from tests.support.engine import BLOCK, VOCAB_SIZE


def same_time(plan: StepPlan) -> float:
    """Each step takes a second in each stage."""
    return 1.0


@dataclass
class Clock:
    """Simulated time."""

    now: float = 0.0


@dataclass
class _Stage:
    runner: FakeModelRunner
    free_at: float = 0.0
    todo: deque[Callable[[], None]] = field(default_factory=deque)

    def catch_up(self, num_left: int) -> None:
        """Carry out all commands but the last `num_left`."""
        while len(self.todo) > num_left:
            self.todo.popleft()()


class StagedStep(QueuedStep):
    """A step that was launched. `results` has what each stage read back."""

    def __init__(self, runner: StagedRunner, plan: StepPlan, ends: float, fails: bool) -> None:
        self.plan = plan
        self.ends = ends
        self.results: list[StepResult] = []
        self.was_asked = False
        self._runner = runner
        self._fails = fails

    @property
    @override
    def ended_at(self) -> float | None:
        is_noticed = self._runner.notices and self._runner.clock.now >= self.ends
        return self.ends if is_noticed else None

    @override
    def result(self) -> StepResult:
        assert not self.was_asked, "a result is read twice"
        self.was_asked = True
        clock = self._runner.clock
        clock.now = max(clock.now, self.ends)
        self._runner.catch_up(self)
        if self._fails:
            raise RuntimeError("result is broken")
        first, *others = self.results
        assert all(other == first for other in others), "the stages do not have the KV of the same tokens"
        return first


class _Copied(Copying):
    """A copy out of all stages. The last one has it, and the others the same."""

    def __init__(self, runner: StagedRunner, out: Buffer) -> None:
        self._runner = runner
        self._out = out
        self.parts: list[tuple[int, Buffer]] = []

    @override
    def is_done(self) -> bool:
        return len(self.parts) == len(self._runner.stages)

    @override
    def wait(self) -> None:
        self._runner.catch_up()
        (checksum, data), *others = self.parts
        assert all(other[0] == checksum for other in others), "the stages do not have the same KV"
        self._out[:] = data

    @override
    def checksum(self) -> int:
        return self.parts[0][0]


class StagedRunner(FakeModelRunner):
    """A worker of `num_stages` stages, and its own step queue.

    Args:
        step_s: how long a step takes in each stage.
        copies_later: whether a copy out of the cache is only begun, and made when it is waited for.
        failing: numbers of launched steps, from 0, that fail, with where: `enqueue` at once, or `result`.
        notices: whether it is noticed that a step is computed before its result is asked for.
    """

    kind: Literal["decodes", "prompts"] = "prompts"
    max_decodes = 0

    def __init__(
        self,
        num_stages: int = 4,
        num_blocks: int = 10,
        block_size: int = BLOCK,
        max_model_len: int = 4096,
        *,
        step_s: Callable[[StepPlan], float] = same_time,
        copies_later: bool = False,
        failing: dict[int, str] | None = None,
        notices: bool = True,
        windows: Sequence[tuple[int, int]] = (),
        clock: Clock | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, max_model_len, VOCAB_SIZE, windows=windows)
        self.clock = clock or Clock()
        self.stages = [
            _Stage(FakeModelRunner(num_blocks, block_size, max_model_len, VOCAB_SIZE, windows=windows))
            for _ in range(num_stages)
        ]
        self.max_ahead = num_stages
        self.step_s = step_s
        self.copies_later = copies_later
        self.failing = failing or {}
        self.notices = notices
        self.launched: list[StagedStep] = []
        self.runs: list[StepPlan] = []
        """Plans that were not queued."""
        self.most_under_way = 0

    @property
    def step_queue(self) -> StepQueue | None:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def under_way(self) -> list[StagedStep]:
        """Steps whose results were not read."""
        return [step for step in self.launched if not step.was_asked]

    def watch(self, wake: Callable[[], None]) -> bool:
        return self.notices

    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        assert plan.entries
        assert all(entry.sequence.hold_after_prefill and not entry.drafts for entry in plan.entries)
        assert after is None or after is self.under_way[-1]
        assert len(self.under_way) <= self.max_ahead
        failing = self.failing.get(len(self.launched))
        ends = [self._time_in(stage, plan) for stage in range(len(self.stages))]
        step = StagedStep(self, plan, ends[-1], failing == "result")
        if failing == "enqueue":
            step.was_asked = True
            self.launched.append(step)
            raise RuntimeError("enqueue is broken")
        known = StepPlan(tuple(map(_known, plan.decodes)), tuple(map(_known, plan.prefills)))
        for stage in self.stages:
            stage.todo.append(lambda stage=stage: step.results.append(stage.runner.run(known)))  # type: ignore[misc]
        self.stages[0].catch_up(0)
        self.clock.now = ends[0]
        self.launched.append(step)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return step

    @override
    def run(self, plan: StepPlan) -> StepResult:
        self.runs.append(plan)
        assert not self.under_way
        self.catch_up()
        self.clock.now += len(self.stages) * self.step_s(plan)
        first, *others = [stage.runner.run(plan) for stage in self.stages]
        assert all(other == first for other in others), "the stages do not have the KV of the same tokens"
        return first

    @override
    def gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> int:
        copied = self._copy(block_table, start, end, out, group)
        copied.wait()
        return copied.checksum()

    @override
    def start_gather(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying | int:
        if not self.copies_later:
            return self.gather(block_table, start, end, out, peer, group)
        return self._copy(block_table, start, end, out, group)

    def _copy(self, block_table: Sequence[int], start: int, end: int, out: Buffer, group: int) -> _Copied:
        table, copied = list(block_table), _Copied(self, out)
        for stage in self.stages:

            def copy(stage: _Stage = stage) -> None:
                part = np.empty_like(out)
                copied.parts.append((stage.runner.gather(table, start, end, part, group=group), part))

            stage.todo.append(copy)
        self.stages[0].catch_up(0)
        return copied

    @override
    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        self.catch_up()
        for stage in self.stages:
            stage.runner.scatter(block_table, start, end, data, group=group)

    def catch_up(self, step: StagedStep | None = None) -> None:
        """Have each stage do what it was given up to a step, and nothing behind it; without one all of it."""
        for stage in self.stages[1:]:
            while stage.todo and (step is None or len(step.results) <= self.stages.index(stage)):
                stage.todo.popleft()()

    def _time_in(self, number: int, plan: StepPlan) -> float:
        """When a stage has computed a step. Stages are asked in their order."""
        stage = self.stages[number]
        came = self.clock.now if number == 0 else self.stages[number - 1].free_at
        stage.free_at = max(stage.free_at, came) + self.step_s(plan)
        return stage.free_at


def _known(entry: ScheduledSequence) -> ScheduledSequence:
    """What a stage is given of an entry: nothing that changes behind it."""
    sequence = entry.sequence
    assert sequence.state is SequenceState.RUNNING
    assert entry.end <= len(sequence.token_ids)
    copy = dataclasses.replace(
        sequence,
        token_ids=list(sequence.token_ids),
        block_table=list(sequence.block_table),
        windows=[dataclasses.replace(held, block_table=list(held.block_table)) for held in sequence.windows],
    )
    return msgspec.structs.replace(entry, sequence=copy)
