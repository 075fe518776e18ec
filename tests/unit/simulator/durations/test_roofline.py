"""Shapes, devices, and the roofline: sizes and times that can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.kernels.routing import Routing
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import (
    A100,
    B200,
    CPU_CORE,
    DEVICES,
    H100,
    H200,
    L40S,
    Device,
    Kernels,
    find_device,
)
from disagg.simulator.durations.model_shapes import MODEL_SHAPES, ExpertsShape, ModelShape, known_shape
from disagg.simulator.durations.perf_tables import (
    AllReduceTime,
    AttentionTime,
    GemmCorrections,
    GemmTime,
    PerfTables,
    all_reduce_curve,
    attention_surface,
)
from disagg.simulator.durations.roofline import RooflineStepTimes, check_parallelism
from disagg.step_times.interface import StepWork

LLAMA = MODEL_SHAPES["llama-3-8b"]
IDEAL = Kernels(
    gemm_start_s=0.0,
    gemm_compute=1.0,
    gemm_memory=1.0,
    gemm_overlap=1e6,  # the longer one
    attention_start_s=0.0,
    prefill_attention_compute=1.0,
    prefill_attention_pairs=0.0,
    decode_attention_memory=1.0,
    decode_attention_head_s=0.0,
    other_memory=math.inf,
    other_start_s=0.0,
    all_reduce_start_s=0.0,
    all_reduce_rank_s=0.0,
    all_reduce_bandwidth=1.0,
    step_s=0.0,
)
"""Kernels that reach every peak and start at once."""


def ideal(device: Device = H100) -> Device:
    return replace(device, kernels=IDEAL)


def prefill(tokens: int, before: int = 0) -> StepWork:
    return StepWork(tokens, tokens * before + tokens * (tokens + 1) // 2, 0, 0, 1)


def decode(batch: int, context: int) -> StepWork:
    return StepWork(0, 0, batch, batch * context)


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("smollm2-135m", 134_515_008, 23_040),
        ("llama-2-70b", 68_976_648_192, 327_680),
        ("llama-3-8b", 8_030_261_248, 131_072),
        ("llama-3-70b", 70_553_706_496, 327_680),
        ("mistral-7b", 7_248_023_552, 131_072),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("qwen3-14b", 14_768_307_200, 163_840),
        ("qwen3-32b", 32_762_123_264, 262_144),
    ],
)
def test_parameters_and_kv_of_known_models(name: str, parameters: int, kv_bytes: int) -> None:
    shape = MODEL_SHAPES[name]
    assert shape.num_parameters == parameters
    assert shape.kv_bytes_per_token() == kv_bytes
    assert shape.kv_bytes_per_token("fp8") == kv_bytes // 2


def test_names_of_models_and_devices_are_taken_in_any_case() -> None:
    assert known_shape("Llama-3-8B") is LLAMA
    assert known_shape("other/model") is None
    assert [find_device(name) for name in ("H100", "h100_sxm", "A100-80GB", "cpu", "NVIDIA-L40S")] == [
        H100,
        H100,
        A100,
        CPU_CORE,
        L40S,
    ]


def test_an_unknown_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"^--device: 'h900' is not known; there is h100, h200, b200, a100, l40s, cpu-core$"
    ):
        find_device("h900")


@pytest.mark.parametrize(("device", "ridge"), [(H100, 295.3), (H200, 206.1), (B200, 281.2), (A100, 153.0)])
def test_ridge_points(device: Device, ridge: float) -> None:
    assert device.ridge("bfloat16") == pytest.approx(ridge, abs=0.06)


def test_every_device_can_be_computed_with() -> None:
    for device in DEVICES.values():
        times = RooflineStepTimes(MODEL_SHAPES["smollm2-135m"], device)
        assert 0.0 < times.step_s(decode(1, 64)) < times.step_s(decode(8, 64)) < times.step_s(prefill(4096))


def test_a_dtype_that_a_device_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--weight-dtype: a100 does not multiply fp8; it has "):
        RooflineStepTimes(LLAMA, A100, weight_dtype="fp8")
    with pytest.raises(ConfigError, match=r"^--kv-dtype: 'nvfp4' is not known"):
        RooflineStepTimes(LLAMA, H100, kv_dtype="nvfp4")


@pytest.mark.parametrize(
    ("tp", "message"),
    [
        (3, "32 query heads of llama-3-8b cannot be divided among 3 ranks"),
        (0, "a worker has at least 1 rank"),
        (64, "32 query heads"),
    ],
)
def test_a_width_that_does_not_divide_the_model_is_refused(tp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--tp: {message}"):
        LLAMA.check_tp(tp)


def test_kv_heads_are_shared_by_more_ranks_than_there_are() -> None:
    shape = replace(LLAMA, num_kv_heads=2)
    assert [shape.kv_heads_per_rank(tp) for tp in (1, 2, 4, 8)] == [2, 1, 1, 1]
    with pytest.raises(ConfigError, match="neither a divisor nor a multiple of the 6 KV heads"):
        replace(LLAMA, num_heads=96, num_kv_heads=6, intermediate_size=4 * 4096).check_tp(4)


def test_experts_over_several_workers_are_refused_by_name() -> None:
    check_parallelism(ep=1)
    with pytest.raises(
        ConfigError, match=r"^--ep: expert parallelism \(8\) beyond the ranks of a worker is not supported"
    ):
        check_parallelism(ep=8)


# ---------------------------------------------------------------- worked by hand


def test_a_decode_step_of_one_sequence_reads_the_weights_and_its_kv_once() -> None:
    times = RooflineStepTimes(LLAMA, ideal())
    matrices = LLAMA.active_parameters + 128256 * 4096
    activations = 32 * 2 * (6144 + 4096 + 4096 + 4096 + 28672 + 4096 + 14336 + 4096) + 2 * (128256 + 4096)
    expected = (2 * matrices + activations + 131072 * 1000) / 3.35e12
    assert times.step_s(decode(1, 1000)) == pytest.approx(expected, rel=1e-9)
    assert expected * 1e3 == pytest.approx(4.52, abs=0.01)  # 15.0 GB of matrices and 0.13 GB of KV


def test_a_long_prompt_takes_its_flops() -> None:
    times = RooflineStepTimes(LLAMA, ideal())
    parts = times.parts(prefill(8192))
    assert parts.gemms == pytest.approx(2 * 8192 * LLAMA.active_parameters / 989.4e12, rel=1e-9)
    assert parts.prefill_attention == pytest.approx(32 * 4 * 4096 * 8192 * 8193 / 2 / 989.4e12, rel=1e-9)
    assert parts.head == pytest.approx(2 * (128256 * 4096 + 128256 + 4096) / 3.35e12, rel=1e-9)  # only the last token


def test_ranks_share_the_work_and_add_two_all_reduces_a_layer() -> None:
    one, four = (RooflineStepTimes(LLAMA, ideal(), tp=tp).parts(prefill(8192)) for tp in (1, 4))
    assert four.gemms == pytest.approx(one.gemms / 4, rel=1e-9)
    assert four.prefill_attention == pytest.approx(one.prefill_attention / 4, rel=1e-9)
    assert one.all_reduces == 0.0
    hidden_bytes = 2 * 8192 * 4096
    assert four.all_reduces == pytest.approx(2 * 32 * 2 * 3 / 4 * hidden_bytes / 450e9, rel=1e-9)


def test_ranks_on_several_nodes_meet_over_the_network() -> None:
    shape = replace(LLAMA, num_heads=64)
    times = RooflineStepTimes(shape, ideal(), tp=16)
    hidden_bytes = 2 * 4096
    inside = 2 * 7 / 8 * hidden_bytes / 450e9
    outside = 2 * 1e-5 + 2 * 1 / 2 * hidden_bytes / 8 / (50e9 * 0.8)
    assert times.parts(decode(1, 1)).all_reduces == pytest.approx(64 * (inside + outside), rel=1e-9)


def test_a_step_of_nothing_takes_the_fixed_time() -> None:
    assert RooflineStepTimes(LLAMA, H100).step_s(StepWork(0, 0, 0, 0)) == 1.5e-3
    assert RooflineStepTimes(LLAMA, H100, step_s=0.25).step_s(StepWork(0, 0, 0, 0)) == 0.25


def test_smaller_weights_are_read_in_half_the_time() -> None:
    whole = RooflineStepTimes(LLAMA, ideal()).parts(decode(1, 1000))
    halved = RooflineStepTimes(LLAMA, ideal(), weight_dtype="fp8", kv_dtype="fp8").parts(decode(1, 1000))
    assert halved.gemms == pytest.approx(whole.gemms / 2, rel=1e-3)  # but for the activations
    assert halved.decode_attention == pytest.approx(whole.decode_attention / 2, rel=1e-9)


# ---------------------------------------------------------------- experts

QWEN3_30B_A3B = ModelShape(
    name="qwen3-30b-a3b",
    hidden_size=2048,
    intermediate_size=0,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    qk_norm=True,
    experts=ExpertsShape(
        config=ExpertsConfig(routing=Routing(num_experts=128, top_k=8), intermediate_size=768), num_layers=48
    ),
)


def test_parameters_of_a_model_with_experts() -> None:
    """The router counts among those that each token is multiplied with."""
    shape = QWEN3_30B_A3B
    assert shape.num_parameters == 30_532_122_624
    assert shape.active_parameters == 2_730_491_904
    assert shape.read_parameters(1) == pytest.approx(shape.active_parameters)
    an_expert = 48 * 3 * 2048 * 768
    eight_rows = 128 * (1 - (15 / 16) ** 8)
    assert shape.read_parameters(8) - shape.read_parameters(1) == pytest.approx((eight_rows - 8) * an_expert)
    assert shape.read_parameters(10_000) == pytest.approx(shape.matrix_parameters)


@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_step_reads_the_experts_that_its_rows_choose(rows: int) -> None:
    parts = RooflineStepTimes(QWEN3_30B_A3B, ideal()).parts(decode(rows, 0))
    read_s = 2 * QWEN3_30B_A3B.read_parameters(rows) / ideal().memory_bandwidth
    assert read_s <= parts.gemms <= 1.05 * read_s  # activations


def test_a_long_prompt_multiplies_with_the_chosen_experts() -> None:
    parts = RooflineStepTimes(QWEN3_30B_A3B, ideal()).parts(prefill(65536))
    flops = 2.0 * 65536 * QWEN3_30B_A3B.active_parameters
    assert parts.gemms == pytest.approx(flops / ideal().flops["bfloat16"], rel=0.01)


def test_columns_of_experts_must_be_divided_by_the_ranks() -> None:
    QWEN3_30B_A3B.check_tp(4)
    with pytest.raises(ConfigError, match=r"^--tp: 768 columns of an expert of qwen3-30b-a3b cannot be divided"):
        replace(QWEN3_30B_A3B, num_heads=40, num_kv_heads=5).check_tp(5)


# ---------------------------------------------------------------- measured times


TINY = ModelShape(
    name="tiny",
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=256,
    max_positions=512,
)
SLOW = replace(ideal(), flops={"bfloat16": 1e9}, memory_bandwidth=1e9, link_bandwidth=1e9)


def roofline_gemm_s(m: int, n: int, k: int) -> float:
    return max(2 * m * n * k / 1e9, 2 * (n * k + m * n + m * k) / 1e9)


def test_measured_gemms_replace_the_roofline_where_they_were_measured() -> None:
    shapes = [(128, 64), (64, 64), (256, 64), (64, 128)]
    rows = [GemmTime(8, n, k, 3.0 * roofline_gemm_s(8, n, k)) for n, k in shapes]
    plain, corrected = (
        RooflineStepTimes(TINY, SLOW, tables=tables).parts(decode(8, 16))
        for tables in (None, PerfTables(gemm={"bfloat16": rows}))
    )
    assert corrected.gemms == pytest.approx(3.0 * plain.gemms, rel=1e-9)
    assert corrected.decode_attention == plain.decode_attention


def test_between_measured_sizes_factors_are_interpolated_in_log_space() -> None:
    rows = [GemmTime(m, n, 64, factor * roofline_gemm_s(m, n, 64)) for m, n, factor in ((1, 16, 2.0), (16, 16, 8.0))]
    rows += [GemmTime(m, 64, 64, 2.0 * roofline_gemm_s(m, 64, 64)) for m in (1, 16)]
    curve = GemmCorrections(rows, roofline_gemm_s, 1e12).curve(16, 64)
    assert curve is not None
    assert [round(curve.factor(m), 9) for m in (1, 4, 16, 1000)] == [2.0, 4.0, 8.0, 8.0]
    between = GemmCorrections(rows, roofline_gemm_s, 1e12).curve(32, 64)  # halfway from 16 to 64
    assert between is not None
    assert [round(between.factor(m), 9) for m in (1, 16)] == [2.0, 4.0]


def test_rows_faster_than_the_peak_are_left_out() -> None:
    rows = [GemmTime(8, 64, 64, 0.9 * 2 * 8 * 64 * 64 / 1e9)]
    assert GemmCorrections(rows, roofline_gemm_s, 1e9).curve(64, 64) is None


def test_attention_is_corrected_by_the_nearest_heads() -> None:
    rows = [
        AttentionTime(batch, tokens, heads, 2, 16, factor)
        for heads, factor in ((4, 2.0), (32, 10.0))
        for batch in (1, 4)
        for tokens in (64, 256)
    ]
    surface = attention_surface(rows, 8, 2, 16, lambda row: 1.0, lambda row: 0.0)
    assert surface is not None
    assert [surface.factor(batch, tokens) for batch, tokens in ((1, 64), (2, 100), (99, 9999))] == [
        pytest.approx(2.0)
    ] * 3
    assert attention_surface(rows, 8, 2, 128, lambda row: 1.0, lambda row: 0.0) is None
    assert attention_surface(rows, 8, 2, 16, lambda row: 1.0, lambda row: 99.0) is None  # all faster than can be


def test_attention_between_measured_batches_and_lengths() -> None:
    factors = {(1, 16): 1.0, (1, 256): 4.0, (16, 16): 4.0, (16, 256): 16.0}
    rows = [AttentionTime(batch, tokens, 4, 2, 16, factor) for (batch, tokens), factor in factors.items()]
    surface = attention_surface(rows, 4, 2, 16, lambda row: 1.0, lambda row: 0.0)
    assert surface is not None
    assert [round(surface.factor(*at), 9) for at in ((1, 64), (4, 16), (4, 64), (16, 256))] == [2.0, 2.0, 4.0, 16.0]


def test_the_quickest_of_several_all_reduces_counts() -> None:
    rows = [AllReduceTime(4, 1024, 3.0), AllReduceTime(4, 1024, 2.0), AllReduceTime(8, 1024, 9.0)]
    curve = all_reduce_curve(rows, 4, lambda size: 1.0)
    assert curve is not None
    assert curve.factor(1024) == pytest.approx(2.0)
    assert all_reduce_curve(rows, 2, lambda size: 1.0) is None


def test_what_was_corrected_is_named() -> None:
    tables = PerfTables(
        gemm={"bfloat16": [GemmTime(1, 64, 64, 1.0)]},
        decode_attention=[AttentionTime(1, 64, 4, 2, 16, 1.0)],
        all_reduce=[AllReduceTime(2, 1024, 1.0)],
    )
    assert RooflineStepTimes(TINY, SLOW, tables=tables).corrected == ("GEMMs", "decode attention")
    assert RooflineStepTimes(TINY, SLOW, tp=2, tables=tables).corrected == ("GEMMs", "decode attention", "all-reduce")
