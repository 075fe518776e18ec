"""Calculators on exercises that can be worked with a pencil, and on the numbers of papers."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest

from disagg.autoscaler.transfer import (
    bandwidth_to_hide,
    exposed_s,
    hidden_from,
    transfer_s,
)
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import A100, CPU_CORE, H100, L40S
from disagg.simulator.durations.model_shapes import MODEL_SHAPES
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.plan.intensity import (
    attention_flops,
    critical_batch,
    critical_prompt,
    decode_flops,
    decode_intensity,
    matrix_parameters,
    prefill_flops,
    prefill_intensity,
)
from disagg.simulator.plan.memory import Precision, check_fits, weight_bytes, widths, worker_memory
from disagg.simulator.plan.sweep import (
    batch_sweep,
    joules_per_million,
    price_per_million,
)
from disagg.step_times.interface import LinkTimes, StepWork, decode_s, prefill_s

LLAMA_8B, LLAMA_70B = MODEL_SHAPES["llama-3-8b"], MODEL_SHAPES["llama-3-70b"]
FP8 = Precision(weight_dtype="fp8", kv_dtype="fp8")


class Steps:
    """1 ms, and 1 us for each row and each attended thousand."""

    def step_s(self, work: StepWork) -> float:
        attended = work.prefill_attended + work.decode_context
        return 1e-3 + 1e-6 * (work.prefill_tokens + work.num_decodes) + 1e-9 * attended


# ---------------------------------------------------------------- memory


def test_memory_of_llama_3_8b_on_an_h100() -> None:
    memory = worker_memory(LLAMA_8B, H100)
    assert memory.weight_bytes == 2 * 8_030_261_248  # 16.1 GB
    assert memory.kv_bytes_per_token == 131_072
    assert memory.kv_bytes == 0.9 * 80e9 - 16_060_522_496 - 2e9  # 53.9 GB
    assert memory.kv_tokens == 411_525
    assert memory.sequences(2048) == 200
    assert memory.sequences(500_000) == 0


def test_ranks_divide_weights_and_kv() -> None:
    memory = worker_memory(LLAMA_70B, H100, tp=4)
    assert memory.weight_bytes == 2 * 70_553_706_496 / 4
    assert memory.kv_bytes_per_token == 327_680 / 4
    assert memory.kv_tokens == 423_866
    sixteen = worker_memory(LLAMA_70B, H100, tp=16)  # each of the 8 KV heads on two ranks
    assert sixteen.kv_bytes_per_token == 327_680 / 8


def test_weights_of_eight_bits_leave_embedding_and_norms_as_they_are() -> None:
    embedding, norms = 128256 * 4096, 65 * 4096
    assert matrix_parameters(LLAMA_8B) == 8_030_261_248 - embedding - norms
    assert weight_bytes(LLAMA_8B, FP8) == matrix_parameters(LLAMA_8B) + 2 * (embedding + norms)
    smol = MODEL_SHAPES["smollm2-135m"]  # its head is the embedding, of which there are two then
    assert weight_bytes(smol) == 2 * 134_515_008
    assert weight_bytes(smol, FP8) == matrix_parameters(smol) + 2 * (
        134_515_008 - matrix_parameters(smol) + 49152 * 576
    )


def test_widths_are_powers_of_two_that_divide_the_model() -> None:
    assert widths(LLAMA_8B, H100) == [1, 2, 4, 8]
    assert widths(MODEL_SHAPES["qwen3-14b"], H100) == [1, 2, 4, 8]
    assert widths(MODEL_SHAPES["smollm2-135m"], H100) == [1]  # 9 heads
    assert widths(LLAMA_8B, CPU_CORE) == [1]


def test_only_widths_with_room_for_a_sequence_are_left() -> None:
    widest = [Parallelism(tp) for tp in (1, 2, 4, 8)]
    assert check_fits(LLAMA_70B, H100, widest, 8192) == widest[2:]
    assert check_fits(LLAMA_70B, H100, widest, 8192, FP8) == widest[1:]


def test_a_model_that_does_not_fit_is_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError) as refused:
        check_fits(LLAMA_70B, L40S, [Parallelism(1), Parallelism(2)], 8192)
    assert str(refused.value) == (
        "--device: llama-3-70b takes 141.1 GB of weights and 2.7 GB of KV for one sequence of 8192 tokens; "
        "2 x l40s have 86.4 GB for both. Try a larger device, --weight-dtype fp8, a wider --tp or more stages, --pp"
    )
    with pytest.raises(ConfigError, match=r"^--tp: llama-3-70b cannot be divided"):
        check_fits(LLAMA_70B, L40S, [], 8192)


# ---------------------------------------------------------------- intensity


def test_a_decode_step_of_b_sequences_does_b_flop_for_each_byte_of_weights() -> None:
    for batch in (1, 8, 64):
        assert decode_intensity(LLAMA_8B, batch, context=0) == batch
        assert decode_intensity(LLAMA_8B, batch, context=0, precision=FP8) == 2 * batch
        assert decode_intensity(LLAMA_8B, batch, context=100) == pytest.approx(batch, rel=0.07)


def test_attention_of_a_long_context_does_as_many_flop_for_a_byte_as_queries_share_a_head() -> None:
    million = decode_intensity(LLAMA_8B, 1000, context=1_000_000)
    assert attention_flops(LLAMA_8B, 1.0) / LLAMA_8B.kv_bytes_per_token() == 4.0  # 32 query heads on 8
    assert million == pytest.approx(4.0, rel=0.03)


def test_the_batch_from_which_on_decode_is_bound_by_arithmetic() -> None:
    assert critical_batch(LLAMA_8B, H100, context=0) == 296  # the ridge is 295.3
    assert critical_batch(LLAMA_8B, A100, context=0) == 154
    assert critical_batch(LLAMA_8B, H100, context=128) == 438
    assert critical_batch(LLAMA_8B, H100, context=1000) is None  # at most 118 FLOP for a byte


def test_the_prompt_from_which_on_prefill_is_bound_by_arithmetic() -> None:
    tokens = critical_prompt(LLAMA_8B, H100)
    assert prefill_intensity(LLAMA_8B, tokens - 1) < 989.4 / 3.35 <= prefill_intensity(LLAMA_8B, tokens)
    assert tokens == 317  # a little above 295: the LM head serves one token only


def test_flops_of_a_prompt_are_about_two_a_weight_and_token() -> None:
    layers = LLAMA_8B.active_parameters
    expected = 2 * layers * 1000 + 4 * 32 * 4096 * 500_500 + 2 * 128256 * 4096
    assert prefill_flops(LLAMA_8B, 1000) == expected
    assert (
        prefill_flops(LLAMA_8B, 100, before=900)
        == 2 * layers * 100 + 4 * 32 * 4096 * (100 * 900 + 5050) + 2 * 128256 * 4096
    )
    assert decode_flops(LLAMA_8B, 2, 10) == 4 * matrix_parameters(LLAMA_8B) + 4 * 32 * 4096 * 20


# ---------------------------------------------------------------- transfer


def test_a_transfer_takes_latency_and_bytes() -> None:
    link = LinkTimes(bandwidth_bytes_per_s=50e9, latency_s=1e-3)
    assert transfer_s(131_072 * 2048, link) == pytest.approx(1e-3 + 0.00536870912)
    assert bandwidth_to_hide(131_072 * 2048, 0.05) == pytest.approx(5.36870912e9)


def test_what_a_stream_sees_of_a_chunked_transfer() -> None:
    quick = LinkTimes(bandwidth_bytes_per_s=100.0, latency_s=0.5)
    assert exposed_s(100.0, 10.0, 1, quick) == 1.5  # not before the prompt has ended
    assert exposed_s(100.0, 10.0, 10, quick) == 0.6  # the last chunk
    slow = LinkTimes(bandwidth_bytes_per_s=5.0, latency_s=0.0)
    assert exposed_s(100.0, 10.0, 10, slow) == 11.0  # 20 s that begin 1 s after the prompt


def test_from_which_length_on_a_transfer_hides() -> None:
    link = LinkTimes(bandwidth_bytes_per_s=1e6, latency_s=0.0)

    def quadratic(tokens: int) -> float:
        return 1e-6 * tokens * tokens

    assert hidden_from(lambda tokens: 100.5 * tokens, quadratic, link, 4096) == 101  # 1.005e-4 n <= 1e-6 n^2
    assert hidden_from(lambda tokens: 100.0 * tokens, quadratic, link, 99) is None
    assert hidden_from(lambda tokens: 100.0 * tokens, lambda tokens: 1.0 + tokens, link, 4096) == 1


def test_distserve_kv_of_a_prompt_of_opt_66b() -> None:
    """DistServe (OSDI 2024, section 3.3): the KV of a request of 512 tokens to OPT-66B is about 1.13 GB, so that 10
    of them a second need 11.3 GB/s, or 90 Gbit/s. OPT-66B: 64 layers, hidden size 9,216, all heads with their own KV,
    fp16; the paper's GB are 2^30 bytes."""
    kv_bytes = 2 * 64 * 9216 * 2 * 512
    assert kv_bytes / 2**30 == 1.125
    assert 10 * 8 * kv_bytes / 2**30 == 90.0
    link = LinkTimes(bandwidth_bytes_per_s=90 * 2**30 / 8, latency_s=0.0)
    assert transfer_s(10 * kv_bytes, link) == 1.0


