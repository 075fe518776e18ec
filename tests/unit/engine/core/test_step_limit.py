"""Prompts on slow processors: no step takes long, however many tokens the budget has.

The processor of these tests takes 1 s for a step, 0.07 for each prompt token and 0.1 for each decode.
"""

from __future__ import annotations

import pytest

from disagg.engine.commands import Add
from disagg.engine.config import Scheduling, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.proto.messages import StepSample
from tests.support.engine import BLOCK, VOCAB_SIZE, make_prompt, make_spec, shape_of


def samples(pace: float = 1.0) -> tuple[StepSample, ...]:
    prompts = [StepSample(pace * (1000.0 + 70.0 * n), n, n * (n + 1) // 2) for n in (16, 64, 256)]
    decodes = [StepSample(pace * (1000.0 + 100.0 * n), 0, 0, n, 64 * n) for n in (1, 8, 32)]
    return (*prompts, *decodes)


def new_core(pace: float = 1.0, scheduling: Scheduling = "decode_first") -> EngineCore:
    config = WorkerConfig(
        worker_id="worker",
        roles=("prefill", "decode"),
        model_path="fake",
        token_budget=512,
        max_num_seqs=32,
        scheduling=scheduling,
    )
    return EngineCore(FakeModelRunner(200, BLOCK, 4096, VOCAB_SIZE), config=config, calibration=samples(pace))


def add(core: EngineCore, name: str, num_tokens: int) -> None:
    core.handle(Add(make_spec(name, make_prompt(num_tokens, seed=sum(name.encode())), max_tokens=8)), 0.0)


def chunks(core: EngineCore, num_steps: int) -> list[dict[str, int]]:
    """The prompt tokens of the next steps."""
    found = []
    for _ in range(num_steps):
        core.plan_step(0.0)
        found.append({name: num_tokens for name, _, num_tokens in shape_of(core.planned)[1]})
        core.run_step()
    return found


@pytest.mark.parametrize("scheduling", ["decode_first", "slack", "prefill_first", "static"])
def test_a_prompt_is_cut_so_that_no_step_takes_longer_than_five_seconds(scheduling: Scheduling) -> None:
    core = new_core(scheduling=scheduling)
    add(core, "a", 500)
    # 1 s and 48 tokens: 4.4 s; 64 would be 5.5.
    assert chunks(core, 11) == [{"a": 48}] * 10 + [{"a": 20}]


def test_decodes_take_their_part_of_it_and_a_block_goes_on_beside_any_number_of_them() -> None:
    core = new_core()
    for i in range(24):
        add(core, f"b{i}", 1)
    assert sum(len(step) for step in chunks(core, 1)) == 24
    add(core, "a", 500)
    # 1 s, 24 decodes of 0.1, and 16 tokens: 4.5 s.
    assert chunks(core, 1) == [{"a": 16}]
    core = new_core(pace=4.0)
    add(core, "a", 40)
    assert chunks(core, 3) == [{"a": 16}, {"a": 16}, {"a": 8}]


def test_another_prompt_joins_where_a_block_of_it_fits() -> None:
    core = new_core()
    add(core, "a", 40)
    add(core, "b", 500)
    add(core, "c", 10)
    # 40 and 16 tokens take 4.9 s.
    assert chunks(core, 1) == [{"a": 40, "b": 16}]


def test_a_fast_processor_has_its_whole_budget() -> None:
    core = new_core(pace=0.01)
    add(core, "a", 700)
    assert chunks(core, 2) == [{"a": 512}, {"a": 188}]
    assert core.expected_s == 0.0


def test_a_processor_that_becomes_slow_is_noticed_and_one_that_becomes_fast_again_too() -> None:
    core = new_core(pace=0.01)

    def serve(name: str, pace: float) -> list[int]:
        """The chunks of a prompt, on a processor of that pace."""
        add(core, name, 1024)
        found: list[int] = []
        while sum(found) < 1024:
            (chunk,) = chunks(core, 1)
            num_tokens = chunk.get(name, 0)
            found.append(num_tokens)
            step = core.last_plan.measured(0.0)
            ms = pace * (1000.0 + 70.0 * step.prefill_tokens + 100.0 * step.num_decodes)
            core.observe(core.last_plan.measured(ms))
        return found

    assert serve("fast", 0.01) == [512, 512]
    for i in range(8):
        slow = serve(f"slow{i}", 1.0)
    assert max(slow) <= 64
    for i in range(32):
        fast = serve(f"again{i}", 0.01)
    assert fast[0] >= 496


def test_how_long_a_step_should_take_is_known_while_it_is_computed() -> None:
    core = new_core()
    add(core, "a", 500)
    core.plan_step(0.0)
    assert core.expected_s == pytest.approx(1.0 + 48 * 0.07, rel=0.05)
