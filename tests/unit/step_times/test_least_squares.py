"""Fits against systems whose answer is known, and against the conditions that mark an optimum."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.step_times.least_squares import Moments, solve_five, solve_triangle, solve_two, total

Observation = tuple[Sequence[float], float]


def moments_of(observations: Sequence[Observation], window: float | None = None) -> Moments:
    moments = Moments(len(observations[0][0]), window)
    for factors, target in observations:
        moments.add([(i, factor) for i, factor in enumerate(factors) if factor], target)
    return moments


def test_a_consistent_system_is_solved() -> None:
    fit = moments_of([([1, 0, 0], 2.0), ([1, 1, 0], 5.0), ([1, 1, 2], 13.0), ([0, 1, 2], 11.0)])
    assert fit.solve() == pytest.approx([2.0, 3.0, 4.0])


def test_an_unknown_that_would_be_negative_is_zero_and_the_others_make_the_best_of_it() -> None:
    # The line through these is 3 - x; the best constant is 2.
    fit = moments_of([([1, 0], 3.0), ([1, 1], 2.0), ([1, 2], 1.0)])
    assert fit.solve() == pytest.approx([2.0, 0.0])


def test_all_unknowns_may_be_zero() -> None:
    assert moments_of([([1, 0], -3.0), ([0, 1], -2.0)]).solve() == [0.0, 0.0]


@given(
    st.lists(
        st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 10.0), st.floats(-10.0, 10.0)),
        min_size=1,
        max_size=6,
    )
)
def test_two_unknowns_written_out_are_the_general_solution(rows: list[tuple[float, float, float]]) -> None:
    fit = moments_of([([one, other], target) for one, other, target in [*rows, (1.0, 5.0, 1.0)]])
    solution = solve_two(fit.gram, fit.moment)
    if solution is not None:
        assert list(solution) == fit.solve()
    else:
        assert 0.0 in fit.solve()


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ([([1, 0], 3.0), ([1, 1], 2.0), ([1, 2], 1.0)], [2.0, 0.0]),
        ([([1, 1], 1.0), ([1, 2], 3.0), ([1, 3], 5.0)], [0.0, 22 / 14]),
        ([([1, 0], -3.0), ([1, 1], -2.0)], [0.0, 0.0]),
        # The steeper one at first is 0 in the end.
        ([([1, 0.9], 2.0), ([0.1, 0.2], 3.0)], [0.0, 2.4 / 0.85]),
        ([([0.9, 1], 2.0), ([0.2, 0.1], 3.0)], [2.4 / 0.85, 0.0]),
    ],
)
def test_two_unknowns_written_out_may_be_zero(observations: list[Observation], expected: list[float]) -> None:
    fit = moments_of(observations)
    solution = solve_two(fit.gram, fit.moment)
    assert solution is not None
    assert list(solution) == fit.solve() == pytest.approx(expected)


def test_weights_count_as_repetitions() -> None:
    weighted, repeated = Moments(1), Moments(1)
    weighted.add([(0, 1.0)], 4.0, 3.0)
    weighted.add([(0, 1.0)], 8.0)
    for target in (4.0, 4.0, 4.0, 8.0):
        repeated.add([(0, 1.0)], target)
    assert weighted.solve() == pytest.approx([5.0])
    assert repeated.solve() == pytest.approx([5.0])
    assert weighted.weight == repeated.weight == 4.0


def test_a_window_forgets_geometrically() -> None:
    moments = moments_of([([1.0], 0.0)] * 3 + [([1.0], 1.0)] * 2, window=2.0)
    # Weights 1, 2, 4, 8, 16 in units of the oldest.
    assert moments.solve() == pytest.approx([24 / 31])
    assert moments.weight * moments.scale == pytest.approx(31 / 16)


def test_sums_stay_finite_however_long_they_run() -> None:
    moments = moments_of([([1], float(i % 2)) for i in range(20_001)], window=2.0)
    assert moments.weight < 1e13
    assert moments.weight * moments.scale == pytest.approx(2.0)
    assert moments.solve() == pytest.approx([1 / 3])  # the last target is 0, and each counts half of the next


def test_parts_are_added_with_the_weights_that_they_have_now() -> None:
    faded = moments_of([([1], 0.0)] * 50 + [([1], 6.0)], window=2.0)  # weights 1 (old ones together) and 1
    kept = moments_of([([1], 9.0)])
    assert total(1, [faded, kept]).solve() == pytest.approx([5.0])
    assert total(1, [kept, faded]).weight == pytest.approx(3.0)
    half = total(1, [faded])
    half.include(kept, 0.5, target_factor=2.0)
    assert half.solve() == pytest.approx([(6.0 + 9.0) / 2.5])


def test_expected_targets_replace_the_observed_ones() -> None:
    moments = moments_of([([1, 2], 7.0), ([1, 5], 1.0), ([2, 1], 3.0)])
    moments.expect([4.0, 0.5])
    assert moments.solve() == pytest.approx([4.0, 0.5])


def test_along_gives_the_factor_that_fits_best() -> None:
    squared, product = moments_of([([1, 2], 10.0), ([3, 1], 14.0)]).along([1.0, 1.0])
    # Predictions 3 and 4 against 10 and 14.
    assert squared == pytest.approx(25.0)
    assert product == pytest.approx(86.0)


@pytest.mark.parametrize("size", [2, 5])
def test_what_cannot_be_solved_is_refused(size: int) -> None:
    moments = Moments(size)
    with pytest.raises(ValueError, match="not positive definite"):
        moments.solve()


FACTORS = st.one_of(st.just(0.0), st.floats(0.0, 1e6))
OBSERVED = st.tuples(st.tuples(*[FACTORS] * 5), st.floats(1e-3, 1e3), st.floats(0.01, 1.0))


@given(st.lists(OBSERVED, min_size=1, max_size=20))
def test_five_unknowns_give_the_same_sums_to_the_last_bit(
    observed: list[tuple[tuple[float, float, float, float, float], float, float]],
) -> None:
    one, other = Moments(5, 1.001), Moments(5, 1.001)  # a window so small that the sums are scaled down
    for factors, target, weight in observed:
        one.add([(i, factor) for i, factor in enumerate(factors) if factor], target, weight)
        other.add_five(factors, target, weight)
    assert one == other


@given(st.lists(st.tuples(FACTORS, FACTORS, st.floats(1e-3, 1e3), st.floats(0.01, 1.0)), min_size=1, max_size=20))
def test_two_unknowns_give_the_same_sums_to_the_last_bit(observed: list[tuple[float, float, float, float]]) -> None:
    one, other = Moments(2, 1.001), Moments(2, 1.001)
    for first, second, target, weight in observed:
        one.add([(0, first), (1, second)], target, weight)
        other.add_two(first, second, target, weight)
    assert one == other


def test_unknowns_that_were_only_seen_together_share() -> None:
    moments = moments_of([([1e6, 1e-3], 5e6)] * 9)
    for i in range(2):
        moments.add([(i, 1.0)], 1.0, 1e-4)
    assert moments.solve() == pytest.approx([5.0, 1.0], rel=0.01)


@st.composite
def systems(draw: st.DrawFn, min_size: int = 1) -> tuple[list[list[float]], list[float]]:
    """A positive definite matrix and a right side."""
    size = draw(st.integers(min_size, 5))
    small = st.floats(-3.0, 3.0)
    rows = [[draw(small) for _ in range(size)] for _ in range(size)]
    gram = [[sum(row[i] * row[j] for row in rows) + (0.1 if i == j else 0.0) for j in range(size)] for i in range(size)]
    return gram, [draw(small) for _ in range(size)]


@given(systems(min_size=5))
def test_five_unknowns_are_solved_to_the_last_bit(system: tuple[list[list[float]], list[float]]) -> None:
    gram, right = system
    moments = Moments(5)
    moments.gram = tuple(gram[i][j] for i in range(5) for j in range(i, 5))
    moments.moment = tuple(right)
    lines = [[gram[i][i] * (1.0 + 1e-11), *gram[i][i + 1 :], right[i]] for i in range(5)]
    assert solve_five(moments.gram, right) == solve_triangle(lines)


def best_of_all_active_sets(gram: list[list[float]], moment: list[float]) -> tuple[list[float], float]:
    """The solution of least squares without negative unknowns and its objective, by trying each set of unknowns that
    are not zero; without rounding."""
    size, best = len(moment), ([0.0] * len(moment), Fraction(0))
    for free in (each for count in range(1, size + 1) for each in combinations(range(size), count)):
        lines = [[*(Fraction(gram[i][j]) for j in free), Fraction(moment[i])] for i in free]
        values = solved(lines)
        if min(values) < 0:
            continue
        gains = (Fraction(moment[i]) * value for i, value in zip(free, values, strict=True))
        objective = -sum(gains, Fraction(0)) / 2
        if objective < best[1]:
            found = dict(zip(free, values, strict=True))
            best = [float(found.get(i, Fraction(0))) for i in range(size)], objective
    return best[0], float(best[1])


def solved(lines: list[list[Fraction]]) -> list[Fraction]:
    """The solution of a positive definite system, whose lines end with the right side, by exact elimination."""
    size = len(lines)
    for i in range(size):
        lines[i] = [value / lines[i][i] for value in lines[i]]
        for other in range(size):
            if other != i:
                lines[other] = [a - lines[other][i] * b for a, b in zip(lines[other], lines[i], strict=True)]
    return [line[-1] for line in lines]


@given(systems())
def test_the_solution_is_the_best_of_all_active_sets(system: tuple[list[list[float]], list[float]]) -> None:
    gram, moment = system
    moments = Moments(len(moment))
    moments.gram = tuple(gram[i][j] for i in range(len(gram)) for j in range(i, len(gram)))
    moments.moment = tuple(moment)
    expected, least = best_of_all_active_sets(gram, moment)
    solution = moments.solve()
    assert solution == pytest.approx(expected, rel=1e-6, abs=1e-6)
    squared, product = moments.along(solution)
    assert squared / 2 - product == pytest.approx(least, rel=1e-6, abs=1e-9)
    if len(moment) == 2 and (two := solve_two(moments.gram, moments.moment)) is not None:
        assert list(two) == solution


@given(systems())
def test_the_solution_meets_the_conditions_of_an_optimum(system: tuple[list[list[float]], list[float]]) -> None:
    gram, moment = system
    moments = Moments(len(moment))
    moments.gram = tuple(gram[i][j] for i in range(len(gram)) for j in range(i, len(gram)))
    moments.moment = tuple(moment)
    solution = moments.solve()
    for i, value in enumerate(solution):
        slope = moment[i] - sum(gram[i][j] * solution[j] for j in range(len(moment)))
        assert value >= 0.0
        assert slope <= 1e-6, "moving into this unknown would help"
        if value > 0.0:
            assert slope >= -1e-6, "moving out of this unknown would help"
