"""When the twin compares, on what, and whether it changes the setting; with a replay that is given."""

from __future__ import annotations

import msgspec
import pytest

from disagg.router.config import Decodes
from disagg.router.telemetry.recent_load import Arrival
from disagg.simulator.twin.comparison import Comparison
from disagg.simulator.twin.twin import LEAD_IN, MOST, Twin
from tests.support.twins import WORKERS, FakeReplay, arrival, evenly, load


def always(better: Decodes, every: int = 1) -> FakeReplay:
    """One setting meets all targets, the other fails at each `every`-th."""
    return FakeReplay(lambda decodes, index: decodes == better or index % every != 0)


def equal() -> FakeReplay:
    return FakeReplay(lambda decodes, index: True)


def looked(twin: Twin, arrivals: list[Arrival], now_s: float, decodes: Decodes = "spread") -> Comparison:
    comparison = twin.look(load([each for each in arrivals if each.at_s <= now_s], now_s, decodes))
    assert comparison is not None
    return comparison


def test_forty_requests_are_compared_at_both_rates_and_the_better_setting_is_taken() -> None:
    replay = always("gather", every=2)
    twin = Twin(replay)
    assert twin.look(load(evenly(39), 39.0)) is None
    found = twin.look(load(evenly(40), 40.0))
    assert found is not None
    assert (found.cause, found.num_requests, found.present, found.chosen) == (
        "first comparison",
        40,
        "spread",
        "gather",
    )
    assert replay.calls == [
        ("spread", 1.0, 40, 0),
        ("spread", 1.15, 40, 0),
        ("gather", 1.0, 40, 0),
        ("gather", 1.15, 40, 0),
        ("split:1", 1.0, 40, 0),
        ("split:1", 1.15, 40, 0),
    ]
    assert [(each.decodes, each.by_rate) for each in found.attained] == [
        ("spread", ((1.0, 0.5), (1.15, 0.5))),
        ("gather", ((1.0, 1.0), (1.15, 1.0))),
        ("split:1", ((1.0, 0.5), (1.15, 0.5))),
    ]
    assert (found.difference, found.error, found.needed) == (0.5, 1 / 40, 1 / 40 + 0.01)
    assert found.reason == "gather is better by more than the error and 1%"


def test_a_difference_within_error_and_hysteresis_changes_nothing() -> None:
    # 200 requests in blocks of 20; each block has one that only gather meets: no error but 1/200.
    found = looked(Twin(always("gather", every=20)), evenly(200), 199.0)
    assert (found.difference, found.error, found.chosen) == (0.05, 0.005, "gather")
    # Three in all, in three of the ten blocks: 0.015 is not more than its error and 0.01.
    replay = FakeReplay(lambda decodes, index: decodes == "gather" or index not in (10, 90, 150))
    found = looked(Twin(replay), evenly(200), 199.0)
    assert (found.difference, found.chosen) == (0.015, "spread")
    assert found.error == pytest.approx((10 * 0.21 * 0.05**2 / 9 / 10) ** 0.5)
    assert found.reason == "gather is not better by more than the error and 1%"


def test_hysteresis_counts_also_without_noise() -> None:
    # 600 requests, two in each block of sixty: 1/30 with an error of 1/600.
    assert looked(Twin(always("gather", every=30)), evenly(600), 599.0).chosen == "gather"
    # One in each block: 1/60 = 0.0167 is more than 1/600 + 0.01.
    assert looked(Twin(always("gather", every=60)), evenly(600), 599.0).chosen == "gather"
    # One in a hundred, spread so evenly that there is hardly any error: less than the hysteresis.
    assert looked(Twin(always("gather", every=100)), evenly(600), 599.0).chosen == "spread"


def test_comparisons_come_with_half_as_many_requests_more_and_from_two_hundred_on_each_minute() -> None:
    twin, arrivals = Twin(equal()), evenly(400)
    times = [now for now in range(0, 400) if twin.look(load(arrivals[: now + 1], float(now)))]
    assert times == [39, 59, 89, 134, 194, 254, 314, 374]


def test_at_a_high_rate_two_hundred_are_not_waited_for_a_minute() -> None:
    twin, arrivals = Twin(equal()), evenly(1000, gap_s=0.1)
    numbers = [number for number in range(1, 1000) if twin.look(load(arrivals[:number], number / 10))]
    assert numbers == [40, 60, 90, 135, 203, 803]


def test_the_setting_stays_for_a_minute_after_a_change() -> None:
    replay = always("gather", every=2)
    twin, arrivals = Twin(replay), evenly(300, gap_s=0.5)
    assert looked(twin, arrivals, 20.0).chosen == "gather"
    replay.meets = always("spread", every=2).meets
    found = looked(twin, arrivals, 35.0, "gather")
    assert (found.present, found.chosen) == ("gather", "gather")
    assert found.reason == "spread is better, and the setting was changed 15 s ago"
    assert looked(twin, arrivals, 80.0, "gather").chosen == "spread"


def test_a_change_of_the_load_permits_a_change_at_once_and_forgets_what_came_before() -> None:
    replay = always("gather", every=2)
    twin = Twin(replay)
    arrivals = [*evenly(200, gap_s=0.5), *evenly(60, start_s=100.0, gap_s=0.5, ttft_s=0.5)]
    assert looked(twin, arrivals, 99.5).chosen == "gather"
    replay.meets = always("spread", every=2).meets
    replay.calls.clear()
    assert twin.look(load([each for each in arrivals if each.at_s <= 110.0], 110.0, "gather")) is None
    found = looked(twin, arrivals, 120.0, "gather")
    assert (found.cause, found.num_requests, found.chosen) == ("TTFT targets are tighter", 41, "spread")
    assert replay.calls[0] == ("spread", 1.0, 41 + LEAD_IN, LEAD_IN)


