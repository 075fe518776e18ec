"""The open assignments of the router to each worker: prompt tokens to compute, sequences, KV blocks.

One assignment per (worker, attempt), opened when the attempt is dispatched and closed exactly once, whatever its end.
Closing one that is not open is a bug and raises. When nothing runs, every sum is zero.

A cached prefix costs a worker nothing only while a sequence there holds it. Blocks that are cached and held by no
sequence count as free, and are in use as soon as a sequence refers to them. So the load of a worker has, as marks along
their hash chains, the prefixes that its assignments hold, and a new assignment omits no more blocks than those.

An assignment, like every record that exists as long as a request, is not tracked by the garbage collector: it is in no
reference cycle, and a router has thousands of them.

Owner: the fleet.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from disagg.proto.ids import AttemptKey, BlockHash, WorkerId

MARK_BLOCKS = 16
"""Number of blocks between two marks of a chain of hashes: few enough marks for the rate of placements. Of a prefix
that is shared up to a block between two marks, the blocks behind the last mark count as not shared."""


class Assignment(msgspec.Struct, gc=False):
    """The resources of one worker that one attempt takes, besides a decode place."""

    tokens: int = 0
    """Prompt tokens that the worker must compute and has not reported as done."""
    pairs: int = 0
    """Query-key pairs of these tokens: the sum over them of the tokens that each one attends to."""
    blocks: int = 0
    """Number of KV blocks, in the worker's own block size."""
    is_handed_over: bool = False
    """Whether another worker decodes the answer."""
    context: int = 0
    """Number of tokens that each decode step of the sequence attends to; grows with the answer. 0 if the worker does
    not decode it."""
    known_tokens: int = 0
    """The first value of `context`, if the worker decodes."""
    most_output_tokens: int = 0
    """Most output tokens, if the worker decodes."""
    marks: tuple[BlockHash, ...] = ()
    """Marks of the chain that the sequence holds; see `marks_of`."""
    num_matched: int = 0
    """Number of blocks of that chain that the worker had. It is the place of the last mark, unless it is a multiple of
    `MARK_BLOCKS`."""
    tpot_ms: float = math.inf
    """TPOT target in milliseconds, if the worker decodes."""
    first_at: float = math.inf
    """When the first token of the answer came (in any attempt), if the worker decodes; infinite before."""
    num_before: int = 0
    """Number of output tokens of earlier attempts, if the worker decodes."""
    shared_blocks: int = 0
    """Number of KV blocks that are not in `blocks`, because other assignments hold them."""


@dataclass(slots=True, eq=False)
class AssignedLoad:
    """All assignments of one worker and their sums. Not a struct: setting an attribute of a struct takes several times
    as long, and these change with every token."""

    tokens: int = 0
    pairs: int = 0
    blocks: int = 0
    context: int = 0
    num_prefills: int = 0
    """Number of assignments whose answer another worker decodes."""
    held: dict[BlockHash, int] = field(default_factory=dict)
    """For each mark: the number of assignments that have it."""
    assignments: dict[AttemptKey, Assignment] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """Number of attempts on the worker."""
        return len(self.assignments)


