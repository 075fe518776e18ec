"""Levels of processors: which there are, which is chosen, and which give the same bits."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from disagg.kernels import dispatch
from disagg.kernels.cpu import build
from disagg.kernels.cpu.linear import NativeLinear
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.lora import allocate_lora
from disagg.kernels.ops import AttentionForm, Pointwise, RopeWrite
from disagg.kernels.quantize import quantize_int8
from tests.support.paged import prompts
from tests.unit.kernels.conftest import LEVELS, compiled_or_skip

V4 = build.LEVELS["x86_64"][2]
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 64, 16


# ---------------------------------------------------------------- which


def test_without_a_name_it_is_this_very_processor() -> None:
    assert build.chosen_level({}, "x86_64", V4.features) is build.NATIVE
    assert build.chosen_level({build.LEVEL: ""}, "x86_64", V4.features) is build.NATIVE


def test_a_level_is_chosen_by_its_name() -> None:
    for level in build.LEVELS["x86_64"][2:]:
        assert build.chosen_level({build.LEVEL: level.name}, "x86_64", V4.features) is level
        assert build.chosen_level({build.LEVEL: level.name}, "x86_64", frozenset()) is level  # nothing is known


@pytest.mark.parametrize(
    ("name", "machine", "message"),
    [
        (
            "avx9",
            "x86_64",
            "'avx9' is not a level of x86_64; there are: amx, avx512-bf16, x86-64-v4, x86-64-v3, x86-64",
        ),
        ("x86-64-v3", "pdp11", "'x86-64-v3' is not a level of pdp11; there are: none"),
        ("avx512-bf16", "x86_64", "this processor is below avx512-bf16: it lacks avx512_bf16, avx512vbmi"),
    ],
)
def test_what_cannot_be_is_refused(name: str, machine: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{build.LEVEL}: {message}$"):
        build.chosen_level({build.LEVEL: name}, machine, V4.features)


@pytest.mark.usefixtures("fresh_choice")
def test_the_variable_decides_what_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for level in LEVELS[1:]:
        _, products = compiled_or_skip(level)
        monkeypatch.setenv(build.LEVEL, level.name)
        caplog.clear()
        dispatch._choice.cache_clear()
        arithmetic = products.arithmetic(torch.bfloat16)
        assert dispatch.describe() == f"cpu-c++ {level.simd} ({level.name}), bf16 GEMM by {arithmetic}"
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        slow = f"CPU kernels: {dispatch.describe()}: plain vectors, as without AVX2; several times slower"
        assert warnings == ([slow] if arithmetic == "multiply-add" else [])
    monkeypatch.setenv(build.LEVEL, "another")
    dispatch._choice.cache_clear()
    with pytest.raises(ValueError, match=f"^{build.LEVEL}: 'another' is not a level"):
        dispatch.describe()


# ---------------------------------------------------------------- the same bits


def numbers(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(native: NativeOps, products: NativeLinear, dtype: torch.dtype) -> list[Tensor]:
    """Of every op, in one dtype."""

    def of(seed: int, *shape: int) -> Tensor:
        return numbers(seed, *shape, dtype=dtype)

    x, weight, norm = of(1, 9, 90), of(2, 70, 90) / 9, of(3, 70)
    packed = [products.pack(weight)]
    if dtype == torch.bfloat16:
        packed.append(products.pack_int8(quantize_int8(weight)))
    found: list[Tensor | None] = [each.gemm(x, norm) for each in packed if each is not None]
    by_head = products.pack_experts(of(11, 3, 70, 30) / 5)
    assert by_head is not None
    found.append(native.linear_by_head(x.view(9, 3, 30), by_head))
    found += [native.rms_norm(x, x[0], 1e-5), native.silu_mul(4 * x)]
    found += native.add_rms_norm(x, x.flip(0), x[1], 1e-5) or [None]
    found += [native.rms_norm(x, x[0], 1e-5, True), native.gelu_tanh_mul(4 * x), native.add(x, x.flip(0))]
    found += [native.pointwise(4 * x, function, 1.7) for function in get_args(Pointwise)]
    lora = allocate_lora(2, 20, 90, (50, 40), dtype, torch.device("cpu"))
    lora.a_SPRI.copy_(of(12, *lora.a_SPRI.shape)), lora.b_SRO.copy_(of(13, *lora.b_SRO.shape))
    lora.ranks_SP.copy_(torch.tensor([[20, 7], [0, 13]])), lora.scales_SP.copy_(torch.tensor([[0.3, 2.0], [1.0, 0.7]]))
    found.append(native.lora_add(x, x.flip(0).clone(), lora, torch.arange(9, dtype=torch.int32) % 3 - 1))
    keys, values = of(4, 40, KV_HEADS, BLOCK, DIM), of(5, 40, KV_HEADS, BLOCK, DIM)
    table = of(6, 700, DIM)
    qkv, slots = of(7, 5, (HEADS + 2 * KV_HEADS) * DIM), torch.arange(5)
    layer = RopeWrite(table[0], table[1], 1e-5, table, table, keys, values)
    found += [native.qkv_rope_write(qkv, slots, slots, layer), keys.clone(), values.clone()]
    whole = (qkv[0, : HEADS * DIM].contiguous(), qkv[0, : KV_HEADS * DIM].contiguous())
    angles = table[:, : DIM // 2].contiguous()
    layer = RopeWrite(*whole, 1e-5, angles, angles, keys, values, query_scale_P=of(10, 700), is_whole=True)
    found += [native.qkv_rope_write(qkv, slots, slots, layer), keys, values, native.head_squares(qkv, KV_HEADS, DIM)]
    q, blocks = of(8, 40, HEADS, DIM), torch.randperm(40, generator=torch.Generator().manual_seed(9)).int()
    lengths = torch.tensor([1, 639, 17], dtype=torch.int32)
    form = AttentionForm(0.125)
    found.append(native.paged_decode_attention(q[:3], keys, values, blocks.repeat(3, 1), lengths, form))
    found.append(native.paged_prefill_attention(q, keys, values, prompts((blocks, 300, 40)), form, torch.empty_like(q)))
    form = AttentionForm(0.125, window=310, soft_cap=2.0, sinks_N=torch.linspace(-1.0, 1.0, HEADS))
    found.append(native.paged_decode_attention(q[:3], keys, values, blocks.repeat(3, 1), lengths, form))
    found.append(native.paged_prefill_attention(q, keys, values, prompts((blocks, 300, 40)), form, torch.empty_like(q)))
    assert None not in found
    return [each for each in found if each is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_of_one_arithmetic_have_the_same_bits(dtype: torch.dtype) -> None:
    """AVX2 and AVX-512, whose registers have other widths, multiply and add alike."""
    made: dict[str, tuple[str, list[Tensor]]] = {}
    for level in LEVELS:
        native, products = compiled_or_skip(level)
        arithmetic = products.arithmetic(dtype)
        found = results(native, products, dtype)
        other, expected = made.setdefault(arithmetic, (level.name, found))
        for index, (one, two) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, two), f"result {index} of {level.name} is not that of {other}"
    if {"x86-64-v4", "x86-64-v3"} <= {level.name for level in LEVELS}:
        assert "fma" in made
