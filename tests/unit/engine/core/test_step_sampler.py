"""Which steps are reported: few, spread evenly, and without regard to how long they took."""

from __future__ import annotations

import pytest

from disagg.engine.core.reports import MAX_STEPS_PER_REPORT, StepSampler
from disagg.proto.messages import StepSample


def reports(sampler: StepSampler, num_reports: int, steps_per_report: int) -> list[list[int]]:
    """The numbers of the steps that each report carries; step n takes n ms."""
    number, found = 0, []
    for _ in range(num_reports):
        for _ in range(steps_per_report):
            number += 1
            sampler.offer(StepSample(float(number), num_decodes=1))
        found.append([int(step.ms) for step in sampler.take()])
    return found


@pytest.mark.parametrize("steps_per_report", [0, 1, 2, 4])
def test_while_they_fit_all_steps_are_reported_in_order(steps_per_report: int) -> None:
    found = reports(StepSampler(), 50, steps_per_report)
    assert [number for report in found for number in report] == list(range(1, 50 * steps_per_report + 1))
    assert {len(report) for report in found} == {steps_per_report}


@pytest.mark.parametrize("steps_per_report", [8, 16, 100, 1000])
def test_of_many_steps_a_few_are_reported_from_all_over_the_time(steps_per_report: int) -> None:
    found = reports(StepSampler(), 400, steps_per_report)[20:]
    assert all(1 <= len(report) <= MAX_STEPS_PER_REPORT for report in found[1:])
    places = [(number - 1) % steps_per_report / steps_per_report for report in found for number in report]
    assert len(places) >= 1.5 * len(found)
    for quarter in range(4):
        share = sum(quarter / 4 <= place < (quarter + 1) / 4 for place in places) / len(places)
        assert share == pytest.approx(0.25, abs=0.09)


@pytest.mark.parametrize("period", [2, 3, 8, 10, 16])
def test_no_rhythm_of_the_steps_hides_any_of_them(period: int) -> None:
    found = reports(StepSampler(), 2000, 64)
    numbers = [number for report in found for number in report]
    for phase in range(period):
        share = sum(number % period == phase for number in numbers) / len(numbers)
        assert share == pytest.approx(1 / period, rel=0.2)


def test_after_a_rush_all_steps_are_reported_again() -> None:
    sampler = StepSampler()
    reports(sampler, 40, 1000)
    assert reports(sampler, 40, 3)[-1] == [118, 119, 120]


def test_without_a_reader_no_more_is_held_than_one_report() -> None:
    sampler = StepSampler()
    (found,) = reports(sampler, 1, 100_000)
    assert found == [1, 2, 3, 4]
    assert sampler.take() == ()
