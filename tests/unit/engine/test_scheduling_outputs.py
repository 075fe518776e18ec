"""A scheduling mode decides when a token is computed, never which one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from disagg.engine.commands import Add, Event
from disagg.engine.config import Scheduling, WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import ModelRunner
from tests.support.engine import (
    BLOCK,
    VOCAB_SIZE,
    assert_idle,
    assert_sound,
    expected_output,
    handle_all,
    make_prompt,
    make_spec,
    run_until_idle,
    token_ids_of,
)
from tests.support.stepping import make_runner
from tests.support.tiny_models import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.support.tiny_models import make_checkpoint, reference_generate

MODES: tuple[Scheduling, ...] = ("decode_first", "prefill_first", "static")
REQUESTS = ((5, 20), (40, 30), (1, 40), (33, 30), (70, 6), (17, 8), (48, 20), (2, 2))
"""(prompt tokens, output tokens), one arriving each step or two."""


SIZES = pytest.mark.parametrize(
    ("num_blocks", "swap_bytes"), [(40, 1 << 24), (8, 0), (8, 1 << 24)], ids=["room", "recomputed", "swapped"]
)


def make_core_in(mode: Scheduling, runner: ModelRunner, swap_bytes: int) -> EngineCore:
    config = WorkerConfig(
        worker_id="w",
        roles=("prefill", "decode"),
        model_path="fake",
        max_num_seqs=4,
        token_budget=32,
        decode_reserve_tokens=4,
        watermark=0.0,
        scheduling=mode,
        swap_bytes=swap_bytes,
    )
    return EngineCore(runner, config=config)


def serve(core: EngineCore, vocab_size: int) -> dict[str, list[int]]:
    """The answers to `REQUESTS`, which arrive while earlier ones run."""
    events: list[Event] = []
    for index, (num_tokens, max_tokens) in enumerate(REQUESTS):
        prompt = [token_id % vocab_size for token_id in make_prompt(num_tokens, seed=index % 3)]
        events += handle_all(core, Add(make_spec(f"r{index}", prompt, max_tokens=max_tokens)))
        for _ in range(1 + index % 2):
            events += core.step(0.0)
            assert_sound(core)
    events += run_until_idle(core)
    assert_idle(core)
    return {f"r{index}": token_ids_of(events, f"r{index}") for index in range(len(REQUESTS))}


@pytest.mark.parametrize("mode", MODES)
@SIZES
def test_the_deterministic_model_answers_the_same(mode: Scheduling, num_blocks: int, swap_bytes: int) -> None:
    core = make_core_in(mode, FakeModelRunner(num_blocks, BLOCK, 4096, VOCAB_SIZE), swap_bytes)
    expected = {
        f"r{index}": expected_output(make_prompt(num_tokens, seed=index % 3), max_tokens)
        for index, (num_tokens, max_tokens) in enumerate(REQUESTS)
    }
    assert serve(core, VOCAB_SIZE) == expected
    assert_preempted(core, num_blocks, swap_bytes)


def assert_preempted(core: EngineCore, num_blocks: int, swap_bytes: int) -> None:
    totals = core.totals()
    assert (totals.preemptions > 0) == (num_blocks == 8)
    assert (totals.swapped_in_blocks > 0) == (num_blocks == 8 and swap_bytes > 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("mode", MODES)
@SIZES
def test_a_real_model_answers_as_the_reference_also_after_its_calibration(
    mode: Scheduling, num_blocks: int, swap_bytes: int, folder: Path
) -> None:
    runner = make_runner(folder, num_blocks=num_blocks)
    config = WorkerConfig(worker_id="w", roles=("prefill", "decode"), model_path=str(folder))
    samples = calibrate(runner, config, time.perf_counter)
    assert samples
    assert min(sample.ms for sample in samples) > 0.0
    expected = {
        f"r{index}": reference_generate(
            folder, [token_id % TINY_VOCAB_SIZE for token_id in make_prompt(num_tokens, seed=index % 3)], max_tokens
        )[0]
        for index, (num_tokens, max_tokens) in enumerate(REQUESTS)
    }
    core = make_core_in(mode, runner, swap_bytes)
    assert serve(core, TINY_VOCAB_SIZE) == expected
    assert_preempted(core, num_blocks, swap_bytes)
