"""Due times: of the rate that was asked for, ascending, and wrong configs refused by field."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.loadtests.workload.arrivals import ArrivalConfig, ArrivalKind, due_times, window_s

GENERATED: list[ArrivalKind] = ["poisson", "gamma", "burst", "uniform"]


def config(kind: ArrivalKind = "poisson", **values: Any) -> ArrivalConfig:
    return ArrivalConfig(kind=kind, **values)


def test_uniform_times_are_one_gap_apart() -> None:
    arrivals = config("uniform", rate_per_s=4.0, num_requests=4)
    assert due_times(arrivals) == [0.25, 0.5, 0.75, 1.0]
    assert window_s(arrivals, due_times(arrivals)) == 1.0


def test_bursts_come_at_once_from_the_start() -> None:
    arrivals = config("burst", rate_per_s=2.0, burst_size=3, num_requests=7)
    assert due_times(arrivals) == [0.0, 0.0, 0.0, 1.5, 1.5, 1.5, 3.0]
    assert window_s(arrivals, due_times(arrivals)) == 3.5


def test_duration_ends_the_plan_before_its_time() -> None:
    arrivals = config("uniform", rate_per_s=4.0, duration_s=1.0)
    assert due_times(arrivals) == [0.25, 0.5, 0.75]
    assert window_s(arrivals, due_times(arrivals)) == 1.0


@pytest.mark.parametrize(("duration_s", "num_requests", "due", "window"), [(9.0, 2, 2, 0.5), (0.6, 9, 2, 0.6)])
def test_of_two_ends_the_first_counts(duration_s: float, num_requests: int, due: int, window: float) -> None:
    arrivals = config("uniform", rate_per_s=4.0, duration_s=duration_s, num_requests=num_requests)
    times = due_times(arrivals)
    assert (len(times), window_s(arrivals, times)) == (due, window)


def test_a_seed_has_these_times_on_every_machine() -> None:
    assert due_times(config(rate_per_s=2.0, num_requests=4, seed=3)) == [0.1612, 1.495817, 1.750706, 2.0]


@pytest.mark.parametrize("kind", GENERATED)
def test_another_rate_is_the_same_pattern_at_another_pace(kind: ArrivalKind) -> None:
    values: dict[str, Any] = {"num_requests": 50, "seed": 1}
    slow = due_times(config(kind, rate_per_s=1.0, **values))
    fast = due_times(config(kind, rate_per_s=4.0, **values))
    assert [time * 4 for time in fast] == pytest.approx(slow, abs=4e-6)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 1.0), ("gamma", 2.5)])
def test_gaps_vary_as_much_as_they_should(kind: ArrivalKind, cv: float) -> None:
    times = due_times(config(kind, rate_per_s=10.0, num_requests=20_000, cv=cv))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert times[-1] == 2000.0
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def test_seeds_differ() -> None:
    assert due_times(config(rate_per_s=1.0, num_requests=9)) != due_times(
        config(rate_per_s=1.0, num_requests=9, seed=1)
    )


@given(
    kind=st.sampled_from(GENERATED),
    rate=st.floats(0.01, 1000),
    num_requests=st.integers(1, 60),
    cv=st.floats(0.01, 20),
    seed=st.integers(0, 2**40),
)
def test_times_ascend_from_zero_and_keep_their_number_and_span(
    kind: ArrivalKind, rate: float, num_requests: int, cv: float, seed: int
) -> None:
    own: dict[str, Any] = {"cv": cv} if kind == "gamma" else {"burst_size": 4} if kind == "burst" else {}
    arrivals = config(kind, rate_per_s=rate, num_requests=num_requests, seed=seed, **own)
    times = due_times(arrivals)
    assert len(times) == num_requests
    assert times == sorted(times)
    assert times[0] >= 0
    assert times == [round(time, 6) for time in times]
    assert times[-1] <= num_requests / rate + 1e-6
    assert window_s(arrivals, times) == num_requests / rate


def test_a_trace_keeps_its_pace_or_takes_a_rate() -> None:
    times = [5.0, 6.0, 9.0, 25.0]
    own = config("trace")
    assert due_times(own, times) == [0.0, 1.0, 4.0, 20.0]
    assert window_s(own, due_times(own, times)) == 20.0
    paced = config("trace", rate_per_s=2.0)
    assert due_times(paced, times) == [0.0, 0.1, 0.4, 2.0]
    assert window_s(paced, due_times(paced, times)) == 2.0
    first = config("trace", rate_per_s=2.0, num_requests=3)
    assert due_times(first, times) == [0.0, 0.375, 1.5]
    assert due_times(config("trace", duration_s=4.0), times) == [0.0, 1.0]
    assert due_times(config("trace"), []) == []


def test_a_trace_without_a_span_has_no_rate() -> None:
    with pytest.raises(ValueError, match=r"^rate_per_s: the trace spans no time"):
        due_times(config("trace", rate_per_s=1.0), [3.0, 3.0])
    with pytest.raises(ValueError, match=r"^arrivals: all requests of the trace are due at once"):
        window_s(config("trace"), [0.0, 0.0])


def test_a_plan_without_requests_has_no_window() -> None:
    arrivals = config("uniform", rate_per_s=1.0, duration_s=0.5)
    with pytest.raises(ValueError, match=r"^arrivals: no request is due"):
        window_s(arrivals, due_times(arrivals))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_requests": 3}, "rate_per_s: needed"),
    ({"rate_per_s": 1.0}, "duration_s: one of"),
    ({"rate_per_s": 0.0, "num_requests": 3}, "rate_per_s: expected a number above 0"),
    ({"rate_per_s": float("nan"), "num_requests": 3}, "rate_per_s: expected a number above 0"),
    ({"rate_per_s": 1.0, "duration_s": float("inf")}, "duration_s: expected a number above 0"),
    ({"rate_per_s": 1.0, "num_requests": 0}, "num_requests: expected a number above 0"),
    ({"rate_per_s": 1.0, "num_requests": 3, "cv": 2.0}, "cv: only arrivals of kind gamma"),
    ({"rate_per_s": 1.0, "num_requests": 3, "burst_size": 2}, "burst_size: only arrivals of kind burst"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_config_that_cannot_be_names_its_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        ArrivalConfig(**values)


def test_a_file_cannot_say_more_than_there_is() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `rate`"):
        msgspec.convert({"rate": 1, "num_requests": 2}, ArrivalConfig)