def test_splitwise_kv_over_infiniband_beside_the_prompt() -> None:
    """Splitwise (ISCA 2024): machines of eight A100 or H100, joined by InfiniBand of 200 and 400 Gbit/s a GPU; the
    median prompt of its coding trace has 1,500 tokens. Llama2-70B in 16 bits on all eight GPUs, each of which sends
    its own heads; the least time of the prompt is 2 FLOP a weight and token at the peak rate. The whole transfer is
    below a tenth of that."""
    shape = MODEL_SHAPES["llama-2-70b"]
    kv_bytes = 1500 * shape.kv_bytes_per_token()
    assert kv_bytes == 491_520_000
    for device, gigabit, transfer_ms, prompt_ms in ((A100, 200, 2.458, 83.46), (H100, 400, 1.229, 26.32)):
        link = LinkTimes(bandwidth_bytes_per_s=8 * gigabit * 1e9 / 8, latency_s=0.0)
        least_s = prefill_flops(shape, 1500) / (8 * device.peak("bfloat16"))
        assert transfer_s(kv_bytes, link) * 1e3 == pytest.approx(transfer_ms, abs=1e-3)
        assert least_s * 1e3 == pytest.approx(prompt_ms, abs=0.01)
        assert transfer_s(kv_bytes, link) < 0.1 * least_s
    bloom_bytes = 1500 * 2 * 70 * 14336 * 2  # BLOOM-176B: 70 layers, hidden size 14,336, KV for every head
    assert bloom_bytes / kv_bytes == 12.25


