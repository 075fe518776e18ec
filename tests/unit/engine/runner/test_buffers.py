"""The sizes that a runner states of its buffers, and what a token chooses of its experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.engine.config import WorkerConfig
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.kernels.routing import scratch_bytes
from disagg.proto.messages import BufferSize
from tests.support.tiny_models import make_checkpoint


def runner_of(kind: str, folder: Path) -> TorchModelRunner:
    path = make_checkpoint(kind, folder)
    config = WorkerConfig(
        worker_id="w",
        roles=("prefill", "decode"),
        model_path=str(path),
        dtype="float32",
        num_blocks=40,
        token_budget=48,
        max_num_seqs=4,
    )
    return TorchModelRunner(config)


def test_each_cache_group_and_the_experts_are_stated(tmp_path: Path) -> None:
    runner = runner_of("gpt_oss", tmp_path)
    (full, window), (window_blocks,) = runner.layout.groups, runner.window_blocks
    (routing,) = {layer.ffn.routing for layer in runner.model_config.layers}  # type: ignore[union-attr]
    (inner,) = {layer.ffn.intermediate_size for layer in runner.model_config.layers}
    assert runner.buffers == (
        BufferSize("kv", 40 * 16 * full.bytes_per_token),
        BufferSize("kv_window_16", window_blocks * 16 * window.bytes_per_token),
        BufferSize("experts", scratch_bytes(routing, 48, runner.model_config.hidden_size, inner, 4)),
    )
    assert runner.expert_share == routing.top_k / routing.num_experts == pytest.approx(0.5)


def test_a_dense_model_has_one_cache(tmp_path: Path) -> None:
    runner = runner_of("llama", tmp_path)
    assert runner.buffers == (BufferSize("kv", 40 * 16 * runner.layout.bytes_per_token),)
    assert runner.expert_share == 0.0
