"""KV in 8 bits: which bytes are written, and attention over them. That a token has the same bits whoever computes it is
in `test_order.py`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.engine import cache_groups
from disagg.kernels import kv_rows, reference
from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.ops import AttentionForm, RopeWrite
from tests.support.paged import PagedCase
from tests.unit.kernels import oracle
from tests.unit.kernels.conftest import LEVELS, compiled_or_skip

LARGEST = 127 * 65504.0
"""Above it no scale is large enough."""
HALVES = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()
"""All fp16 numbers from 0 on."""


def rows_of_all_sizes(dim: int) -> Tensor:
    """[T, 1, D] in fp32: numbers of many sizes, and what is at the ends of the range."""
    random = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-9, 6.5, 400)[:, None, None]
    rows = torch.randn((400, 1, dim), generator=random).clamp(-1, 1) * sizes
    ends = [0.0, 1e-40, 2.0**-24 * 127, 2.0**-24 * 127.01, 65504.0, LARGEST, -LARGEST]
    halves = HALVES[torch.randint(1, 0x7C00, (200,), generator=random)].float() * 127  # scales without rounding
    return torch.cat((rows, torch.cat((torch.tensor(ends), halves))[:, None, None].expand(-1, 1, dim)))


def written(ops: Any, rows_TKD: Tensor) -> Tensor:
    """The rows as keys and as values, which are equal, int8 [T, K, D + 2]."""
    T, K, D = rows_TKD.shape
    ones, zeros = rows_TKD.new_ones(1, D), rows_TKD.new_zeros(1, D)
    qkv_TQ = torch.cat((rows_TKD[:, :1], rows_TKD, rows_TKD), dim=1).reshape(T, -1)
    caches = torch.full((2, -(-T // 16), K, 16, D + 2), -128, dtype=torch.int8)
    layer = RopeWrite(None, None, 1e-5, ones, zeros, caches[0], caches[1])
    assert ops.qkv_rope_write(qkv_TQ, torch.zeros(T, dtype=torch.int64), torch.arange(T), layer) is not None
    found = caches.transpose(2, 3).flatten(1, 2)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0, T:], torch.full_like(found[0, T:], -128))
    return found[0, :T]


def test_a_scale_is_as_wide_as_the_layout_says() -> None:
    assert cache_groups.SCALE_BYTES == {"int8": kv_rows.SCALE_BYTES}


def test_a_scale_is_the_smallest_that_is_large_enough() -> None:
    """And no integer is beyond 127, though none is clamped."""
    rows = rows_of_all_sizes(64)
    found = kv_rows.quantized_rows(rows)
    most = rows.abs().amax(-1)[:, 0].double()
    expected = HALVES[torch.searchsorted(HALVES * 127, most)]
    assert torch.equal(kv_rows.scales_of(found)[:, 0, 0].double(), expected)
    assert found[..., :-2].min() >= -127
    error = (kv_rows.dequantized_rows(found) - rows).abs().amax(-1)[:, 0]
    assert bool((error <= 0.5001 * expected).all())


def test_half_a_step_goes_to_the_even_integer() -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0])
    assert kv_rows.quantized_rows(row)[:-2].tolist() == [127, 0, 2, 2, 0, -2, 126, -127]


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1.0001 * LARGEST])
def test_what_has_no_scale_is_not_a_number(native: NativeOps, number: float) -> None:
    rows = torch.ones(2, 1, 24)
    rows[0, 0, 5] = number
    found = written(native, rows)
    assert torch.equal(found, kv_rows.quantized_rows(rows))
    assert kv_rows.scales_of(found)[:, 0, 0].isnan().tolist() == [True, False]
    assert found[0, 0, :-2].tolist() == [0] * 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 30])
def test_every_implementation_writes_the_same_bytes(native: NativeOps, dim: int, dtype: torch.dtype) -> None:
    rows = rows_of_all_sizes(dim).to(dtype)
    assert torch.equal(written(native, rows), kv_rows.quantized_rows(rows))
    assert torch.equal(written(reference, rows), kv_rows.quantized_rows(rows))


def test_a_token_without_a_slot_is_not_written(native: NativeOps) -> None:
    keys, values = torch.zeros((2, 1, 2, 16, 34), dtype=torch.int8)
    layer = RopeWrite(None, None, 1e-5, torch.ones(1, 32), torch.zeros(1, 32), keys, values)
    position = torch.zeros(1, dtype=torch.int64)
    for ops in (native, reference):
        assert ops.qkv_rope_write(torch.randn(1, 8 * 32), position, position - 1, layer) is not None
    assert not keys.any()
    assert not values.any()


# ---------------------------------------------------------------- attention

FORMS = {
    "plain": AttentionForm(0.125),
    "window": AttentionForm(0.125, window=33),
    "all": AttentionForm(0.125, window=290, soft_cap=1.5, sinks_N=torch.linspace(-1.0, 1.0, 6)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (24, 17), (128, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_over_what_the_rows_stand_for(
    ops: Any, dtype: torch.dtype, dim: int, block_size: int, form: AttentionForm
) -> None:
    lengths = [1, 17, 300]
    case = PagedCase(lengths, heads=(6, 2), dim=dim, block_size=block_size, dtype=dtype, cache_dtype=torch.int8)
    case.form = form
    q_SND = case.queries(len(lengths))
    arguments = (case.keys_NKBD, case.values_NKBD)
    found = ops.paged_decode_attention(q_SND, *arguments, case.tables_SM, case.lens_S, form)
    q_TND, out = case.queries(40), torch.empty(40, 6, dim, dtype=dtype)
    prefills = case.prompts([(0, 1), (5, 12), (273, 27)])
    ops.paged_prefill_attention(q_TND, *arguments, prefills, form, out)
    keys, values = (kv_rows.dequantized_rows(cache) for cache in arguments)

    def expected(q_ND: Tensor, sequence: int, context: int) -> Tensor:
        seen = torch.arange(max(context - (form.window or context), 0), context)
        blocks = case.tables_SM[sequence].long()[seen // block_size]
        k, v = (cache[blocks, :, seen % block_size] for cache in (keys, values))
        sinks = [-math.inf] * 6 if form.sinks_N is None else form.sinks_N.tolist()
        heads = [
            oracle.attend(q_D, k[:, n // 3], v[:, n // 3], form.scale, form.soft_cap, sinks[n])
            for n, q_D in enumerate(q_ND)
        ]
        return torch.stack(heads)

    decodes = [expected(q_SND[sequence], sequence, length) for sequence, length in enumerate(lengths)]
    oracle.assert_close(found, torch.stack(decodes))
    places = [(0, 1), (1, 6), (1, 17), (2, 274), (2, 300)]
    rows = [0, 1, 12, 13, 39]
    oracle.assert_close(out[rows], torch.stack([expected(q_TND[r], *at) for r, at in zip(rows, places, strict=True)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_levels_have_the_same_bits(dtype: torch.dtype) -> None:
    """But for one without fused multiply-adds; also those that multiply bf16 pairs, whose words are fp32 here."""
    case = PagedCase([300, 257], heads=(6, 2), dim=64, dtype=dtype, cache_dtype=torch.int8)
    q_SND, q_TND = case.queries(2), case.queries(40)
    found = []
    for level in LEVELS:
        if level.name == "x86-64":
            continue
        native, _ = compiled_or_skip(level)
        arguments = (case.keys_NKBD, case.values_NKBD)
        decodes = native.paged_decode_attention(q_SND, *arguments, case.tables_SM, case.lens_S, FORMS["all"])
        out = torch.empty_like(q_TND.contiguous())
        assert native.paged_prefill_attention(q_TND, *arguments, case.prompts([(260, 40)]), FORMS["all"], out) is out
        assert decodes is not None
        found.append((decodes, out))
    assert all(torch.equal(one, two) for each in found for one, two in zip(each, found[0], strict=True))


def test_a_value_that_is_not_finite_shows_in_its_row_and_not_before(native: NativeOps) -> None:
    case = PagedCase([300], heads=(4, 2), dim=64, dtype=torch.bfloat16, cache_dtype=torch.int8)
    tables, lens_S = case.tables_SM.repeat(3, 1), torch.tensor([298, 299, 300], dtype=torch.int32)
    q_SND = case.queries(3)
    before = native.paged_decode_attention(q_SND, case.keys_NKBD, case.values_NKBD, tables, lens_S, case.form)
    bad = torch.full((64,), math.inf)
    case.values_NKBD[tables[0, 298 // 16].long(), :, 298 % 16] = kv_rows.quantized_rows(bad)
    after = native.paged_decode_attention(q_SND, case.keys_NKBD, case.values_NKBD, tables, lens_S, case.form)
    assert before is not None
    assert after is not None
    assert torch.equal(after[0], before[0])
    assert after[1:].isnan().all()


def test_the_kernels_decline_a_cache_in_8_bits_of_other_rows(native: NativeOps) -> None:
    case = PagedCase([20], heads=(4, 2), dim=64, cache_dtype=torch.int8)
    q_SND = case.queries(1)
    arguments = (case.tables_SM, case.lens_S, case.form)
    short, keys, values = case.values_NKBD[..., :40], case.keys_NKBD, case.values_NKBD
    assert native.paged_decode_attention(q_SND, keys, short, *arguments) is None
    assert native.paged_decode_attention(q_SND[..., :32], keys, values, *arguments) is None
