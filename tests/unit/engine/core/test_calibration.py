"""Which steps are measured at start-up, and what is said of them. The runner and the clock are stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import calibrate, dummy_step
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer, StepPlan, StepResult
from disagg.proto.messages import ONE_RANK, ParallelShape, RoleName, StepSample


class TimedRunner(FakeModelRunner):
    """A step of n tokens takes n * `slowness` ms; when a plan runs again, half of that."""

    def __init__(self, num_blocks: int, max_model_len: int = 4096, slowness: float = 1.0) -> None:
        super().__init__(num_blocks, 16, max_model_len)
        self.slowness = slowness
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self.cleared: set[int] = set()

    def scatter(
        self,
        block_table: Sequence[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        assert not data.any()
        assert (start, end) == (0, len(block_table) * 16)
        self.cleared.update(block_table)
        super().scatter(block_table, start, end, data, peer, group)

    def run(self, plan: StepPlan) -> StepResult:
        assert all(len(entry.sequence.block_table) * 16 >= entry.start + entry.num_tokens for entry in plan.entries)
        blocks = [block for entry in plan.entries for block in entry.sequence.block_table]
        assert len(set(blocks)) == len(blocks), "two sequences share a block"
        assert self.cleared.issuperset(blocks), "a block is read that was never written"
        self.now_s += self.slowness * plan.num_tokens / (2000 if plan in self.plans else 1000)
        self.plans.append(plan)
        return super().run(plan)


def samples(runner: TimedRunner, roles: tuple[RoleName, ...], **changes: Any) -> list[tuple[float, int, int, int, int]]:
    config = WorkerConfig(worker_id="w", roles=roles, model_path="real", **changes)
    found = calibrate(runner, config, lambda: runner.now_s)
    return [(round(s.ms, 6), s.prefill_tokens, s.prefill_attended, s.num_decodes, s.decode_context) for s in found]


PREFILL = [(8.0, 16, 136, 0, 0), (64.0, 128, 8256, 0, 0), (64.0, 128, 57408, 0, 0)]
DECODE = [(0.5, 0, 0, 1, 64), (0.5, 0, 0, 1, 512), (4.0, 0, 0, 8, 512), (4.0, 0, 0, 8, 4096), (16.0, 0, 0, 32, 2048)]


def test_each_role_measures_what_it_does() -> None:
    whole_budget = (512.0, 512, 131328, 0, 0)
    assert samples(TimedRunner(1024), ("prefill",)) == [*PREFILL, whole_budget]
    assert samples(TimedRunner(1024), ("decode",)) == [*PREFILL, *DECODE]
    assert samples(TimedRunner(1024), ("prefill", "decode")) == [*PREFILL, *DECODE, whole_budget]


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "changes", "expected"),
    [
        (1024, 4096, {"token_budget": 20}, [PREFILL[0], *DECODE[:4]]),
        (1024, 4096, {"max_num_seqs": 1}, [*PREFILL, *DECODE[:2], (512.0, 512, 131328, 0, 0)]),
        (8, 4096, {}, [*PREFILL[:2], DECODE[0]]),
        (1024, 65, {}, [PREFILL[0], DECODE[0], DECODE[2], DECODE[4]]),
        (1, 16, {}, []),
    ],
    ids=["budget", "one place", "small cache", "short model", "tiny"],
)
def test_only_what_fits_is_measured(
    num_blocks: int, max_model_len: int, changes: dict[str, Any], expected: list[object]
) -> None:
    assert samples(TimedRunner(num_blocks, max_model_len), ("prefill", "decode"), **changes) == expected


def test_steps_are_measured_by_the_work_clock_and_end_by_the_other_one() -> None:
    """Another process takes nine tenths of the core."""
    runner = TimedRunner(1024)
    config = WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path="real")
    found = calibrate(runner, config, lambda: 10.0 * runner.now_s, work_clock=lambda: runner.now_s)
    quiet = calibrate(TimedRunner(1024), config, lambda: 0.0, work_clock=lambda: 0.0)
    assert [sample.ms for sample in found] == [8.0, 128.0]
    assert len(quiet) == 9


def test_a_slow_worker_measures_for_a_limited_time() -> None:
    slow = samples(TimedRunner(1024, slowness=10.0), ("prefill", "decode"))
    assert slow == [(80.0, 16, 136, 0, 0), (1280.0, 128, 8256, 0, 0)]
    very_slow = samples(TimedRunner(1024, slowness=200.0), ("prefill", "decode"))
    assert very_slow == [(3200.0, 16, 136, 0, 0)]


def test_a_plan_says_what_it_computed() -> None:
    runner = TimedRunner(1024)
    config = WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path="real")
    calibrate(runner, config, lambda: 0.0)
    prefill, decode = runner.plans[0], runner.plans[-2]
    mixed = StepPlan(decode.decodes, prefill.prefills)
    expected = StepSample(ms=3.5, prefill_tokens=16, prefill_attended=136, num_decodes=32, decode_context=2048)
    assert mixed.measured(3.5) == expected
    assert StepPlan().measured(1.0) == StepSample(ms=1.0)


# ---------------------------------------------------------------- what is known from an earlier start


def config_of(*roles: RoleName) -> WorkerConfig:
    return WorkerConfig(worker_id="w", roles=roles, model_path="real")


def again(known: Sequence[StepSample], slowness: float = 1.0, roles: tuple[RoleName, ...] = ("decode",)) -> Any:
    """The samples of a later start, and the steps that it took: tokens of each."""
    runner = TimedRunner(num_blocks=1024, slowness=slowness)
    found = calibrate(runner, config_of(*roles), lambda: runner.now_s, known)
    return found, [plan.num_tokens for plan in runner.plans]


def test_known_step_times_are_taken_where_two_short_steps_take_as_long_as_then() -> None:
    known, measured = again(())
    assert len(known) == 8
    assert len(measured) > 20
    assert again(known) == (known, [16] * 4 + [8] * 4)
    assert again(known, slowness=1.19)[0] == known


@pytest.mark.parametrize("slowness", [1.25, 0.8])
def test_they_are_measured_again_where_these_take_longer_or_shorter(slowness: float) -> None:
    known, _ = again(())
    found, _ = again(known, slowness)
    assert [sample.ms for sample in found] == pytest.approx([sample.ms * slowness for sample in known])


def test_those_of_a_worker_that_measures_other_steps_are_not_taken() -> None:
    known, _ = again(())
    for other in (known[:-1], known[::-1], ()):
        assert again(other)[0] == known
    assert len(again(known, roles=("prefill",))[1]) > 8


def test_rows_of_a_step_have_different_tokens() -> None:
    """Equal ones would all choose the same experts."""
    runner = FakeModelRunner(200, 16, 4096)
    plan = dummy_step(runner, prefill_tokens=30, start=20, num_decodes=10, context=40)
    rows = [entry.sequence.token_ids[entry.start : entry.start + entry.num_tokens] for entry in plan.entries]
    token_ids = [token_id for row in rows for token_id in row]
    assert len(set(token_ids)) == len(token_ids) == 40
    assert max(token_ids) < runner.vocab_size
