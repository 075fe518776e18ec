"""The index on small chains: letters are blocks, and a worker that has `uv` has the chain u, v."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import BlocksRemoved, BlocksSnapshot, BlocksStored, ResumeRemoved, ResumeStored
from disagg.router.workers.prefix_index import NUM_SHARDS, PREDICTED_FOR_S, PrefixIndex, prefix_ends
from tests.support.router import reported_blocks, worker_report

A, B, C, D = WorkerId("a"), WorkerId("b"), WorkerId("c"), WorkerId("d")


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


def test_a_worker_with_a_hole_changes_no_other_number() -> None:
    found = index(a="uwxy", b="uvw", c="uvwxyz", d="wxyz").match(blocks("uvwxyz"))
    assert (found[B], found[C], D in found) == (3, 6, False)
    assert 1 <= found[A] <= 5


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 64, 1000])
def test_every_length_of_every_holder_is_found(num_blocks: int) -> None:
    chain = [BlockHash(b"%d" % position) for position in range(num_blocks)]
    lengths = sorted({1, num_blocks // 3, num_blocks // 2, num_blocks - 1, num_blocks} - {0})
    it = PrefixIndex()
    for length in lengths:
        worker_id = WorkerId(f"w{length}")
        it.add_worker(worker_id, Incarnation("1"))
        it.apply(worker_report(worker_id, 0, BlocksSnapshot(hashes=tuple(chain[:length]))))
    assert it.match(chain) == {WorkerId(f"w{length}"): length for length in lengths}
    assert it.match([*chain, BlockHash(b"other")]) == it.match(chain)


class CountingShard(dict[BlockHash, int]):
    num_looks = 0

    def get(self, *arguments: Any) -> Any:
        self.num_looks += 1
        return super().get(*arguments)


def test_a_long_chain_takes_few_looks() -> None:
    chain = [BlockHash(b"%d" % position) for position in range(4096)]
    shard = CountingShard()
    for position, block_hash in enumerate(chain[:3000]):
        shard[block_hash] = 3 if position < 1000 else 1
    assert prefix_ends(chain, [shard] * NUM_SHARDS) == [(1000, 2), (3000, 1)]
    assert shard.num_looks <= 1 + 2 * 12


def test_best_names_the_longest_first_and_no_more_than_asked() -> None:
    it = index(a="uv", b="uvw", c="u", d="uvw")
    assert it.find(blocks("uvwx")).best(3) == [(B, 3), (D, 3), (A, 2)]
    assert it.find(blocks("uvwx")).best(9) == [(B, 3), (D, 3), (A, 2), (C, 1)]
    assert it.find(blocks("uvwx")).best(0) == []
    assert it.find(blocks("x")).best(9) == []


def test_best_among_some_workers_and_with_turns() -> None:
    it = index(a="u", b="u", c="uv", d="u")
    found = it.find(blocks("uv"))
    some = it.bit(A) | it.bit(B) | it.bit(D)
    assert found.best(2, some) == [(A, 1), (B, 1)]
    assert [found.best(1, some, turn)[0][0] for turn in range(5)] == [A, B, D, D, A]
    assert found.best(3, some, turn=1) == [(B, 1), (D, 1), (A, 1)]
    assert found.best(2, it.bit(WorkerId("unknown"))) == []
    assert [found.blocks_of(it.bit(worker_id)) for worker_id in (A, C, WorkerId("unknown"))] == [1, 2, 0]


def test_events_add_remove_and_replace() -> None:
    it = index(a="u")
    assert it.apply(worker_report("a", 1, BlocksStored(hashes=blocks("vw")), BlocksRemoved(hashes=blocks("w"))))
    assert reported_blocks(it, A) == set(blocks("uv"))
    assert it.apply(worker_report("a", 2))
    events = (BlocksStored(hashes=blocks("q")), BlocksSnapshot(hashes=blocks("x")), BlocksStored(hashes=blocks("y")))
    assert it.apply(worker_report("a", 3, *events))
    assert reported_blocks(it, A) == set(blocks("xy"))


def test_a_gap_forgets_the_worker_and_asks_once_for_a_new_stream() -> None:
    it = index(a="uv", b="u")
    assert not it.apply(worker_report("a", 2, BlocksStored(hashes=blocks("w"))))
    assert it.match(blocks("uvw")) == {B: 1}
    assert it.apply(worker_report("a", 3, BlocksStored(hashes=blocks("w"))))
    assert reported_blocks(it, A) == frozenset()
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


def test_a_block_that_is_named_twice_in_an_event_counts_once() -> None:
    it = index(a="uv", b="uv")
    assert it.apply(worker_report("a", 1, BlocksStored(hashes=blocks("vww"))))
    assert it.match(blocks("uvw")) == {A: 3, B: 2}
    assert it.apply(worker_report("a", 2, BlocksRemoved(hashes=blocks("wwvx"))))
    assert it.match(blocks("uvw")) == {A: 1, B: 2}
    assert it.check_integrity() == []


def holder_objects(it: PrefixIndex) -> set[int]:
    return {id(holders) for shard in it._shards for holders in shard.values()}


def test_blocks_of_one_chain_with_the_same_holders_share_one_set() -> None:
    workers = [f"w{number:03}" for number in range(300)]
    it = index(**dict.fromkeys(workers, "uvwxyz"))
    assert len(holder_objects(it)) == 1
    for worker_id in workers[1:]:
        it.remove_worker(WorkerId(worker_id))
    it.add_worker(A, Incarnation("1"))
    assert it.apply(worker_report("a", 0, BlocksSnapshot(hashes=blocks("uvwpqr"))))
    it.remove_worker(A)
    assert holder_objects(it) == {id(it._single[1])}
    last = WorkerId("last")
    for worker_id in (*map(WorkerId, workers[1:]), last):
        it.add_worker(worker_id, Incarnation("1"))
    assert it.apply(worker_report("last", 0, BlocksSnapshot(hashes=blocks("upvqwr"))))
    it.predict(last, blocks("upst"), now=0.0)
    assert len(holder_objects(it)) == 1 + 3 + 1, "one of the first, one each of u, v and w, one of the last"
    assert it.check_integrity() == []


def test_the_garbage_collector_does_not_walk_through_the_blocks() -> None:
    it = index(a="uvw", b="uv")
    it.predict(A, blocks("uvwx"), now=0.0)
    assert it.apply(worker_report("a", 1, BlocksStored(hashes=blocks("yz")), BlocksRemoved(hashes=blocks("z"))))
    tables = [*it._shards, *(table for holder in it._workers.values() for table in (holder.hashes, holder.predicted))]
    assert not any(map(gc.is_tracked, tables))


class TestPredictions:
    def test_count_at_once_and_end_by_time(self) -> None:
        it = index(a="u", b="uv")
        it.predict(A, blocks("uvwx"), now=10.0)
        assert it.match(blocks("uvwx")) == {A: 4, B: 2}
        assert reported_blocks(it, A) == set(blocks("u"))
        it.expire(10.0 + PREDICTED_FOR_S - 0.001)
        assert it.match(blocks("uvwx")) == {A: 4, B: 2}
        it.expire(10.0 + PREDICTED_FOR_S)
        assert it.match(blocks("uvwx")) == {A: 1, B: 2}
        assert (len(it), it.check_integrity()) == (2, [])

    def test_a_report_of_the_block_confirms_so_that_its_removal_counts(self) -> None:
        it = index(a="")
        it.predict(A, blocks("uv"), now=0.0)
        assert it.apply(worker_report("a", 1, BlocksStored(hashes=blocks("uv"))))
        assert it.apply(worker_report("a", 2, BlocksRemoved(hashes=blocks("v"))))
        assert it.match(blocks("uv")) == {A: 1}
        it.expire(100.0)
        assert it.match(blocks("uv")) == {A: 1}

    def test_a_block_that_is_predicted_outlives_its_removal(self) -> None:
        it = index(a="uv")
        assert it.apply(worker_report("a", 1, BlocksRemoved(hashes=blocks("v"))))
        it.predict(A, blocks("uv"), now=0.0)
        assert it.apply(worker_report("a", 2, BlocksRemoved(hashes=blocks("v"))))
        assert it.match(blocks("uv")) == {A: 2}
        it.expire(PREDICTED_FOR_S)
        assert it.match(blocks("uv")) == {A: 1}

    def test_a_later_prediction_prolongs_the_blocks_that_both_have(self) -> None:
        it = index(a="")
        it.predict(A, blocks("uvw"), now=0.0)
        it.predict(A, blocks("uvx"), now=3.0)
        it.expire(PREDICTED_FOR_S)
        assert it.match(blocks("uvw")) == {A: 2}
        assert it.match(blocks("uvx")) == {A: 3}
        it.expire(3.0 + PREDICTED_FOR_S)
        assert (len(it), it.check_integrity()) == (0, [])

    def test_end_with_the_life_of_the_worker_and_leave_the_next_one_alone(self) -> None:
        it = index(a="u", b="u")
        it.predict(A, blocks("uv"), now=0.0)
        it.add_worker(A, Incarnation("2"))
        assert it.match(blocks("uv")) == {B: 1}
        it.predict(A, blocks("uv"), now=1.0)
        it.expire(PREDICTED_FOR_S)
        assert it.match(blocks("uv")) == {A: 2, B: 1}

    def test_stay_over_a_gap_and_a_snapshot(self) -> None:
        it = index(a="u")
        it.predict(A, blocks("uv"), now=0.0)
        assert not it.apply(worker_report("a", 7))
        it.predict(A, blocks("uv"), now=0.0)
        assert it.match(blocks("uv")) == {A: 2}
        assert it.apply(worker_report("a", 0, BlocksSnapshot(hashes=blocks("u"))))
        assert it.match(blocks("uv")) == {A: 2}
        it.expire(PREDICTED_FOR_S)
        assert it.match(blocks("uv")) == {A: 1}

    def test_of_a_stranger_and_of_nothing_new_change_nothing(self) -> None:
        it = index(a="uv")
        it.predict(WorkerId("z"), blocks("uv"), now=0.0)
        it.predict(A, blocks("uv"), now=0.0)
        it.predict(A, (), now=0.0)
        assert it.match(blocks("uv")) == {A: 2}
        assert not it._predictions


# ---------------------------------------------------------------- resume points


def windowed(*workers: str) -> PrefixIndex:
    made = PrefixIndex()
    for name in ("a", "b", "c"):
        made.add_worker(WorkerId(name), Incarnation("1"), has_windows=name in workers)
    return made


def test_a_worker_with_windows_matches_its_deepest_point() -> None:
    it = windowed("a", "b")
    assert it.apply(worker_report("a", 0, BlocksSnapshot(hashes=blocks("uvwx"), resume=blocks("vy"))))
    assert it.apply(worker_report("b", 0, BlocksSnapshot(hashes=blocks("uv"))))
    assert it.apply(worker_report("c", 0, BlocksSnapshot(hashes=blocks("uvw"))))
    assert it.match(blocks("uvwxy")) == {"a": 2, "c": 3}
    assert it.apply(worker_report("a", 1, ResumeStored(hashes=blocks("w"))))
    assert it.apply(worker_report("b", 1, ResumeStored(hashes=blocks("uw"))))
    assert it.match(blocks("uvwxy")) == {"a": 3, "b": 1, "c": 3}
    assert it.find(blocks("uvwxy")).best(3) == [("a", 3), ("c", 3), ("b", 1)]
    assert it.apply(worker_report("a", 2, ResumeRemoved(hashes=blocks("w"))))
    assert it.match(blocks("uvwxy")) == {"a": 2, "b": 1, "c": 3}
    assert it.apply(worker_report("a", 3, BlocksRemoved(hashes=blocks("vwx"))))
    assert it.match(blocks("uvwxy")) == {"b": 1, "c": 3}
    assert it.check_integrity() == []


def test_points_go_with_their_worker_a_gap_or_a_snapshot() -> None:
    it = windowed("a", "b")
    for name in "ab":
        assert it.apply(worker_report(name, 0, BlocksSnapshot(hashes=blocks("uv"), resume=blocks("v"))))
    it.remove_worker(WorkerId("a"))
    assert it.match(blocks("uv")) == {"b": 2}
    assert not it.apply(worker_report("b", 5, ResumeStored(hashes=blocks("u"))))
    assert it.match(blocks("uv")) == {}
    assert it.apply(worker_report("b", 0, BlocksSnapshot(hashes=blocks("uv"), resume=blocks("u"))))
    assert it.match(blocks("uv")) == {"b": 1}
    it.add_worker(WorkerId("a"), Incarnation("2"))  # in the same place, without windows
    assert it.apply(worker_report("a", 0, BlocksSnapshot(hashes=blocks("uv")), incarnation="2"))
    assert it.match(blocks("uv")) == {"a": 2, "b": 1}
    assert it.check_integrity() == []


def test_a_prediction_gives_a_worker_with_windows_no_point() -> None:
    it = windowed("a")
    assert it.apply(worker_report("a", 0, BlocksSnapshot(hashes=blocks("uv"), resume=blocks("u"))))
    it.predict(WorkerId("a"), blocks("uvw"), 0.0, num_matched=1)
    assert it.match(blocks("uvw")) == {"a": 1}
    it.expire(100.0)
    assert it.match(blocks("uvw")) == {"a": 1}
    assert it.check_integrity() == []


def test_the_least_is_what_all_of_a_set_have() -> None:
    it = index(a="uvw", b="uv", c="uvwx", d="x")
    match = it.find(blocks("uvwx"))
    a, b, c, d = (it.bit(worker_id) for worker_id in (A, B, C, D))
    assert [match.least(each) for each in (a, a | c, a | b | c, a | d)] == [3, 3, 2, 0]
    assert it.find(blocks("z")).least(a) == 0
