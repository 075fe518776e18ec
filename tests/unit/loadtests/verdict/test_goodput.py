"""Scores: counted by hand on small runs, and against other definitions on arbitrary ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.loadtests.records import RequestRecord, Status
from disagg.loadtests.verdict.goodput import (
    Outcomes,
    Quantiles,
    Slo,
    evaluate,
    meets,
    meets_tpot,
    meets_ttft,
    quantiles,
    slo_grid,
)
from tests.support.load_records import record

SLO = Slo(ttft_s=1.0, tpot_s=0.25)


# ---------------------------------------------------------------- one request


def test_limits_are_met_up_to_and_including_their_value() -> None:
    assert meets(record(0, 1.0, 0.25, 3), SLO)
    late, slow = record(0, 1.5, 0.25, 3), record(0, 1.0, 0.5, 3)
    assert (meets_ttft(late, SLO), meets_tpot(late, SLO), meets(late, SLO)) == (False, True, False)
    assert (meets_ttft(slow, SLO), meets_tpot(slow, SLO), meets(slow, SLO)) == (True, False, False)


def test_one_output_token_has_no_pace_to_miss() -> None:
    one = record(0, 0.5, 9.0, 1)
    assert one.tpot_s is None
    assert meets(one, SLO)


@pytest.mark.parametrize("status", ["refused", "failed", "deadline", "dropped"])
def test_what_did_not_come_whole_missed_every_limit(status: Status) -> None:
    fast = record(0, 0.001, 0.001, 3, status=status)
    assert not meets_ttft(fast, Slo())
    assert not meets_tpot(fast, Slo())
    assert not meets(fast, Slo())


def test_an_answer_without_a_token_has_no_first_one() -> None:
    assert not meets_ttft(record(0, None), Slo())


# ---------------------------------------------------------------- one run


RUN = [
    record(0, 0.5, 0.25, 3),
    record(1, 1.5, 0.25, 3),
    record(2, 0.5, 0.5, 3),
    record(3, 0.75),
    record(4, None, status="refused"),
    record(5, 0.5, 0.25, 2, status="failed"),
    record(6, None, status="deadline"),
    record(7, None, status="dropped", lateness_s=0.004),
]


def test_a_run_is_counted_by_hand() -> None:
    score = evaluate(RUN, SLO, 4.0)
    counts = (score.num_due, score.num_ok, score.num_refused, score.num_failed, score.num_dropped, score.num_good)
    assert counts == (8, 4, 1, 2, 1, 2)
    assert score.goodput_per_s == 0.5
    assert (score.ttft_attainment, score.tpot_attainment, score.attainment) == (3 / 8, 3 / 8, 2 / 8)
    assert astuple(score.ttft) == pytest.approx((4, 0.625, 1.275, 1.4775, 1.5))
    assert astuple(score.tpot) == pytest.approx((3, 0.25, 0.45, 0.495, 0.5))
    assert score.itl == Quantiles(count=6, p50=0.25, p90=0.5, p99=0.5, max=0.5)
    assert astuple(score.e2e) == pytest.approx((4, 1.25, 1.85, 1.985, 2.0))
    assert score.lateness.max == pytest.approx(0.004)
    assert score.output_tokens_per_s == 12 / 5.75
    assert score.is_valid


def test_tokens_of_one_message_have_no_gap_and_a_stall_shows() -> None:
    stalled = RequestRecord(
        index=0,
        due_s=0.0,
        sent_s=0.0,
        status="ok",
        num_prompt_tokens=8,
        max_tokens=4,
        token_times_s=(0.5, 0.5, 2.5, 2.75),
        end_s=3.0,
        cached_tokens=6,
    )
    score = evaluate([stalled], Slo(), 1.0)
    assert (score.itl.count, score.itl.p50, score.itl.max) == (3, 0.25, 2.0)
    assert score.tpot.p50 == 0.75
    assert score.e2e.max == 3.0
    assert score.cached_share == 0.75


def test_without_whole_answers_latencies_are_empty() -> None:
    score = evaluate([record(0, None, status="refused")], SLO, 1.0)
    empty = Quantiles(count=0, p50=0.0, p90=0.0, p99=0.0, max=0.0)
    assert [score.ttft, score.tpot, score.itl, score.e2e] == [empty] * 4
    assert (score.attainment, score.goodput_per_s, score.output_tokens_per_s, score.cached_share) == (0, 0, 0, 0)
    assert score.is_valid


@pytest.mark.parametrize(("lateness_s", "is_valid"), [(0.0049, True), (0.0051, False)])
def test_a_late_generator_makes_a_run_invalid(lateness_s: float, is_valid: bool) -> None:
    score = evaluate([record(index, lateness_s=lateness_s) for index in range(10)], SLO, 1.0)
    assert score.is_valid is is_valid
    assert score.invalid_reasons == (
        () if is_valid else ("the generator was late: p99 5.1 ms, at most 5 ms is allowed",)
    )


def test_one_late_request_in_a_thousand_does_not() -> None:
    assert evaluate([record(index, lateness_s=float(index == 7)) for index in range(1000)], SLO, 1.0).is_valid


def test_short_and_double_answers_make_a_run_invalid() -> None:
    short = RequestRecord(
        index=0, due_s=0.0, sent_s=0.0, status="ok", num_prompt_tokens=1, max_tokens=2, token_times_s=(0.1,)
    )
    assert evaluate([short, short], SLO, 1.0).invalid_reasons == (
        "2 answers do not have the forced number of tokens",
        "some requests have more than one record",
    )


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.inf, math.nan])
def test_a_score_needs_records_and_a_duration(duration_s: float) -> None:
    with pytest.raises(ValueError, match=r"^records: "):
        evaluate([], SLO, 1.0)
    with pytest.raises(ValueError, match=r"^duration_s: "):
        evaluate(RUN, SLO, duration_s)


def test_limits_are_times_and_scale() -> None:
    with pytest.raises(ValueError, match=r"^tpot_s: expected a time above 0; got 0"):
        Slo(tpot_s=0.0)
    assert SLO.scaled(2.0, 4.0) == Slo(ttft_s=2.0, tpot_s=1.0)
    assert Slo(tpot_s=1.0).scaled(2.0, 3.0) == Slo(tpot_s=3.0)
    assert [str(slo) for slo in (SLO, Slo(), Slo(ttft_s=0.5))] == [
        "TTFT 1000 ms, TPOT 250 ms",
        "no limit",
        "TTFT 500 ms",
    ]
    assert slo_grid(SLO, [1, 2], [1, 3]) == [SLO, SLO.scaled(1, 3), SLO.scaled(2, 1), SLO.scaled(2, 3)]


# ---------------------------------------------------------------- quantiles


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p99"),
    [([5.0], 5, 5, 5), ([1.0, 2.0], 1.5, 1.9, 1.99), ([3.0, 1.0, None, 2.0], 2, 2.8, 2.98), (range(101), 50, 90, 99)],
)
def test_quantiles_of_small_cases(values: Sequence[float | None], p50: float, p90: float, p99: float) -> None:
    present = [value for value in values if value is not None]
    assert astuple(quantiles(values)) == pytest.approx((len(present), p50, p90, p99, max(present)))


@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_quantiles_are_those_of_numpy(values: list[float]) -> None:
    expected = [float(value) for value in np.percentile(values, [50, 90, 99, 100])]
    assert list(astuple(quantiles(values))[1:]) == pytest.approx(expected, rel=1e-9, abs=1e-9)


# ---------------------------------------------------------------- many limits


statuses: st.SearchStrategy[Status] = st.sampled_from(["ok", "ok", "ok", "refused", "failed", "dropped"])
outcomes = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 4), statuses)
limits = st.one_of(st.none(), st.integers(1, 9).map(lambda eighths: eighths / 8))


def run_of(drawn: list[tuple[int, int, int, Status]]) -> list[RequestRecord]:
    """Times in eighths of a second, so that limits are met exactly."""
    return [
        record(index, ttft / 8 if tokens else None, tpot / 8, tokens, due_s=0.0, status=status)
        for index, (ttft, tpot, tokens, status) in enumerate(drawn)
    ]


@given(drawn=st.lists(outcomes, min_size=1, max_size=20), ttft_s=limits, tpot_s=limits)
def test_offline_scores_are_those_of_evaluate(
    drawn: list[tuple[int, int, int, Status]], ttft_s: float | None, tpot_s: float | None
) -> None:
    run, slo = run_of(drawn), Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    score, offline = evaluate(run, slo, 2.0), Outcomes(run, 2.0)
    assert score.num_good == sum(meets(one, slo) for one in run)
    assert offline.num_good(slo) == score.num_good
    assert offline.attainment(slo) == score.attainment
    assert offline.goodput_per_s(slo) == score.goodput_per_s
    assert score.attainment <= min(score.ttft_attainment, score.tpot_attainment)


@given(
    drawn=st.lists(outcomes, min_size=1, max_size=20),
    slo=st.builds(Slo, ttft_s=limits, tpot_s=limits),
    ttft=st.floats(1, 4),
    tpot=st.floats(1, 4),
)
def test_goodput_does_not_fall_when_limits_are_loosened(
    drawn: list[tuple[int, int, int, Status]], slo: Slo, ttft: float, tpot: float
) -> None:
    scored = Outcomes(run_of(drawn), 1.0)
    assert scored.num_good(slo) <= scored.num_good(slo.scaled(ttft, tpot)) <= scored.num_good(Slo())
