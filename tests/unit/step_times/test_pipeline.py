"""Steps that pass stages one after the other: times that can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from disagg.step_times.interface import BusyTimes, StagedTimes, StepWork, busy_s, chunks_s, decode_s, prefill_s
from disagg.step_times.pipeline import Pipeline


@dataclass
class Staged:
    """Each stage takes so many seconds for a prompt token, and for a decode."""

    token_s: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)

    @property
    def num_stages(self) -> int:
        return len(self.token_s)

    def stages_s(self, work: StepWork) -> tuple[float, ...]:
        return tuple(seconds * (work.prefill_tokens + work.num_decodes) for seconds in self.token_s)

    def step_s(self, work: StepWork) -> float:
        return sum(self.stages_s(work))


@dataclass
class Plain:
    def step_s(self, work: StepWork) -> float:
        return 4.0 * work.prefill_tokens


def test_equal_steps_fill_the_stages_and_then_end_one_stage_time_apart() -> None:
    pipeline = Pipeline(4)
    assert [pipeline.launch(0.0, (2.0,) * 4) for _ in range(5)] == [8.0, 10.0, 12.0, 14.0, 16.0]
    assert pipeline.ended == 16.0


def test_a_step_waits_for_the_slowest_stage() -> None:
    pipeline = Pipeline(3)
    assert [pipeline.launch(0.0, (1.0, 3.0, 1.0)) for _ in range(3)] == [5.0, 8.0, 11.0]
    assert pipeline.launch(20.0, (1.0, 3.0, 1.0)) == 25.0


def test_no_more_steps_are_under_way_than_there_are_stages() -> None:
    pipeline = Pipeline(2)
    pipeline.launch(0.0, (1.0, 5.0))
    assert pipeline.next_at == 1.0
    pipeline.launch(1.0, (1.0, 5.0))
    assert pipeline.next_at == 6.0  # the first one ends then


@pytest.mark.parametrize("stages_s", [(1.0, 1.0), (1.0, 3.0, 2.0), (3.0, 2.0, 1.0)])
def test_equal_steps_at_once_are_as_many_single_ones(stages_s: tuple[float, ...]) -> None:
    single, together = Pipeline(len(stages_s)), Pipeline(len(stages_s))
    for _ in range(7):
        single.launch(0.0, stages_s)
    together.launch_equal(stages_s, 7)
    assert together.ended == single.ended


def test_a_prompt_of_n_chunks_takes_n_plus_pp_minus_1_stage_times() -> None:
    assert isinstance(Staged(), StagedTimes)
    assert prefill_s(Staged(), tokens=16 * 10, token_budget=10) == (16 + 4 - 1) * 10.0
    assert prefill_s(Staged(), tokens=10, token_budget=10) == 40.0  # one chunk passes all stages
    assert prefill_s(Staged(), tokens=2000, token_budget=10) == (200 + 4 - 1) * 10.0  # chunks taken together


def test_prompts_follow_each_other_by_the_slowest_stage() -> None:
    staged = Staged((1.0, 2.0, 1.0))
    assert busy_s(staged, tokens=100, token_budget=10) == 200.0
    assert prefill_s(staged, tokens=100, token_budget=10) == 200.0 + 20.0
    assert chunks_s(staged, 100, 10) == 400.0  # one step after the other


def test_without_stages_a_prompt_delays_the_next_one_by_all_of_its_time() -> None:
    assert busy_s(Plain(), 100, 30) == prefill_s(Plain(), 100, 30) == chunks_s(Plain(), 100, 30) == 400.0


def test_decodes_pass_all_stages_alone() -> None:
    assert decode_s(Staged(), 3, 100.0) == 12.0
    assert BusyTimes(Staged()).step_s(StepWork(10, 55, 2, 100, 1)) == 48.0
    assert BusyTimes(Staged()).step_s(StepWork(10, 55, 0, 0, 1)) == 10.0