def test_mooncake_bandwidth_from_which_on_a_cached_prefix_pays() -> None:
    """Mooncake (FAST 2025, section 3): for Llama-3-70B and a prefix of 8,192 tokens, fetching is quicker than
    computing from 6 GB/s on eight A800 (312 TFLOP/s each) and from 19 GB/s on eight H800 (989). Its formula has l (4
    p^2 d + 22 p d^2) FLOP; ours counts causal attention and Llama's MLP, which differs by some percent."""
    p, d, layers = 8192, 8192, 80
    kv_bytes = p * LLAMA_70B.kv_bytes_per_token()
    flops = layers * (4 * p * p * d + 22 * p * d * d)
    found = [kv_bytes * 8 * peak / flops / 1e9 for peak in (312e12, 989e12)]
    assert found == [pytest.approx(5.859, abs=1e-3), pytest.approx(18.573, abs=1e-3)]
    assert [math.ceil(each) for each in found] == [6, 19]
    ours = kv_bytes * 8 * 312e12 / prefill_flops(LLAMA_70B, p) / 1e9
    assert ours == pytest.approx(5.859, rel=0.07)


# ---------------------------------------------------------------- sweep


def test_a_prompt_is_computed_in_chunks() -> None:
    steps = Steps()
    assert prefill_s(steps, 100, 512) == pytest.approx(1e-3 + 100e-6 + 5050e-9)
    assert prefill_s(steps, 100, 40) == pytest.approx(3e-3 + 100e-6 + 5050e-9)
    assert prefill_s(steps, 100, 512, before=50) == pytest.approx(1e-3 + 100e-6 + (5050 + 5000) * 1e-9)
    assert decode_s(steps, 10, 100.0) == pytest.approx(1e-3 + 10e-6 + 1e-6)


def test_a_sweep_ends_with_the_first_batch_that_does_not_fit() -> None:
    rows = batch_sweep(
        Steps(),
        prompt_tokens=100,
        output_tokens=10,
        token_budget=512,
        most_sequences=4,
        price_per_hour=3.6,
        power_w=700.0,
        batches=(1, 2, 4, 8, 16),
    )
    assert [(row.batch, row.fits) for row in rows] == [(1, True), (2, True), (4, True), (8, False)]
    prompt_s, tpot_s = 1e-3 + 100e-6 + 5050e-9, 1e-3 + 4e-6 + 420e-9
    served = 4 / (10 * tpot_s + 4 * prompt_s)
    expected = {
        "batch": 4,
        "tpot_s": tpot_s,
        "tokens_per_s": 4 / tpot_s,
        "served_per_s": served,
        "output_tokens_per_s": 10 * served,
        "fits": True,
        "price_per_million": 1e3 / (10 * served),
        "joules_per_million": 7e8 / (10 * served),
    }
    assert asdict(rows[2]) == pytest.approx(expected)


def test_price_and_energy_of_a_million_tokens() -> None:
    assert price_per_million(3.6, 1000.0) == pytest.approx(1.0)  # 1,000 s at 3.60 an hour
    assert joules_per_million(700.0, 1000.0) == 700_000.0