class Assignments:
    """The assignments of all workers."""

    def __init__(self) -> None:
        self._loads: dict[WorkerId, AssignedLoad] = {}

    def of_worker(self, worker_id: WorkerId) -> AssignedLoad:
        """The assignments of one worker, read only; the same object until `forget`."""
        load = self._loads.get(worker_id)
        if load is None:
            load = self._loads[worker_id] = AssignedLoad()
        return load

    def forget(self, worker_id: WorkerId) -> None:
        """Drop the record of a worker that is lost; its assignments must have been closed."""
        load = self._loads.pop(worker_id, None)
        assert load is None or not load.assignments, f"assignments of {worker_id} are still open"

    def open(self, worker_id: WorkerId, key: AttemptKey, assignment: Assignment) -> None:
        """Add `assignment`, which this object owns from now on. Raises `ValueError` if the attempt has one on this
        worker."""
        load = self._loads.get(worker_id) or self.of_worker(worker_id)
        if key in load.assignments:
            raise ValueError(f"{key} is assigned to {worker_id} already")
        load.assignments[key] = assignment
        load.tokens += assignment.tokens
        load.pairs += assignment.pairs
        load.blocks += assignment.blocks
        load.context += assignment.context
        load.num_prefills += assignment.is_handed_over
        held = load.held
        for mark in assignment.marks:
            held[mark] = held.get(mark, 0) + 1

    def computed(self, worker_id: WorkerId, key: AttemptKey) -> int:
        """Release the tokens of an assignment whose prompt is computed, and keep the rest. Returns their number; 0 the
        second time."""
        load = self._loads[worker_id]
        assignment = load.assignments[key]
        num_tokens = assignment.tokens
        load.tokens -= num_tokens
        load.pairs -= assignment.pairs
        assignment.tokens = assignment.pairs = 0
        return num_tokens

    def grow(self, worker_id: WorkerId, key: AttemptKey, num_tokens: int, now: float) -> None:
        """Add `num_tokens` new output tokens to the context of later steps."""
        load = self._loads[worker_id]
        assignment = load.assignments[key]
        assignment.context += num_tokens
        if now < assignment.first_at:
            assignment.first_at = now
        load.context += num_tokens

    def close(self, worker_id: WorkerId, key: AttemptKey) -> Assignment:
        """Close an assignment and release all of it; returns it. Raises `KeyError` if it is not open."""
        load = self._loads[worker_id]
        assignment = load.assignments.pop(key)
        load.tokens -= assignment.tokens
        load.pairs -= assignment.pairs
        load.blocks -= assignment.blocks
        load.context -= assignment.context
        load.num_prefills -= assignment.is_handed_over
        held = load.held
        for mark in assignment.marks:
            if held[mark] == 1:
                del held[mark]
            else:
                held[mark] -= 1
        return assignment

    def entries(self) -> Iterator[tuple[WorkerId, AttemptKey]]:
        """The worker and the attempt of each open assignment."""
        for worker_id, load in self._loads.items():
            for key in load.assignments:
                yield worker_id, key

    def holdings(self) -> dict[str, int]:
        """The sums over all workers; all zero when nothing runs."""
        loads = self._loads.values()
        return {
            "tokens": sum(load.tokens for load in loads),
            "sequences": sum(load.sequences for load in loads),
            "blocks": sum(load.blocks for load in loads),
        }

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        problems = []
        for worker_id, load in self._loads.items():
            for name in ("tokens", "pairs", "blocks", "context"):
                total = sum(getattr(assignment, name) for assignment in load.assignments.values())
                if total != getattr(load, name):
                    problems.append(
                        f"load of {worker_id}: {getattr(load, name)} {name}, but the sum of its assignments is {total}"
                    )
            marks = Counter(mark for assignment in load.assignments.values() for mark in assignment.marks)
            if marks != load.held:
                problems.append(f"load of {worker_id}: the marks are not those of its assignments")
        return problems


def marks_of(hashes: Sequence[BlockHash], num_matched: int) -> tuple[BlockHash, ...]:
    """The marks of a chain of which a worker has `num_matched` blocks: where that prefix ends, and every
    `MARK_BLOCKS`."""
    marks = tuple(hashes[MARK_BLOCKS - 1 :: MARK_BLOCKS])
    return (*marks, hashes[num_matched - 1]) if num_matched % MARK_BLOCKS else marks


def num_left(assignment: Assignment, held: Mapping[BlockHash, int]) -> int:
    """Number of blocks in the chain of a closed assignment that other assignments still hold. One that has a mark has
    all blocks before it."""
    if not held:
        return 0
    marks, num_regular = assignment.marks, len(assignment.marks)
    left = 0
    if assignment.num_matched % MARK_BLOCKS:
        num_regular -= 1
        left = assignment.num_matched if marks[-1] in held else 0
    num_held = bisect_left(marks, True, 0, num_regular, key=lambda mark: mark not in held)
    return max(left, num_held * MARK_BLOCKS)


def num_held(hashes: Sequence[BlockHash], num_matched: int, held: Mapping[BlockHash, int]) -> int:
    """Number of blocks among the first `num_matched` of a chain that assignments hold, as far as their marks show
    it."""
    if not num_matched or not held:
        return 0
    if hashes[num_matched - 1] in held:
        return num_matched
    low, high = 0, num_matched // MARK_BLOCKS
    while low < high:  # An assignment that has a mark has all before it.
        middle = (low + high + 1) // 2
        if hashes[middle * MARK_BLOCKS - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low * MARK_BLOCKS
