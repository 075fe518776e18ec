"""What a plan counts of models with windows and experts."""

from __future__ import annotations

import dataclasses

import pytest

from disagg.engine.cache_groups import PoolLimits, most_held, window_pools
from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.kernels.routing import Routing, scratch_bytes
from disagg.simulator.durations.devices import H100
from disagg.simulator.durations.model_shapes import MODEL_SHAPES, ExpertsShape
from disagg.simulator.durations.roofline import RooflineStepTimes
from disagg.simulator.plan.intensity import attention_flops, decode_flops, decode_intensity, prefill_flops
from disagg.simulator.plan.memory import Precision, weight_bytes, worker_memory
from disagg.step_times.interface import StepWork

DENSE = MODEL_SHAPES["llama-3.1-8b"]
WINDOWS = dataclasses.replace(DENSE, windows=(512, 512, 512, 0) * 8)
"""Three of four layers have a window."""
ROUTING = Routing(num_experts=16, top_k=2)
EXPERTS = dataclasses.replace(
    DENSE, experts=ExpertsShape(config=ExpertsConfig(routing=ROUTING, intermediate_size=1024), num_layers=32)
)
LIMITS = PoolLimits(max_num_seqs=64, token_budget=2048)


def test_windows_leave_room_for_more_sequences() -> None:
    plain, memory = worker_memory(DENSE, H100, limits=LIMITS), worker_memory(WINDOWS, H100, limits=LIMITS)
    assert plain.groups == ()
    full, window = memory.groups
    layout = WINDOWS.kv_layout()
    assert (full.window, window.window) == (0, 512)
    assert (window.num_blocks,) == window_pools(layout, full.num_blocks, 16, LIMITS)
    assert memory.kv_tokens == full.num_blocks * 16
    # All of the memory is used, to a block.
    used = full.num_bytes + window.num_bytes
    assert used <= memory.kv_bytes < used + 3 * 16 * layout.bytes_per_token
    # A sequence of 8000 tokens takes 500 blocks of the first group, and never more than 34 of the window.
    assert most_held(512, 16) == 34
    assert memory.sequences(8000) == min(full.num_blocks // 500, (window.num_blocks - 128) // 34)
    assert memory.sequences(8000) > 1.5 * plain.sequences(8000)
    # Short ones are as many as the window's pool holds.
    assert memory.sequences(64) == min(full.num_blocks // 4, (window.num_blocks - 128) // 4)


def test_experts_take_weights_and_scratch_memory() -> None:
    plain, memory = worker_memory(DENSE, H100, limits=LIMITS), worker_memory(EXPERTS, H100, tp=2, limits=LIMITS)
    of_experts = 32 * 16 * 3 * 4096 * 1024
    assert memory.expert_bytes == 2 * of_experts / 2
    assert memory.scratch_bytes == scratch_bytes(ROUTING, 2048, 4096, 512, 2)
    assert memory.kv_bytes == 0.9 * 80e9 - weight_bytes(EXPERTS) / 2 - 2e9 - memory.scratch_bytes
    assert (plain.expert_bytes, plain.scratch_bytes) == (0, 0)
    assert EXPERTS.expert_share == 1 / 8


def test_experts_in_mxfp4_take_and_read_fewer_bytes() -> None:
    """17 bytes for 32 weights; what is multiplied has the dtype of activations."""
    mxfp4, of_experts = Precision(weight_dtype="mxfp4"), 32 * 16 * 3 * 4096 * 1024
    assert weight_bytes(EXPERTS) - weight_bytes(EXPERTS, mxfp4) == of_experts * (2 - 17 / 32)
    assert worker_memory(EXPERTS, H100, precision=mxfp4, limits=LIMITS).expert_bytes == of_experts * 17 / 32
    saved = of_experts / 8 * (2 - 17 / 32)
    matrices = 2 * (EXPERTS.active_parameters + EXPERTS.vocab_size * EXPERTS.hidden_size)
    intensity = decode_flops(EXPERTS, 1, 0.0) / (matrices - saved)
    assert decode_intensity(EXPERTS, 1, 0.0, mxfp4) == pytest.approx(intensity)
    work = StepWork(0, 0, 1, 1)
    plain, few = (RooflineStepTimes(EXPERTS, H100, weight_dtype=each).step_s(work) for each in ("bfloat16", "mxfp4"))
    assert plain - few == pytest.approx(saved / (H100.memory_bandwidth * H100.kernels.gemm_memory), rel=0.1)


def test_attention_ends_at_the_window() -> None:
    """A quarter of the layers sees all of 8192 tokens, the others 512."""
    seen = (8192 + 3 * 512) / 4
    assert decode_flops(WINDOWS, 4, 8192.0) - decode_flops(WINDOWS, 4, 0.0) == attention_flops(WINDOWS, 4 * seen)
    assert decode_flops(WINDOWS, 4, 100.0) == decode_flops(DENSE, 4, 100.0)
    # 1000 tokens behind 200: 312 of them still see all before them, 688 see 512.
    pairs = sum(min(200 + number, 512) for number in range(1, 1001))
    whole = sum(200 + number for number in range(1, 1001))
    difference = prefill_flops(DENSE, 1000, 200) - prefill_flops(WINDOWS, 1000, 200)
    assert difference == pytest.approx(attention_flops(DENSE, (whole - pairs) * 3 / 4))


def test_steps_read_what_windows_keep() -> None:
    dense, windows = RooflineStepTimes(DENSE, H100), RooflineStepTimes(WINDOWS, H100)
    short = StepWork(0, 0, 8, 8 * 400)
    assert windows.step_s(short) == pytest.approx(dense.step_s(short))
    long, seen = StepWork(0, 0, 8, 8 * 8192), StepWork(0, 0, 8, 8 * 512)
    expected = (dense.parts(long).decode_attention + 3 * dense.parts(seen).decode_attention) / 4
    assert windows.parts(long).decode_attention == pytest.approx(expected)
    prompt = StepWork(1024, 1024 * 4096, 0, 0, 1)
    within = prompt._replace(prefill_attended=1024 * 512)
    expected = (dense.parts(prompt).prefill_attention + 3 * dense.parts(within).prefill_attention) / 4
    assert windows.parts(prompt).prefill_attention == pytest.approx(expected)