def test_at_most_six_hundred_requests_are_compared_the_latest() -> None:
    replay = equal()
    assert looked(Twin(replay), evenly(1000), 999.0).num_requests == MOST
    assert replay.calls[0][2:] == (MOST + LEAD_IN, LEAD_IN)


def test_long_prompts_are_fewer() -> None:
    replay = equal()
    looked(Twin(replay), evenly(200, prompt_tokens=40_000), 199.0)
    assert replay.calls[0][2:] == (66, 0)


def test_long_answers_are_fewer_and_one_that_runs_counts_with_the_mean() -> None:
    replay = equal()
    looked(Twin(replay), evenly(600, output_tokens=4_000), 599.0)
    assert replay.calls[0][2:] == (83, 0)
    replay.calls.clear()
    answers = [*evenly(300, output_tokens=4_000), *evenly(100, start_s=300.0, output_tokens=1, is_complete=False)]
    looked(Twin(replay), answers, 399.0)
    assert replay.calls[0][2:] == (83, 0)


def test_of_the_longest_requests_there_are_forty() -> None:
    replay = equal()
    looked(Twin(replay), evenly(100, output_tokens=30_000), 99.0)
    assert replay.calls[0][2:] == (40, 0)
    replay.calls.clear()
    looked(Twin(replay), evenly(100, prompt_tokens=1_000_000), 99.0)
    assert replay.calls[0][2:] == (40, 0)


def test_requests_without_targets_are_replayed_and_not_counted() -> None:
    replay = equal()
    twin = Twin(replay)
    plain = evenly(100, ttft_s=None, tpot_s=None)
    assert twin.look(load(plain, 100.0)) is None
    mixed = sorted([*plain, *evenly(40, start_s=0.5)], key=lambda each: each.at_s)
    assert looked(twin, mixed, 200.0).cause == "first comparison"
    assert replay.calls[0][2] == 140


def test_a_change_by_somebody_else_holds_for_a_minute() -> None:
    twin, arrivals = Twin(always("spread", every=2)), evenly(400)
    assert looked(twin, arrivals, 250.0).chosen == "spread"
    found = looked(twin, arrivals, 311.0, "gather")
    assert (found.chosen, found.reason) == ("gather", "spread is better, and the setting was changed 0 s ago")
    assert looked(twin, arrivals, 371.0, "gather").chosen == "spread"


def test_other_workers_are_a_reason_to_compare_again() -> None:
    twin, arrivals = Twin(equal()), evenly(250)
    assert looked(twin, arrivals, 240.0).cause == "first comparison"
    more = (*WORKERS, msgspec.structs.replace(WORKERS[0], worker_id="workers-2"))
    found = twin.look(load(arrivals, 249.0, workers=more))
    assert found is not None
    assert found.cause == "the workers changed"
    slower = msgspec.structs.replace(WORKERS[0], steps=WORKERS[0].steps._replace(base_ms=9.0))
    assert twin.look(load(arrivals, 250.0, workers=[slower, *more[1:]])) is None


def test_with_one_worker_nothing_is_compared_and_a_restart_of_the_other_one_is_no_change() -> None:
    twin, arrivals = Twin(equal()), evenly(250)
    assert twin.look(load(arrivals, 230.0, workers=WORKERS[:1])) is None
    assert looked(twin, arrivals, 240.0).cause == "first comparison"
    assert twin.look(load(arrivals, 245.0, workers=WORKERS[:1])) is None
    assert twin.look(load(arrivals, 249.0)) is None


def test_nothing_is_compared_again_while_no_request_comes() -> None:
    twin, arrivals = Twin(equal()), evenly(250)
    assert looked(twin, arrivals, 249.0).cause == "first comparison"
    assert twin.look(load(arrivals, 1000.0)) is None
    assert looked(twin, [*arrivals, arrival(1001.0)], 1001.0).cause == "60 s passed"


def test_a_change_that_was_put_off_is_made_when_no_request_comes_either() -> None:
    replay = always("gather", every=2)
    twin, arrivals = Twin(replay), evenly(60)
    assert looked(twin, arrivals[:40], 40.0).chosen == "gather"
    replay.meets = always("spread", every=2).meets
    assert looked(twin, arrivals, 60.0, "gather").chosen == "gather"
    assert looked(twin, arrivals, 120.0, "gather").chosen == "spread"


def test_nothing_is_compared_without_the_setting_or_without_workers() -> None:
    twin, arrivals = Twin(equal()), [arrival(float(index)) for index in range(100)]
    assert twin.look(load(arrivals, 100.0, None)) is None
    assert twin.look(load(arrivals, 100.0, workers=())) is None


def test_what_was_measured_under_the_present_setting_stands_beside_the_prediction() -> None:
    replay = always("gather", every=2)
    twin = Twin(replay)
    arrivals = [
        *evenly(30, is_met=False),
        *evenly(10, start_s=30.0, is_met=True),
        *evenly(20, start_s=41.0, is_met=True),
        *evenly(5, start_s=61.0, is_met=False),
        *evenly(5, start_s=66.0, is_complete=False),
    ]
    found = looked(twin, arrivals, 40.0)
    assert (found.chosen, found.measured, found.num_measured) == ("gather", 0.25, 40)
    found = looked(twin, arrivals, 70.0, "gather")
    assert (found.present, found.measured, found.num_measured) == ("gather", 0.8, 25)
    found = looked(Twin(replay), evenly(40), 40.0)
    assert (found.measured, found.num_measured) == (None, 0)
