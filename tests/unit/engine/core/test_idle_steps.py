"""A worker without sequences measures a step now and then: when, and that nothing of it is left."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.commands import Add
from disagg.engine.core.idle_steps import FIRST_PAUSE_S, LONGEST_PAUSE_S, IdleSteps
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import StepPlan
from disagg.proto.messages import StepSample
from tests.support.engine import assert_sound, handle_all, make_core, make_spec, run_until_idle

CALIBRATED_MS = 10.0
CALIBRATION = (StepSample(50.0, 128, 8256), StepSample(CALIBRATED_MS, 16, 136))


def idle_steps(num_blocks: int = 4) -> IdleSteps:
    return IdleSteps(FakeModelRunner(num_blocks, 16, 1024), [BlockManager(num_blocks, 16)], CALIBRATION, fits=True)


def times(steps: IdleSteps, until_s: float, ms: float, now: float = 0.0) -> list[float]:
    """When steps of so many milliseconds are made until then."""
    made = []
    while (due := steps.due_at(now)) <= until_s:
        now = max(now, due)
        made.append(now)
        assert len(steps.begin().prefills) == 1
        now += ms / 1e3
        steps.end(ms, now)
    return made


def gaps(made: list[float]) -> list[int]:
    return [round(after - before) for before, after in pairwise(made)]


def test_three_after_work_and_then_fewer_and_fewer() -> None:
    made = times(idle_steps(), 200.0, CALIBRATED_MS)
    assert made[0] == FIRST_PAUSE_S
    assert gaps(made) == [0, 0, 2, 4, 8, 16, 32, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_a_slow_worker_is_measured_often_but_not_all_the_time() -> None:
    assert gaps(times(idle_steps(), 15.0, 20 * CALIBRATED_MS)) == [0, 0, 2, 2, 2, 2, 2]
    assert gaps(times(idle_steps(), 30.0, 200 * CALIBRATED_MS)) == [2, 2, 12, 12], "a fifth of the time"


def test_a_worker_that_is_quick_again_is_measured_three_times_at_once() -> None:
    steps = idle_steps()
    slow = times(steps, 9.0, 20 * CALIBRATED_MS)
    assert gaps(times(steps, 20.0, CALIBRATED_MS, slow[-1] + 0.2))[:2] == [0, 0]


def test_one_that_calibrated_slowly_is_quick_from_the_first_step_on() -> None:
    steps = idle_steps()
    times(steps, 3.0, CALIBRATED_MS / 50)
    assert gaps(times(steps, 12.0, CALIBRATED_MS / 50, 3.0)) == [4]


def test_work_begins_it_anew() -> None:
    steps = idle_steps()
    times(steps, 50.0, CALIBRATED_MS)
    steps.worked()
    assert steps.due_at(100.0) == 100.0 + FIRST_PAUSE_S


def test_without_a_block_or_with_an_error_none_follows_before_work() -> None:
    blocks = BlockManager(1, 16)
    steps = IdleSteps(FakeModelRunner(1, 16, 1024), [blocks], CALIBRATION, fits=True)
    blocks.allocate(1, reserved=False)
    assert steps.begin() == StepPlan()
    steps.end(None, 2.0)
    assert steps.due_at(1000.0) == math.inf
    steps.worked()
    assert steps.due_at(1000.0) == 1000.0 + FIRST_PAUSE_S


@pytest.mark.parametrize(("fits", "max_model_len"), [(False, 1024), (True, 16)])
def test_none_where_the_step_is_too_large(fits: bool, max_model_len: int) -> None:
    steps = IdleSteps(FakeModelRunner(4, 16, max_model_len), [BlockManager(4, 16)], CALIBRATION, fits=fits)
    assert steps.due_at(0.0) == math.inf


class TestInTheEngineCore:
    def test_only_without_sequences_and_nothing_is_left_of_it(self) -> None:
        core = make_core(num_blocks=10)
        assert core.idle_step_at(0.0) == FIRST_PAUSE_S
        handle_all(core, Add(make_spec("r0", range(20), max_tokens=2)))
        assert core.idle_step_at(5.0) == math.inf
        run_until_idle(core)
        assert core.idle_step_at(10.0) == 10.0 + FIRST_PAUSE_S
        before = core.load(), core.prefix_snapshot(), core.totals()
        plan = core.begin_idle_step()
        assert core.run_idle_step(plan)
        core.end_idle_step(plan.measured(10.0), 12.0)
        assert (core.load(), core.prefix_snapshot(), core.totals()) == before
        assert_sound(core)

    def test_an_answer_is_the_same_after_it(self) -> None:
        answers = []
        for measures in (False, True):
            core = make_core(num_blocks=10)
            handle_all(core, Add(make_spec("r0", range(40), max_tokens=4)))
            events = run_until_idle(core)
            if measures:
                for _ in range(3):
                    core.end_idle_step(core.begin_idle_step().measured(1.0), 0.0)
            handle_all(core, Add(make_spec("r1", range(40), max_tokens=4)))
            answers.append([*events, *run_until_idle(core)])
        assert answers[0] == answers[1]
