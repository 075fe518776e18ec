"""Paired differences and their error."""

from __future__ import annotations

import math

import pytest

from disagg.simulator.twin.comparison import HYSTERESIS, SWITCHING, Comparison, paired


def test_no_difference_has_the_error_of_one_request() -> None:
    assert paired([0.0] * 50) == (0.0, 0.02)


def test_the_error_is_that_of_ten_block_means() -> None:
    # Block means 0, 1, 0, 1, ... with a standard deviation of sqrt(10 * 0.25 / 9).
    differences = [float(block % 2) for block in range(10) for _ in range(5)]
    mean, error = paired(differences)
    assert mean == 0.5
    assert error == pytest.approx(math.sqrt(2.5 / 9 / 10))
    # The same requests in another order: each block has as many of both, but for the odd one.
    mixed = [float(index % 2) for index in range(50)]
    assert paired(mixed)[1] == pytest.approx(math.sqrt(10 * 0.1**2 / 9 / 10))


def test_blocks_need_not_be_equal() -> None:
    assert paired([1.0] * 43) == (1.0, 1 / 43)


def test_too_few_requests_show_nothing() -> None:
    assert paired([1.0] * 9) == (1.0, math.inf)
    assert paired([]) == (0.0, math.inf)


def test_the_claim_is_the_sum_of_error_hysteresis_and_switching() -> None:
    comparison = Comparison(
        at_s=0.0,
        cause="first",
        num_requests=100,
        present="spread",
        chosen="spread",
        attained=(),
        difference=0.0,
        error=0.015,
        reason="",
    )
    assert comparison.needed == pytest.approx(0.015 + HYSTERESIS) == pytest.approx(0.025)
    assert comparison.claim == pytest.approx(0.015 + HYSTERESIS + SWITCHING) == pytest.approx(0.03)
