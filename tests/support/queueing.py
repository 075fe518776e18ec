"""A fake runner whose steps are queued: what a GPU's stream does, in numpy, and strict about it.

Nothing that is queued happens before its result, or a later one, is awaited; then all of it happens in
order. A queued step keeps copies of its block tables, since the scheduler may change them meanwhile, and reads the
ids that the host has not read from the step that samples them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from typing_extensions import override

from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.plan import (
    Buffer,
    Copying,
    QueuedStep,
    RowFault,
    ScheduledSequence,
    StepPlan,
    StepQueue,
    StepResult,
)
from disagg.engine.request import Sequence as EngineSequence
from disagg.engine.request import SequenceState, WindowTable
from disagg.proto.messages import ONE_RANK, ParallelShape
from tests.support.engine import BLOCK, VOCAB_SIZE


@dataclass
class HostQueuedStep:
    plan: StepPlan
    wait: Callable[[], None]
    token_ids: list[int] = field(default_factory=list)
    """Empty until it is computed."""
    faults: Mapping[int, RowFault] = field(default_factory=dict)
    error: Exception | None = None
    was_asked: bool = False
    ended_at: float | None = None

    def result(self) -> StepResult:
        assert not self.was_asked, "a result is read twice"
        self.was_asked = True
        self.wait()
        if self.error is not None:
            raise self.error
        live = [entry.sequence.state is not SequenceState.ENDED for entry in self.plan.decodes]
        return StepResult(list(self.token_ids), faults={row: why for row, why in self.faults.items() if live[row]})


@dataclass
class HostCopying(Copying):
    wait_for_it: Callable[[], None]
    done: bool = False
    data: Buffer = None
    """As it was read."""

    @override
    def checksum(self) -> int:
        return UNKEYED(self.data)

    @override
    def is_done(self) -> bool:
        return self.done

    @override
    def wait(self) -> None:
        self.wait_for_it()
        assert self.done


class QueueingRunner(FakeModelRunner):
    """A fake runner whose steps are queued and computed later. `failing`: numbers of queued steps, from 0, that fail,
    with where: `enqueue` at once, `result` when they are computed."""

    kind: Literal["decodes", "prompts"] = "decodes"
    max_ahead = 1

    def __init__(
        self,
        num_blocks: int = 10,
        block_size: int = BLOCK,
        max_model_len: int = 4096,
        *,
        max_decodes: int = 8,
        failing: dict[int, str] | None = None,
        windows: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(num_blocks, block_size, max_model_len, VOCAB_SIZE, windows=windows)
        self.max_decodes = max_decodes
        self.failing = failing or {}
        self.is_launching = True
        self.num_queued = 0
        self.num_behind = 0
        """Steps queued behind a step whose ids had not been read."""
        self.runs: list[StepPlan] = []
        """Plans that were not queued."""
        self._queue: deque[Callable[[], None]] = deque()

    @property
    def step_queue(self) -> StepQueue | None:  # type: ignore[override]
        """Itself."""
        return self if self.is_launching else None

    def watch(self, wake: Callable[[], None]) -> bool:
        return False

    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        assert not plan.prefills
        assert 0 < len(plan.decodes) <= self.max_decodes
        assert after is None or isinstance(after, HostQueuedStep)
        assert after is None or not after.was_asked
        self.num_queued += 1
        self.num_behind += after is not None
        failing = self.failing.get(self.num_queued - 1)
        if failing == "enqueue":
            raise RuntimeError("enqueue is broken")
        step = HostQueuedStep(plan, self.wait_for_device)
        entries = [_Copied.of(entry, after) for entry in plan.decodes]

        def compute() -> None:
            if failing == "result":
                step.error = RuntimeError("result is broken")
                step.token_ids = [0] * len(entries)
            else:
                result = super(QueueingRunner, self).run(StepPlan(tuple(e.known() for e in entries)))
                step.token_ids, step.faults = result.token_ids, result.faults

        self._queue.append(compute)
        return step

    def run(self, plan: StepPlan) -> StepResult:
        self.runs.append(plan)
        self.wait_for_device()
        return super().run(plan)

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
        """Waits for queued steps, since the checksum is computed on the host."""
        self.wait_for_device()
        return super().gather(block_table, start, end, out, peer, group)

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
        """Waits for it and the steps before it."""
        self.start_scatter(block_table, start, end, data, peer, group=group)
        self.wait_for_device()

    @override
    def start_scatter(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying:
        """Queued, behind the steps before it; the buffer is read then."""
        table, copying = list(block_table), HostCopying(self.wait_for_device)

        def copy() -> None:
            super(QueueingRunner, self).scatter(table, start, end, data, peer, group)
            copying.data, copying.done = data.copy() if digests else None, True

        self._queue.append(copy)
        return copying

    def wait_for_device(self) -> None:
        while self._queue:
            self._queue.popleft()()


@dataclass(frozen=True)
class _Copied:
    """What a queued step reads of an entry: nothing that changes behind it."""

    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    entry: ScheduledSequence
    after: HostQueuedStep | None
    """What samples its last token, where that is not known."""

    @classmethod
    def of(cls, entry: ScheduledSequence, after: HostQueuedStep | None) -> _Copied:
        """Of an entry, now."""
        sequence = entry.sequence
        num_missing = entry.end - len(sequence.token_ids)
        assert num_missing in (0, 1)
        assert sequence.state is SequenceState.RUNNING
        assert num_missing == 0 or after is not None, "its last token is nowhere"
        tables = tuple(tuple(sequence.table_of(group)) for group in range(1 + len(sequence.windows)))
        return cls(tuple(sequence.token_ids), tables, entry, after if num_missing else None)

    def known(self) -> ScheduledSequence:
        """The entry with all its ids, once they are there."""
        token_ids = list(self.token_ids)
        if self.after is not None:
            row = [entry.sequence for entry in self.after.plan.decodes].index(self.entry.sequence)
            token_ids.append(max(0, self.after.token_ids[row]))  # as `DeviceStepInputs` does where there is none
        sequence = EngineSequence(
            self.entry.sequence.spec,
            SequenceState.RUNNING,
            token_ids=token_ids,
            block_table=list(self.block_tables[0]),
            windows=[WindowTable(list(table), 0, 0, 0, 0) for table in self.block_tables[1:]],
        )
        return ScheduledSequence(sequence, self.entry.start, 1, samples=True)
