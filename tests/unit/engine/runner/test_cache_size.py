"""`kv_cache_bytes: auto`: the share, the step that is measured, and the runner around it, with the device played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from disagg.engine.config import DEVICE_DEFAULTS, WorkerConfig
from disagg.engine.plan import StepPlan
from disagg.engine.request import dummy_sequence
from disagg.engine.runner import cache_size, model_runner
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.errors import ConfigError
from disagg.proto.messages import RoleName
from tests.support.tiny_models import make_checkpoint

BLOCK_BYTES = 3 * 2 * 2 * 16 * 16 * 2
"""Of 16 tokens of the tiny model in bf16: layers, K and V, KV heads, tokens, head dim."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


def config_of(folder: Path, role: RoleName = "decode", **changes: Any) -> WorkerConfig:
    config = WorkerConfig(worker_id="w", roles=(role,), model_path=str(folder), token_budget=100, max_num_seqs=7)
    return msgspec.structs.replace(config, **changes)


def test_a_cache_takes_nine_tenths_of_what_is_left() -> None:
    assert cache_size.cache_bytes(60 << 30, 1 << 30) == int(0.9 * (61 << 30))
    assert cache_size.cache_bytes(0, 0) == 0


@pytest.mark.parametrize(
    ("budget", "most", "longest", "rows", "tokens"), [(4096, 256, 8192, 256, 16), (100, 7, 50, 7, 14), (9, 2, 3, 2, 2)]
)
def test_the_step_has_all_rows_and_the_budget(budget: int, most: int, longest: int, rows: int, tokens: int) -> None:
    config = config_of(Path("/m"), token_budget=budget, max_num_seqs=most)
    plan = cache_size.full_step(config, longest)
    assert [(entry.start, entry.num_tokens, entry.samples) for entry in plan.prefills] == [(0, tokens, True)] * rows
    assert {entry.sequence.spec.sampling.temperature for entry in plan.prefills} == {1.0}


def test_on_a_cpu_it_is_a_gibibyte(folder: Path) -> None:
    runner = TorchModelRunner(config_of(folder))
    assert runner.num_blocks == (1 << 30) // BLOCK_BYTES


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device with room for 99.5 blocks beside the cache that is there, whose default is to be measured."""
    calls: list[str] = []

    def free_bytes(device: torch.device) -> int:
        calls.append("free")
        return 199 * BLOCK_BYTES // 2

    step, compute = TorchModelRunner.step, TorchModelRunner.compute

    def stepped(runner: TorchModelRunner, plan: StepPlan, arrays: Any) -> Any:
        calls.append(f"step of {len(arrays.token_ids_T)} in {runner._cache.num_blocks} blocks")
        return step(runner, plan, arrays)

    def computed(runner: TorchModelRunner, arrays: Any) -> None:
        calls.append(f"rank {runner.shard.number}: {len(arrays.token_ids_T)} in {runner._cache.num_blocks} blocks")
        compute(runner, arrays)

    defaults = DEVICE_DEFAULTS["cuda"]
    monkeypatch.setattr(model_runner, "device_defaults", lambda _: defaults)
    monkeypatch.setattr(cache_size, "free_bytes", free_bytes)
    monkeypatch.setattr(cache_size, "give_back", lambda _: calls.append("give back"))
    monkeypatch.setattr(TorchModelRunner, "step", stepped)
    monkeypatch.setattr(TorchModelRunner, "compute", computed)
    monkeypatch.setattr(TorchModelRunner, "capture_steps", lambda _: calls.append("capture"))
    return calls


def test_it_is_measured_behind_captures_and_a_full_step(folder: Path, played: list[str]) -> None:
    runner = TorchModelRunner(config_of(folder))
    assert played == ["capture", "step of 98 in 1 blocks", "free", "give back"]
    assert (runner.num_blocks, runner.max_model_len) == (int(0.9 * 100.5), 90 * 16)
    assert runner._cache.num_blocks == 90
    sequence = dummy_sequence(80 * 16, 5, 16)
    assert len(runner.run(cache_size.full_step(runner._config, 20)).token_ids) == 7
    assert max(sequence.block_table) < 90


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_measures_without_the_others(folder: Path, played: list[str], rank: int) -> None:
    runner = TorchModelRunner(config_of(folder, tp=2), Shard(rank, 2))
    steps = ["step of 98 in 1 blocks", "rank 1: 98 in 1 blocks"]
    assert played == ["capture", steps[rank], "free", "give back"]
    # Half of the heads: blocks of half the size; the small cache is one of them.
    assert runner.num_blocks == int(0.9 * 200)


@pytest.mark.parametrize(("stage", "layers"), [(0, 2), (1, 1)])
def test_each_stage_measures_without_the_others(folder: Path, played: list[str], stage: int, layers: int) -> None:
    """The first stage has two of the three layers."""
    runner = TorchModelRunner(config_of(folder, pp=2), Shard(0, 1, stage, 2))
    steps = ["step of 98 in 1 blocks", "rank 1: 98 in 1 blocks"]
    assert played == ["capture", steps[stage], "free", "give back"]
    assert runner.num_blocks == int(0.9 * (99.5 * 3 / layers + 1))


def test_a_number_of_blocks_is_not_measured(folder: Path, played: list[str]) -> None:
    assert TorchModelRunner(config_of(folder, num_blocks=11)).num_blocks == 11
    assert TorchModelRunner(config_of(folder, kv_cache_bytes=5 * BLOCK_BYTES)).num_blocks == 5
    assert played == []


def test_a_step_that_does_not_fit_names_the_budget(
    folder: Path, played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("2 GiB are free")

    monkeypatch.setattr(TorchModelRunner, "step", fails)
    with pytest.raises(ConfigError, match=r"^token_budget: a step of 100 tokens does not fit: 2 GiB are free$"):
        TorchModelRunner(config_of(folder), WHOLE)


def test_where_nothing_is_left_no_block_fits(folder: Path, played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "free_bytes", lambda _: 0)
    with pytest.raises(ConfigError, match=f"kv_cache_bytes is {int(0.9 * BLOCK_BYTES)}; one block of this model takes"):
        TorchModelRunner(config_of(folder))
