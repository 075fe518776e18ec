"""The search for the largest rate: step by step on a known server, and its ending and its fit on arbitrary ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.loadtests.verdict.search import (
    Probe,
    Run,
    SearchConfig,
    balanced_order,
    fitted,
    next_rate,
    served_rate,
)


def probe(rate_per_s: float, attainment: float, num_requests: int = 100) -> Probe:
    return Probe(rate_per_s=rate_per_s, attainment=attainment, num_requests=num_requests)


def search(config: SearchConfig, attainment: Callable[[float], float]) -> list[Probe]:
    """Everything a sweep measures against a server with this attainment at each rate."""
    probes: list[Probe] = []
    while (rate := next_rate(config, probes)) is not None:
        assert len(probes) < 1000, "the search does not end"
        probes.append(probe(rate, attainment(rate)))
    return probes


def knee(at: float) -> Callable[[float], float]:
    """A server that serves all below a rate and nothing above."""
    return lambda rate: 1.0 if rate <= at else 0.0


# ---------------------------------------------------------------- the search


def test_rates_are_doubled_and_then_halved_between() -> None:
    probes = search(SearchConfig(start_rate_per_s=1.0, tolerance=0.06), knee(5.3))
    assert [one.rate_per_s for one in probes] == [1.0, 2.0, 4.0, 8.0, 6.0, 5.0, 5.5, 5.25]
    served = served_rate(probes)
    assert (served.bound, served.served_per_s, served.missed_per_s) == ("between", 5.25, 5.5)


def test_rates_are_halved_while_nothing_is_served() -> None:
    probes = search(SearchConfig(start_rate_per_s=4.0, tolerance=0.5), knee(0.7))
    assert [one.rate_per_s for one in probes] == [4.0, 2.0, 1.0, 0.5, 0.75]
    assert served_rate(probes).served_per_s == 0.5


def test_the_search_ends_at_its_bounds() -> None:
    config = SearchConfig(start_rate_per_s=1.0, min_rate_per_s=0.3, max_rate_per_s=3.0)
    assert [one.rate_per_s for one in search(config, knee(0.0))] == [1.0, 0.5, 0.3]
    assert [one.rate_per_s for one in search(config, knee(99.0))] == [1.0, 2.0, 3.0]
    assert str(served_rate(search(config, knee(0.0)))) == "< 0.3"
    assert str(served_rate(search(config, knee(99.0)))) == ">= 3"


def test_a_search_goes_on_from_what_is_already_measured_in_any_order() -> None:
    config = SearchConfig(start_rate_per_s=1.0, tolerance=0.02)
    probes = search(config, knee(5.3))
    for done in range(1, len(probes)):
        assert next_rate(config, reversed(probes[:done])) == probes[done].rate_per_s
    assert next_rate(config, reversed(probes)) is None


@given(
    knee_at=st.floats(0.06, 900),
    start=st.floats(0.05, 900),
    tolerance=st.floats(0.02, 0.5),
)
def test_the_rate_is_found_within_the_tolerance(knee_at: float, start: float, tolerance: float) -> None:
    probes = search(SearchConfig(start_rate_per_s=start, tolerance=tolerance), knee(knee_at))
    found = served_rate(probes)
    assert found.served_per_s is not None
    assert found.served_per_s <= knee_at
    assert found.missed_per_s is not None
    assert knee_at < found.missed_per_s <= found.served_per_s * (1 + tolerance)
    assert len({one.rate_per_s for one in probes}) == len(probes) < 40


@given(seed=st.lists(st.floats(0, 1), min_size=1, max_size=30), tolerance=st.floats(0.02, 0.5))
def test_the_search_ends_whatever_is_measured(seed: list[float], tolerance: float) -> None:
    config = SearchConfig(start_rate_per_s=1.0, min_rate_per_s=0.1, max_rate_per_s=64.0, tolerance=tolerance)
    draws = iter(seed * 1000)
    probes = search(config, lambda _: next(draws))
    assert len({one.rate_per_s for one in probes}) == len(probes)
    assert all(0.1 <= one.rate_per_s <= 64.0 for one in probes)


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("start_rate_per_s", {"start_rate_per_s": 0.01}),
        ("start_rate_per_s", {"start_rate_per_s": 2000.0}),
        ("start_rate_per_s", {"min_rate_per_s": 0.0}),
        ("tolerance", {"tolerance": 0.001}),
        ("min_attainment", {"min_attainment": 1.1}),
    ],
)
def test_a_search_that_cannot_work_names_its_field(field: str, config: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        SearchConfig(**config)


# ---------------------------------------------------------------- the fit


def test_points_that_contradict_each_other_share_their_mean() -> None:
    curve = fitted([probe(3, 0.8, 300), probe(1, 1.0), probe(2, 0.4, 100), probe(4, 0.1)])
    assert [(one.rate_per_s, one.attainment) for one in curve] == [(1, 1.0), (2, 0.7), (3, 0.7), (4, 0.1)]


def test_one_lucky_point_does_not_win() -> None:
    lucky = [probe(1, 1.0), probe(2, 0.95), probe(3, 0.5), probe(4, 0.92)]
    served = served_rate(lucky)
    assert (served.served_per_s, served.missed_per_s) == (2, 3)
    assert next_rate(SearchConfig(), lucky) == 2.5


def test_repeats_of_a_rate_are_averaged_by_their_requests() -> None:
    assert fitted([probe(2, 1.0, 100), probe(2, 0.5, 300)]) == [probe(2, 0.625, 400)]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 10), st.integers(1, 5)), min_size=1, max_size=12))
def test_the_fit_is_the_isotonic_regression(drawn: list[tuple[int, int, int]]) -> None:
    """Against the max-min formula for weighted isotonic regression (Robertson, Wright and Dykstra, 1988)."""
    probes = [probe(float(rate), tenths / 10, num) for rate, tenths, num in drawn]
    weights: dict[float, int] = {}
    good: dict[float, float] = {}
    for one in probes:
        weights[one.rate_per_s] = weights.get(one.rate_per_s, 0) + one.num_requests
        good[one.rate_per_s] = good.get(one.rate_per_s, 0.0) + one.num_requests * one.attainment
    rates = sorted(weights)

    def mean(first: int, last: int) -> float:
        span = rates[first : last + 1]
        return sum(good[rate] for rate in span) / sum(weights[rate] for rate in span)

    expected = [
        max(min(mean(first, last) for first in range(at + 1)) for last in range(at, len(rates)))
        for at in range(len(rates))
    ]
    assert [one.attainment for one in fitted(probes)] == pytest.approx(expected)
    assert [one.rate_per_s for one in fitted(probes)] == rates
    assert [one.num_requests for one in fitted(probes)] == [weights[rate] for rate in rates]


def test_the_served_rate_lies_where_the_curve_crosses_the_target() -> None:
    served = served_rate([probe(2, 1.0), probe(4, 0.8), probe(6, 0.0)], min_attainment=0.9)
    assert (served.bound, served.rate_per_s, served.served_per_s, served.missed_per_s) == ("between", 3.0, 2, 4)
    assert str(served) == "3"


def test_exactly_the_target_is_served_in_spite_of_rounding() -> None:
    third = 1 / 3 + 1 / 3 + 1 / 3 - 1e-12
    served = served_rate([probe(2, third), probe(4, 0.0)], min_attainment=1.0)
    assert (served.served_per_s, served.rate_per_s) == (2, 2)


@pytest.mark.parametrize("bad", [probe(0, 1.0), probe(1, 1.1), probe(1, -0.1), probe(1, 1.0, 0)])
def test_a_probe_that_cannot_be_is_refused(bad: Probe) -> None:
    with pytest.raises(ValueError, match=r"^probe: "):
        fitted([probe(1, 1.0), bad])
    with pytest.raises(ValueError, match=r"^probes: no rate"):
        served_rate([])


# ---------------------------------------------------------------- the order


def test_shapes_are_measured_forwards_and_backwards() -> None:
    order = balanced_order(["a", "b"], [1.0, 2.0], 2)
    assert [(turn.shape, turn.rate_per_s, turn.repeat) for turn in order] == [
        ("a", 1.0, 0),
        ("a", 2.0, 0),
        ("b", 1.0, 0),
        ("b", 2.0, 0),
        ("b", 2.0, 1),
        ("b", 1.0, 1),
        ("a", 2.0, 1),
        ("a", 1.0, 1),
    ]


@given(num_shapes=st.integers(1, 4), num_rates=st.integers(1, 4), pairs=st.integers(1, 3))
def test_after_an_even_number_of_repeats_all_stand_at_the_same_mean_position(
    num_shapes: int, num_rates: int, pairs: int
) -> None:
    order = balanced_order([f"s{i}" for i in range(num_shapes)], [float(i + 1) for i in range(num_rates)], 2 * pairs)
    sums: dict[Run, int] = {}
    for position, turn in enumerate(order):
        key = replace(turn, repeat=0)
        sums[key] = sums.get(key, 0) + position
    assert len(sums) == num_shapes * num_rates
    assert len(set(sums.values())) == 1


@pytest.mark.parametrize(
    ("field", "shapes", "rates", "repeats"),
    [
        ("shapes", [], [1.0], 1),
        ("shapes", ["a", "a"], [1.0], 1),
        ("rates_per_s", ["a"], [], 1),
        ("repeats", ["a"], [1.0], 0),
    ],
)
def test_an_order_that_cannot_be_names_its_field(
    field: str, shapes: Sequence[str], rates: Sequence[float], repeats: int
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        balanced_order(shapes, rates, repeats)
