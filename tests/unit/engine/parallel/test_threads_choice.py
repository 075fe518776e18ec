"""With how many threads a worker computes where it may choose. The runner and the clock are stand-ins."""

from __future__ import annotations

import pytest

from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.parallel.factories import choose_threads
from disagg.engine.plan import StepPlan, StepResult
from disagg.kernels import dispatch


class ThreadedRunner(FakeModelRunner):
    """A step takes one second, and `together_s` with several threads."""

    def __init__(self, together_s: float) -> None:
        super().__init__(64, 16, 256)
        self.together_s = together_s
        self.num_threads, self.now_s, self.num_steps = 1, 0.0, 0

    def run(self, plan: StepPlan) -> StepResult:
        self.now_s += 1.0 if self.num_threads == 1 else self.together_s
        self.num_steps += 1
        return super().run(plan)


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[ThreadedRunner]:
    made: list[ThreadedRunner] = []
    monkeypatch.setattr(dispatch, "set_num_threads", lambda count: setattr(made[0], "num_threads", count))
    return made


def config(**changes: object) -> WorkerConfig:
    values = {"worker_id": "w", "roles": ("decode",), "model_path": "real", "num_threads": 4, "threads_are_open": True}
    return WorkerConfig(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("together_s", "expected"), [(0.3, 4), (0.89, 4), (0.95, 1), (1.0, 1), (13.0, 1)])
def test_several_threads_only_where_they_are_faster(
    runners: list[ThreadedRunner], together_s: float, expected: int
) -> None:
    runners.append(runner := ThreadedRunner(together_s))
    assert choose_threads(runner, config(), lambda: runner.now_s) == expected
    assert runner.num_threads == expected


def test_a_number_in_the_configuration_is_taken_as_it_is(runners: list[ThreadedRunner]) -> None:
    runners.append(runner := ThreadedRunner(13.0))
    assert choose_threads(runner, config(threads_are_open=False), lambda: runner.now_s) == 4
    assert choose_threads(runner, config(tp=2), lambda: runner.now_s) == 4
    assert runner.num_steps == 0
