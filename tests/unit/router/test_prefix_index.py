"""The index against a naive model: one set of hashes per worker, and a loop."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import BlocksRemoved, BlocksSnapshot, BlocksStored, KvEvent
from disagg.router.prefix_index import PrefixIndex
from tests.support.router import worker_report

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def blocks(text: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(letter.encode()) for letter in text)


def index(**snapshots: str) -> PrefixIndex:
    made = PrefixIndex()
    for worker_id, text in snapshots.items():
        made.add_worker(WorkerId(worker_id), Incarnation("1"))
        assert made.apply(worker_report(worker_id, 0, BlocksSnapshot(hashes=blocks(text))))
    return made


def test_leading_blocks_are_counted_for_every_holder() -> None:
    it = index(a="uvwx", b="uv", c="x")
    assert it.match(blocks("uvwxyz")) == {A: 4, B: 2}
    assert it.match(blocks("xu")) == {A: 2, C: 1}
    assert it.match(blocks("z")) == {}
    assert it.match(()) == {}


def test_a_hole_in_the_middle_ends_the_match() -> None:
    assert index(a="uwx").match(blocks("uvwx")) == {A: 1}


def test_events_add_remove_and_replace() -> None:
    it = index(a="u")
    assert it.apply(worker_report("a", 1, BlocksStored(hashes=blocks("vw")), BlocksRemoved(hashes=blocks("w"))))
    assert it.hashes_of(A) == set(blocks("uv"))
    assert it.apply(worker_report("a", 2))
    events = (BlocksStored(hashes=blocks("q")), BlocksSnapshot(hashes=blocks("x")), BlocksStored(hashes=blocks("y")))
    assert it.apply(worker_report("a", 3, *events))
    assert it.hashes_of(A) == set(blocks("xy"))


def test_a_gap_forgets_the_worker_and_asks_once_for_a_new_stream() -> None:
    it = index(a="uv", b="u")
    assert not it.apply(worker_report("a", 2, BlocksStored(hashes=blocks("w"))))
    assert it.match(blocks("uvw")) == {B: 1}
    assert it.apply(worker_report("a", 3, BlocksStored(hashes=blocks("w"))))
    assert it.hashes_of(A) == frozenset()
    assert it.apply(worker_report("a", 0, BlocksSnapshot(hashes=blocks("uvw"))))
    assert it.match(blocks("uvw")) == {A: 3, B: 1}
    assert it.apply(worker_report("a", 1, BlocksRemoved(hashes=blocks("w"))))
    assert it.match(blocks("uvw")) == {A: 2, B: 1}


def test_a_repeated_report_is_a_gap_too() -> None:
    it = index(a="u")
    assert it.apply(worker_report("a", 1, BlocksRemoved(hashes=blocks("u"))))
    assert not it.apply(worker_report("a", 1, BlocksRemoved(hashes=blocks("u"))))


def test_before_the_first_snapshot_nothing_counts() -> None:
    it = PrefixIndex()
    it.add_worker(A, Incarnation("1"))
    assert it.apply(worker_report("a", 0, BlocksStored(hashes=blocks("u"))))
    assert it.match(blocks("u")) == {}


def test_other_lives_and_strangers_are_ignored() -> None:
    it = index(a="u")
    assert it.apply(worker_report("a", 9, BlocksSnapshot(hashes=blocks("v")), incarnation="0"))
    assert it.apply(worker_report("z", 0, BlocksSnapshot(hashes=blocks("v"))))
    assert it.match(blocks("u")) == {A: 1}
    assert it.match(blocks("v")) == {}


def test_a_lost_worker_leaves_nothing_and_its_place_is_used_again() -> None:
    it = index(a="uv", b="u")
    it.remove_worker(A)
    assert (it.match(blocks("uv")), len(it)) == ({B: 1}, 1)
    it.add_worker(C, Incarnation("7"))
    assert it.apply(worker_report("c", 5, BlocksSnapshot(hashes=blocks("v")), incarnation="7"))
    assert it.match(blocks("uv")) == {B: 1}
    assert it.match(blocks("v")) == {C: 1}
    it.remove_worker(A)
    it.remove_worker(B)
    it.remove_worker(C)
    assert (len(it), it.check_integrity()) == (0, [])


WORKERS = ("a", "b", "c", "d", "e")
HASHES = st.text("uvwxyz", max_size=6)
EVENTS = st.lists(st.tuples(st.sampled_from(["stored", "removed", "snapshot"]), HASHES), max_size=3)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.known: dict[str, set[str]] = {}
        self.next: dict[str, int | None] = {}

    @rule(worker=st.sampled_from(WORKERS))
    def add(self, worker: str) -> None:
        self.index.add_worker(WorkerId(worker), Incarnation("1"))
        self.known[worker], self.next[worker] = set(), None

    @rule(worker=st.sampled_from(WORKERS))
    def remove(self, worker: str) -> None:
        self.index.remove_worker(WorkerId(worker))
        self.known.pop(worker, None)
        self.next.pop(worker, None)

    @rule(worker=st.sampled_from(WORKERS), events=EVENTS, skipped=st.sampled_from([0, 0, 0, 1]))
    def report(self, worker: str, events: list[tuple[str, str]], skipped: int) -> None:
        expected = self.next.get(worker)
        sequence = (expected or 0) + skipped
        fine = self.index.apply(worker_report(worker, sequence, *map(self._event, events)))
        if worker not in self.known:
            assert fine
            return
        has_snapshot = any(kind == "snapshot" for kind, _ in events)
        if not has_snapshot and (expected is None or skipped):
            assert fine == (expected is None)
            self.known[worker], self.next[worker] = set(), None
            return
        assert fine
        self.next[worker] = sequence + 1
        for kind, text in events:
            old = set() if kind == "snapshot" else self.known[worker]
            self.known[worker] = old - set(text) if kind == "removed" else old | set(text)

    @invariant()
    def matches_are_those_of_the_model(self) -> None:
        assert self.index.check_integrity() == []
        for chain in ("uvwxyz", "zyx", "wu"):
            expected = {WorkerId(worker): count for worker in self.known if (count := self._leading(worker, chain))}
            assert self.index.match(blocks(chain)) == expected
        assert len(self.index) == len(set().union(*self.known.values()))

    def _leading(self, worker: str, chain: Sequence[str]) -> int:
        missing = [position for position, letter in enumerate(chain) if letter not in self.known[worker]]
        return missing[0] if missing else len(chain)

    @staticmethod
    def _event(event: tuple[str, str]) -> KvEvent:
        kind, text = event
        makers: dict[str, type[KvEvent]] = {
            "stored": BlocksStored,
            "removed": BlocksRemoved,
            "snapshot": BlocksSnapshot,
        }
        return makers[kind](hashes=blocks(text))


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
