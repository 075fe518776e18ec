"""CUSUM on the load: what is reported, when, and since when."""

from __future__ import annotations

import pytest

from disagg.loadtests.workload.randomness import Stream
from disagg.router.telemetry.recent_load import Arrival
from disagg.simulator.twin.changes import Change, find_change
from tests.support.twins import arrival, evenly

BEFORE = evenly(60)


def poisson(number: int, rate_per_s: float, seed: int, start_s: float = 0.0) -> list[Arrival]:
    draws, at_s, found = Stream("changes", seed), start_s, []
    for _ in range(number):
        at_s += draws.exponential() / rate_per_s
        found.append(arrival(at_s, prompt_tokens=round(512 * 2 ** draws.normal())))
    return found


def test_the_same_load_is_no_change() -> None:
    assert find_change(BEFORE, evenly(500, start_s=60.0)) is None


def test_too_little_before_is_no_change() -> None:
    assert find_change(BEFORE[:39], evenly(50, start_s=60.0, prompt_tokens=4096)) is None
    assert find_change(BEFORE[:40], evenly(50, start_s=60.0, prompt_tokens=4096)) == Change(60.0, "prompts are longer")


def test_a_change_is_dated_by_its_first_request() -> None:
    # Off by 3 deviations, less 0.3: 2.7 each, so that the fifth exceeds 12.
    after = [*evenly(20, start_s=60.0), *evenly(5, start_s=80.0, ttft_s=0.5)]
    assert find_change(BEFORE, after) == Change(80.0, "TTFT targets are tighter")
    assert find_change(BEFORE, after[:-1]) is None


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"ttft_s": 4.0}, "TTFT targets are looser"),
        ({"tpot_s": 0.01}, "TPOT targets are tighter"),
        ({"tpot_s": 0.04}, "TPOT targets are looser"),
        ({"prompt_tokens": 128}, "prompts are shorter"),
        ({"output_tokens": 32}, "answers are shorter"),
        ({"gap_s": 2.0}, "requests come at a lower rate"),
        ({"gap_s": 0.25}, "requests come at a higher rate"),
    ],
)
def test_each_value_in_both_directions(fields: dict[str, float], what: str) -> None:
    change = find_change(BEFORE, evenly(20, start_s=60.0, **fields))
    assert change is not None
    assert change.what == what


def test_a_few_odd_requests_are_no_change() -> None:
    after = evenly(40, start_s=60.0)
    for index in (3, 4, 5, 20):
        after[index] = arrival(60.0 + index, prompt_tokens=4096)
    assert find_change(BEFORE, after) is None


def test_answers_that_are_not_complete_and_targets_that_are_not_there_do_not_count() -> None:
    after = evenly(30, start_s=60.0, output_tokens=1, is_complete=False, ttft_s=None, tpot_s=None)
    assert find_change(BEFORE, after) is None


def test_random_arrivals_of_one_rate_are_seldom_reported_and_twice_the_rate_nearly_always() -> None:
    found = {"same": 0, "twice": 0}
    for seed in range(40):
        before = poisson(200, 2.0, seed)
        end_s = before[-1].at_s
        found["same"] += find_change(before, poisson(120, 2.0, seed + 100, end_s)) is not None
        found["twice"] += find_change(before, poisson(120, 4.0, seed + 100, end_s)) is not None
    assert found == {"same": 4, "twice": 37}
