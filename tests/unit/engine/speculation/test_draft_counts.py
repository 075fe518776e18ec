from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.speculation.draft_counts import choose, may_gain, monotone


class Table:
    """Step times as given, without regard to the context."""

    def __init__(self, *ms: float) -> None:
        self._ms = (0.0, *ms)

    def ms(self, rows: int, context: int) -> float:
        return self._ms[rows]


def exhaustive_rate(
    times: Table, num_rows: int, chances: list[list[float]], most_rows: int, numbers: tuple[int, ...]
) -> float:
    """Expected tokens for each millisecond with so many drafts; 0 where they are too many."""
    rows = num_rows + sum(numbers)
    if rows > most_rows:
        return 0.0
    accepted = sum(sum(each[:number]) for each, number in zip(chances, numbers, strict=True))
    return (num_rows + accepted) / times.ms(rows, 0)


falling = st.lists(st.floats(0.01, 1.0), max_size=3).map(
    lambda each: list(itertools.accumulate(each, lambda a, b: a * b))
)


@given(
    chances=st.lists(falling, min_size=1, max_size=3),
    steps=st.lists(st.floats(0.0, 2.0), min_size=12, max_size=12),
    num_others=st.integers(0, 2),
    num_places=st.integers(-1, 7),
)
def test_no_other_choice_of_drafts_gives_more_tokens_in_its_time(
    chances: list[list[float]], steps: list[float], num_others: int, num_places: int
) -> None:
    times = Table(*(5.0 + ms for ms in itertools.accumulate(steps)))
    num_rows = len(chances) + num_others
    most_rows = num_rows + num_places
    every = itertools.product(*(range(len(each) + 1) for each in chances))
    best = max(exhaustive_rate(times, num_rows, chances, max(most_rows, num_rows), numbers) for numbers in every)
    plain = num_rows / times.ms(num_rows, 0)
    chosen = choose(times, num_rows, 0, chances, most_rows)
    rate = exhaustive_rate(times, num_rows, chances, max(most_rows, num_rows), tuple(chosen))
    if any(chosen):
        assert rate == pytest.approx(best)
        assert rate > 1.03 * plain
    else:
        assert best <= 1.03 * plain * (1 + 1e-9)


def test_drafts_of_several_sequences_are_taken_by_their_chances() -> None:
    flat = Table(*[10.0] * 10)
    chances = [[0.9, 0.5, 0.4], [0.6, 0.3], []]
    assert choose(flat, 3, 0, chances, 4) == [1, 0, 0]
    assert choose(flat, 3, 0, chances, 6) == [2, 1, 0]
    assert choose(flat, 3, 0, chances, 8) == [3, 2, 0]
    assert choose(flat, 3, 0, chances, 3) == [0, 0, 0]


class PerToken:
    """Each row takes 1 ms and each token that it attends to 0.001 ms, behind 10 ms."""

    def ms(self, rows: int, context: int) -> float:
        return 10.0 + rows + 0.001 * context


def test_a_draft_that_attends_to_more_is_taken_where_it_is_worth_more() -> None:
    equal = [[0.5], [0.5]]
    assert choose(PerToken(), 2, 2100, equal, 3, lengths=[2000, 100]) == [0, 1]
    assert choose(PerToken(), 2, 2100, equal, 3, lengths=[100, 2000]) == [1, 0]
    assert choose(PerToken(), 2, 2100, equal, 4, lengths=[2000, 100]) == [1, 1]
    assert choose(PerToken(), 2, 8100, equal, 4, lengths=[8000, 100]) == [0, 1]
    assert choose(PerToken(), 2, 8100, [[0.9], [0.1]], 3, lengths=[2000, 100]) == [1, 0]


def test_a_draft_attends_to_as_much_as_a_mean_row_by_default() -> None:
    assert choose(PerToken(), 1, 1000, [[0.3]], 2) == [1]
    assert choose(PerToken(), 1, 10_000, [[0.3]], 2) == [0]
    assert may_gain(PerToken(), 1, 10_000, 1)
    assert not may_gain(PerToken(), 20, 20 * 10_000, 20)


def test_equal_chances_of_a_sequence_keep_their_order() -> None:
    assert choose(Table(*[10.0] * 6), 2, 0, [[1.0, 1.0], [1.0, 1.0]], 4) == [1, 1]
    assert choose(Table(*[10.0] * 6), 2, 0, [[1.0, 1.0], [1.0, 1.0]], 5) == [2, 1]


@pytest.mark.parametrize(("chance", "expected"), [(0.03, [0]), (0.031, [1])])
def test_drafts_must_gain_three_percent(chance: float, expected: list[int]) -> None:
    assert choose(Table(10.0, 10.0), 1, 0, [[chance]], 2) == expected


def test_a_step_of_no_rows_has_no_drafts() -> None:
    assert choose(Table(10.0), 0, 0, [[]], 5) == [0]
    assert not may_gain(Table(10.0), 0, 0, 5)


@pytest.mark.parametrize(
    ("ms", "most_drafts", "expected"),
    [
        ((10.0, 20.0, 30.0, 40.0), 3, False),
        ((10.0, 19.0, 30.0, 40.0), 3, True),
        ((10.0, 20.0, 30.0, 38.0), 3, True),
        ((10.0, 20.0, 30.0, 38.0), 2, False),
        ((10.0, 10.0, 10.0, 10.0), 0, False),
        ((10.0, 10.0, 10.0, 10.0), -1, False),
    ],
)
def test_where_rows_cost_as_much_as_they_give_no_draft_is_looked_for(
    ms: tuple[float, ...], most_drafts: int, expected: bool
) -> None:
    assert may_gain(Table(*ms), 1, 0, most_drafts) is expected


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(1.0, 5.0)), max_size=8))
def test_monotone_means_are_those_of_the_min_max_formula(values: list[tuple[float, float]]) -> None:
    def mean(first: int, last: int) -> float:
        piece = values[first : last + 1]
        return sum(value * weight for value, weight in piece) / sum(weight for _, weight in piece)

    size = len(values)
    expected = [max(min(mean(a, b) for b in range(i, size)) for a in range(i + 1)) for i in range(size)]
    assert monotone(values) == pytest.approx(expected)
