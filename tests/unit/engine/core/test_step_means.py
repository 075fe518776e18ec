"""Tokens and rows of a step for each sequence that decodes."""

from __future__ import annotations

import pytest

from disagg.engine.core.step_means import StepMeans


def test_before_the_first_step_each_sequence_has_one_token_and_one_row() -> None:
    it = StepMeans()
    assert (it.tokens_per_step, it.rows_per_step) == (1.0, 1.0)


def test_the_means_are_over_sequences_not_over_steps() -> None:
    it = StepMeans()
    it.observe(1, 5, 5)
    assert (it.tokens_per_step, it.rows_per_step) == (5.0, 5.0)
    it.observe(3, 3, 3)
    assert it.tokens_per_step == it.rows_per_step == pytest.approx((5 * 63 / 64 + 3) / (63 / 64 + 3))


def test_steps_that_were_taken_in_together_count_as_one_by_one() -> None:
    one, other = StepMeans(), StepMeans()
    for it in (one, other):
        it.observe(2, 8, 5)
    for _ in range(10):
        one.observe(3, 4, 3)
    other.observe(3, 4, 3, num_steps=10)
    assert other.tokens_per_step == pytest.approx(one.tokens_per_step, rel=1e-12)
    assert other.rows_per_step == pytest.approx(one.rows_per_step, rel=1e-12)


def test_old_steps_are_forgotten() -> None:
    it = StepMeans()
    it.observe(1, 9, 9, num_steps=1000)
    it.observe(1, 1, 1, num_steps=640)
    assert it.tokens_per_step == pytest.approx(1.0, abs=0.001)


def test_sequences_without_drafts_have_exactly_one_of_each() -> None:
    it = StepMeans()
    for number in range(1, 50):
        it.observe(number, number, number, num_steps=number % 7 + 1)
        assert (it.tokens_per_step, it.rows_per_step) == (1.0, 1.0)


def test_a_step_whose_sequences_ended_does_not_make_a_step_give_less_than_a_token() -> None:
    it = StepMeans()
    it.observe(4, 4, 1)
    assert it.tokens_per_step == 1.0
