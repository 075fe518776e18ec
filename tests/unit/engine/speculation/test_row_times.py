from __future__ import annotations

import pytest

from disagg.engine.speculation.draft_counts import RowTimes
from disagg.proto.messages import StepSample


def true_ms(rows: int, context: int) -> float:
    """A machine for which 9 rows cost as much as one, and more cost 0.5 ms each."""
    return 10.0 + 0.5 * max(0, rows - 9) + 0.001 * context


def linear_ms(rows: int, context: int) -> float:
    return 10.0 + 0.5 * rows + 0.001 * context


LINEAR = [
    StepSample(linear_ms(rows, rows * tokens), 0, 0, rows, rows * tokens)
    for rows, tokens in ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64))
]


@pytest.mark.parametrize(
    ("rows", "context"), [(1, 64), (1, 4000), (5, 500), (8, 4096), (20, 1000), (32, 64), (50, 9000)]
)
def test_a_linear_machine_is_known_from_its_calibration(rows: int, context: int) -> None:
    assert RowTimes(LINEAR).ms(rows, context) == pytest.approx(linear_ms(rows, context), rel=0.01)


def test_a_worker_without_calibration_has_the_usual_coefficients() -> None:
    times = RowTimes([])
    assert times.ms(1, 0) == pytest.approx(5.5, rel=0.01)
    assert times.ms(9, 0) == pytest.approx(9.5, rel=0.01)
    assert times.ms(0, 0) == pytest.approx(5.0, rel=0.01)


def test_steps_that_were_seen_correct_the_calibration() -> None:
    times = RowTimes(LINEAR)
    for _ in range(300):
        for rows in (1, 5, 9, 16):
            times.observe(rows, 1000, true_ms(rows, 1000))
    for rows in (1, 2, 5, 7, 9, 16):
        assert times.ms(rows, 1000) == pytest.approx(true_ms(rows, 1000), rel=0.01)
        assert times.ms(rows, 4000) == pytest.approx(true_ms(rows, 4000), rel=0.04)


def test_row_counts_that_were_not_seen_follow_the_pace_of_the_machine() -> None:
    times = RowTimes(LINEAR)
    for _ in range(200):
        times.observe(1, 500, 1.5 * linear_ms(1, 500))
    assert times.ms(1, 500) == pytest.approx(1.5 * linear_ms(1, 500), rel=0.01)
    assert times.ms(8, 2000) == pytest.approx(1.5 * linear_ms(8, 2000), rel=0.1)


def test_rows_behind_those_that_were_seen_cost_as_much_as_the_last_of_these() -> None:
    """Where rows were cheap up to some count and are not any more, the mean would make more of them too cheap."""
    times = RowTimes([StepSample(true_ms(rows, 0), 0, 0, rows, 0) for rows in (1, 8, 32)])
    assert times.ms(32, 0) == pytest.approx(21.5, rel=0.01)
    assert times.ms(56, 0) == pytest.approx(21.5 + 24 * (21.5 - 10.0) / 24, rel=0.01)


def test_one_step_that_was_disturbed_moves_little() -> None:
    times = RowTimes(LINEAR)
    for _ in range(50):
        times.observe(4, 1000, linear_ms(4, 1000))
    before = [times.ms(rows, 1000) for rows in (1, 4, 5)]
    times.observe(4, 1000, 50.0 * linear_ms(4, 1000))
    for _ in range(16):
        times.observe(4, 1000, linear_ms(4, 1000))
    assert [times.ms(rows, 1000) for rows in (1, 4, 5)] == pytest.approx(before, rel=0.03)


def test_more_rows_never_take_less_time() -> None:
    times = RowTimes(LINEAR)
    for number in range(300):
        rows = number * 7 % 20 + 1
        times.observe(rows, 1000, 10.0 + (rows * 13 % 5))
    every = [times.ms(rows, 1000) for rows in range(64)]
    assert every == sorted(every)


def test_impossible_steps_are_ignored() -> None:
    times = RowTimes(LINEAR)
    before = [times.ms(rows, 0) for rows in range(40)]
    times.observe(0, 0, 5.0)
    times.observe(4, 10, 0.0)
    times.observe(4, 10, -1.0)
    assert [times.ms(rows, 0) for rows in range(40)] == before
