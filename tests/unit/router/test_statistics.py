"""Histograms, counts of the last seconds, and counters of workers over their incarnations."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.ids import WorkerId
from disagg.proto.messages import TierCounts, TransferCount, WorkerMetrics
from disagg.router.statistics import Histogram, SlidingWindowCounter, merged
from disagg.router.workers.worker_counts import WorkerCounts
from tests.support.router import worker_report

# ---------------------------------------------------------------- histograms


def test_a_value_belongs_to_the_interval_that_ends_with_it() -> None:
    it = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 100.0):
        it.observe(value)
    it.observe(2.0, times=3)
    assert (it.counts, it.total, it.num_observed) == ([2, 5, 2], 113.0, 9)


def test_merged_histograms_have_seen_all() -> None:
    one, other = Histogram((1.0,)), Histogram((1.0,))
    one.observe(0.5)
    other.observe(3.0)
    both = merged([one, other])
    assert (both.counts, both.total) == ([1, 1], 3.5)
    assert (one.counts, other.counts) == ([1, 0], [0, 1])
    with pytest.raises(AssertionError, match="different intervals"):
        merged([one, Histogram((2.0,))])


# ---------------------------------------------------------------- the last seconds


ADDED = st.tuples(st.integers(0, 30), st.sampled_from("ab"), st.integers(1, 5))


@given(st.lists(ADDED, max_size=40), st.integers(0, 5))
def test_recent_counts_are_those_of_the_span(added: list[tuple[int, str, int]], later: int) -> None:
    added.sort(key=lambda each: each[0])
    it = SlidingWindowCounter(10)
    for second, name, times in added:
        it.add(second + 0.5, name, times)
    now = (added[-1][0] if added else 0) + later
    for within in (3, 10):
        expected = {
            name: sum(times for second, other, times in added if other == name and now - within < second <= now)
            for name in "ab"
        }
        totals = it.totals(now + 0.75, within)
        assert {name: totals[name] for name in "ab"} == expected


# ---------------------------------------------------------------- workers


def metrics(steps: int, *, seconds: float = 0.0, transfers: tuple[TransferCount, ...] = ()) -> WorkerMetrics:
    return WorkerMetrics(
        step_seconds=(steps, 2 * steps),
        step_seconds_sum=seconds,
        prompt_tokens=3 * steps,
        cached_tokens=4 * steps,
        output_tokens=5 * steps,
        preemptions=6 * steps,
        swapped_out_blocks=7 * steps,
        swapped_in_blocks=8 * steps,
        draft_steps=9 * steps,
        drafted_tokens=10 * steps,
        accepted_tokens=11 * steps,
        draft_runs=(12 * steps, 13 * steps),
        transfers=transfers,
    )


def moved(decode_worker: str, num_bytes: int, **failures: int) -> TransferCount:
    return TransferCount(
        decode_worker=WorkerId(decode_worker), transport="t", num_transfers=1, num_bytes=num_bytes, failures=failures
    )


def take(it: WorkerCounts, worker_id: str, incarnation: str, said: WorkerMetrics | None) -> None:
    it.take(msgspec.structs.replace(worker_report(worker_id, 0, incarnation=incarnation), metrics=said))


def test_what_a_life_says_replaces_what_it_said() -> None:
    it = WorkerCounts()
    take(it, "p0", "1", metrics(1))
    take(it, "p0", "1", None)
    take(it, "p0", "1", metrics(4))
    take(it, "d0", "1", metrics(2))
    assert it.totals() == {"d0": metrics(2), "p0": metrics(4)}


def test_the_imbalance_of_experts_is_that_of_the_present_life() -> None:
    it = WorkerCounts()
    take(it, "p0", "1", WorkerMetrics(expert_imbalance=(3.0,)))
    take(it, "p0", "2", WorkerMetrics(expert_imbalance=(1.5,)))
    assert it.totals() == {"p0": WorkerMetrics(expert_imbalance=(1.5,))}


def test_of_tiers_what_is_no_count_is_that_of_the_present_life() -> None:
    it = WorkerCounts()
    past = TierCounts(name="disk", extent_ms=9.0, capacity_bytes=8, held_bytes=4, written_extents=2, off_reason="full")
    take(it, "p0", "1", WorkerMetrics(tiers=(past,)))
    present = TierCounts(name="disk", extent_ms=3.0, capacity_bytes=16, held_bytes=1, written_extents=1)
    take(it, "p0", "2", WorkerMetrics(tiers=(present,)))
    assert it.totals() == {"p0": WorkerMetrics(tiers=(msgspec.structs.replace(present, written_extents=3),))}


def test_fetches_of_all_lives_are_added_by_outcome() -> None:
    it = WorkerCounts()
    take(it, "p0", "1", WorkerMetrics(fetched_tokens=128, fetches={"done": 1, "late": 2}, served_fetches=3))
    take(it, "p0", "2", WorkerMetrics(fetched_tokens=256, fetches={"done": 4, "refused": 5}, served_fetches=6))
    assert it.totals() == {
        "p0": WorkerMetrics(fetched_tokens=384, fetches={"done": 5, "late": 2, "refused": 5}, served_fetches=9)
    }


def test_another_life_goes_on_where_the_last_one_ended() -> None:
    it = WorkerCounts()
    take(it, "p0", "1", metrics(4, seconds=1.5, transfers=(moved("d0", 10, stuck=1), moved("d1", 5))))
    take(it, "p0", "2", metrics(0))
    assert it.totals() == {
        "p0": metrics(4, seconds=1.5, transfers=(moved("d0", 10, stuck=1), moved("d1", 5))),
    }
    take(it, "p0", "2", metrics(1, seconds=0.5, transfers=(moved("d0", 7, stuck=2, kv_gone=3), moved("d2", 1))))
    take(it, "p0", "3", metrics(1))
    together = TransferCount(
        decode_worker=WorkerId("d0"),
        transport="t",
        num_transfers=2,
        num_bytes=17,
        failures={"stuck": 3, "kv_gone": 3},
    )
    assert it.totals() == {"p0": metrics(6, seconds=2.0, transfers=(together, moved("d1", 5), moved("d2", 1)))}


def test_a_life_that_comes_back_is_not_counted_twice() -> None:
    it = WorkerCounts()
    take(it, "p0", "1", metrics(4))
    take(it, "p0", "1", metrics(5))
    assert it.totals() == {"p0": metrics(5)}


def test_a_life_without_steps_takes_nothing_away() -> None:
    it = WorkerCounts()
    take(it, "p0", "1", metrics(4))
    take(it, "p0", "2", WorkerMetrics())
    assert it.totals() == {"p0": metrics(4)}
