"""Pauses before the starts of a process that keeps ending."""

from __future__ import annotations

from disagg.cluster.core.backoff import Starts, next_actor_start

LIFE_S = 1.0


def pauses(count: int, life_s: float, since: Starts) -> list[float]:
    """Before each of `count` starts of a process that lives `life_s` after its pause."""
    found, starts = [], since
    for _ in range(count):
        starts, pause_s = next_actor_start(starts, starts.last + life_s)
        found.append(pause_s)
    return found


def test_a_worker_that_ends_again_and_again_is_started_ever_more_slowly() -> None:
    first, pause_s = next_actor_start(Starts(), 1_000.0)
    assert (first, pause_s) == (Starts(count=1, last=1_000.0), 0.0)
    assert pauses(9, LIFE_S, first) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_the_pause_is_not_a_part_of_the_life() -> None:
    assert next_actor_start(Starts(count=7, last=1_000.0), 1_001.0) == (Starts(count=8, last=1_031.0), 30.0)


def test_a_long_life_makes_the_next_fault_a_first_one() -> None:
    assert next_actor_start(Starts(count=7, last=1_000.0), 1_060.0) == (Starts(count=1, last=1_060.0), 0.0)


def test_a_clock_that_was_set_back_is_no_short_life() -> None:
    assert next_actor_start(Starts(count=7, last=1_000.0), 900.0) == (Starts(count=1, last=900.0), 0.0)
