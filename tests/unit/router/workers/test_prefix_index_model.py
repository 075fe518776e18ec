"""The index against a naive model: sets of blocks per worker, and a loop.

A block is named by the whole chain that leads to it (`abb` follows `ab`). Workers report what an engine can report: a
block comes after its parent and goes before it.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import BlocksRemoved, BlocksSnapshot, BlocksStored, KvEvent
from disagg.router.workers.prefix_index import PREDICTED_FOR_S, PrefixIndex
from tests.support.router import reported_blocks, worker_report

WORKERS = ("a", "b", "c", "d", "e")
CHAINS = st.text("xy", min_size=1, max_size=7)
EVENTS = st.lists(st.tuples(st.sampled_from(["stored", "stored", "removed", "snapshot"]), CHAINS), max_size=3)
ASKED = ("xxxxxxx", "xyxyxyx", "xxyyxxy", "yyyyyyy", "yxxyxyy", "xx", "y")


def chain(text: str) -> list[str]:
    """The blocks of a chain."""
    return [text[: length + 1] for length in range(len(text))]


def hashes(names: list[str]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(name.encode()) for name in names)


def num_leading(text: str, held: set[str]) -> int:
    missing = [position for position, block in enumerate(chain(text)) if block not in held]
    return missing[0] if missing else len(text)


def is_closed(held: set[str]) -> bool:
    return all(len(block) == 1 or block[:-1] in held for block in held)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.now = 0.0
        self.known: dict[str, set[str]] = {}
        self.next: dict[str, int | None] = {}
        self.predicted: dict[str, dict[str, float]] = {}

    @rule(worker=st.sampled_from(WORKERS))
    def add(self, worker: str) -> None:
        self.index.add_worker(WorkerId(worker), Incarnation("1"))
        self.known[worker], self.next[worker], self.predicted[worker] = set(), None, {}

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        self.index.remove_worker(WorkerId(worker))
        for kept in (self.known, self.next, self.predicted):
            kept.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), changes=EVENTS, skipped=st.sampled_from([0, 0, 0, 1]))
    def report(self, worker: str, changes: list[tuple[str, str]], skipped: int) -> None:
        expected = self.next.get(worker)
        sequence = (expected or 0) + skipped
        held = set(self.known.get(worker, ()))
        has_snapshot = any(kind == "snapshot" for kind, _ in changes)
        counts = worker in self.known and (has_snapshot or (expected is not None and not skipped))
        last_snapshot = max((position for position, (kind, _) in enumerate(changes) if kind == "snapshot"), default=0)
        events = [
            self.change(worker, held, kind, text, confirms=counts and position >= last_snapshot)
            for position, (kind, text) in enumerate(changes)
        ]
        fine = self.index.apply(worker_report(worker, sequence, *events))
        assert fine == (counts or worker not in self.known or expected is None)
        if worker in self.known:
            self.known[worker] = held if counts else set()
            self.next[worker] = sequence + 1 if counts else None

    def change(self, worker: str, held: set[str], kind: str, text: str, *, confirms: bool) -> KvEvent:
        """An event as the engine would send it; `held` becomes what holds after it."""
        if kind == "removed":
            gone = sorted((block for block in held if block.startswith(text)), key=len, reverse=True)
            held.difference_update(gone)
            return BlocksRemoved(hashes=hashes(gone))
        if kind == "snapshot":
            held.clear()
        held.update(chain(text))
        if confirms:
            for block in chain(text):
                self.predicted[worker].pop(block, None)
        return (
            BlocksSnapshot(hashes=hashes(chain(text)))
            if kind == "snapshot"
            else BlocksStored(hashes=hashes(chain(text)))
        )

    @rule(worker=st.sampled_from(WORKERS), text=CHAINS, tells_match=st.booleans())
    def predict(self, worker: str, text: str, tells_match: bool) -> None:
        asked, bit = hashes(chain(text)), self.index.bit(WorkerId(worker))
        self.index.predict(
            WorkerId(worker), asked, self.now, self.index.find(asked).blocks_of(bit) if tells_match else None
        )
        if worker in self.known:
            lacking = chain(text)[num_leading(text, self.known[worker]) :]
            self.predicted[worker].update(dict.fromkeys(lacking, self.now + PREDICTED_FOR_S))

    @rule(wait_s=st.sampled_from([0.5, 2.0, 5.0]))
    def wait(self, wait_s: float) -> None:
        self.now += wait_s
        self.index.expire(self.now)
        for worker, predicted in self.predicted.items():
            self.predicted[worker] = {block: end for block, end in predicted.items() if end > self.now}

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        assert self.index.check_integrity() == []
        held = {worker: known | self.predicted[worker].keys() for worker, known in self.known.items()}
        assert len(self.index) == len(set().union(*held.values()))
        for text in ASKED:
            found = self.index.match(hashes(chain(text)))
            for worker, blocks in held.items():
                num_blocks = found.pop(WorkerId(worker), 0)
                reported, counted = num_leading(text, self.known[worker]), num_leading(text, blocks)
                if is_closed(blocks):
                    assert num_blocks == counted
                else:  # An eviction took a block before predicted ones.
                    assert reported <= num_blocks
                    assert num_blocks == 0 or text[:num_blocks] in blocks
            assert found == {}

    @invariant()
    def reported_blocks_are_those_of_the_model(self) -> None:
        for worker, known in self.known.items():
            assert reported_blocks(self.index, WorkerId(worker)) == set(hashes(list(known)))

    @invariant()
    def the_best_are_the_longest(self) -> None:
        for text in ASKED:
            asked = hashes(chain(text))
            found = self.index.match(asked)
            for limit in (1, 2, 9):
                best = self.index.find(asked).best(limit)
                assert [count for _, count in best] == sorted(found.values(), reverse=True)[:limit]
                assert dict(best).items() <= found.items()
            answer = self.index.find(asked)
            assert {worker: answer.blocks_of(self.index.bit(WorkerId(worker))) for worker in WORKERS} == {
                worker: found.get(WorkerId(worker), 0) for worker in WORKERS
            }


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
