"""A configured TPOT target that no worker can meet is said to the operator."""

from __future__ import annotations

import pytest

from disagg.proto.ids import WorkerId
from disagg.proto.messages import StepCoefficients
from disagg.step_times.pace import note_of_target

SLOW, FAST = StepCoefficients(55.0, 1.0, 0.0, 5.0, 0.0), StepCoefficients(25.0, 1.0, 0.0, 4.0, 0.0)


@pytest.mark.parametrize("tpot_ms", [None, 29.0, 60.0])
def test_nothing_is_said_of_a_target_that_a_worker_can_meet(tpot_ms: float | None) -> None:
    assert note_of_target(tpot_ms, {WorkerId("d0"): SLOW, WorkerId("d1"): FAST}) == ""
    assert note_of_target(1.0, {}) == ""


def test_the_fastest_worker_is_named() -> None:
    assert note_of_target(28.5, {WorkerId("d0"): SLOW, WorkerId("d1"): FAST}) == (
        "slo.tpot_ms is 28.5, and a decode step of one sequence takes 29 ms on d1: no answer can meet it, so it counts "
        "for nothing"
    )
