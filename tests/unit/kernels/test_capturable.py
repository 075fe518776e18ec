"""What stands in for a kernel that is switched off: torch ops that a CUDA graph can hold.

`FakeTensorMode` computes shapes alone. It refuses whatever needs a value on the host: a mask that selects, `.item()`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from disagg.kernels import reference
from disagg.kernels.lora import allocate_lora
from disagg.kernels.ops import AttentionForm, LatentWrite, PrefillChunk, Prefills, RopeWrite

T, N, K, D, BLOCK, NUM_BLOCKS = 4, 4, 2, 16, 8, 5
DTYPES = ("float32", "bfloat16", "float8_e4m3fn")


def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of one of two layers, with NaN where nothing was written."""
    whole = torch.full((NUM_BLOCKS, 2, 2, K, BLOCK, D), torch.nan).to(dtype)
    return whole[:, 1, 0], whole[:, 1, 1]


def written_one_by_one(k_TKD: Tensor, v_TKD: Tensor, slots: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = (cache.float() for cache in caches(dtype))
    for token, slot in enumerate(slots):
        if slot >= 0:
            keys[slot // BLOCK, :, slot % BLOCK] = k_TKD[token].to(dtype).float()
            values[slot // BLOCK, :, slot % BLOCK] = v_TKD[token].to(dtype).float()
    return keys, values


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "slots",
    [[9, 0, 39, 17], [-1, 12, -1, 3], [5, -1, -1, -1], [-1, -1, -1, 0], [-1, -1, -1, -1], []],
    ids=["all kept", "two kept", "first kept", "last kept", "none kept", "no tokens"],
)
def test_kv_is_written_where_tokens_have_slots_and_nowhere_else(
    slots: list[int], index_dtype: torch.dtype, dtype_name: str
) -> None:
    dtype: torch.dtype = getattr(torch, dtype_name)
    given = torch.float32 if dtype == torch.float32 else torch.bfloat16
    k_TKD, v_TKD = torch.randn(2, len(slots), K, D, generator=torch.Generator().manual_seed(0)).to(given)
    keys, values = caches(dtype)
    reference.kv_write(k_TKD, v_TKD, keys, values, torch.tensor(slots, dtype=index_dtype))
    for found, expected in zip((keys, values), written_one_by_one(k_TKD, v_TKD, slots, dtype), strict=True):
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


def test_what_all_padding_writes_back_has_the_same_bits() -> None:
    keys, values = caches(torch.float32)
    keys[0, :, 0] = 3.0
    before = keys.clone(), values.clone()
    rows = torch.ones(T, K, D)
    reference.kv_write(rows, rows, keys, values, torch.full((T,), -1))
    assert torch.equal(keys.view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(values.view(torch.int32), before[1].view(torch.int32))


def test_prompts_read_a_cache_of_8_bit_floats() -> None:
    whole = torch.randn(NUM_BLOCKS, 2, 2, K, BLOCK, D, generator=torch.Generator().manual_seed(1))
    whole = whole.to(torch.float8_e4m3fn)
    q_TND = torch.randn(T, N, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    chunks = Prefills((PrefillChunk(slice(0, T), 9, torch.tensor([3, 1], dtype=torch.int32)),))
    found, expected = (
        reference.paged_prefill_attention(
            q_TND, cache[:, 1, 0], cache[:, 1, 1], chunks, AttentionForm(0.25), torch.empty_like(q_TND)
        )
        for cache in (whole, whole.bfloat16())
    )
    assert torch.equal(found, expected)


# ---------------------------------------------------------------- nothing asks the host


def rope_write() -> object:
    keys, values = caches(torch.bfloat16)
    table = torch.ones(64, D, dtype=torch.bfloat16)
    layer = RopeWrite(torch.ones(D).bfloat16(), torch.ones(D).bfloat16(), 1e-5, table, table, keys, values)
    rows = torch.ones(T, (N + 2 * K) * D, dtype=torch.bfloat16)
    return reference.qkv_rope_write(rows, torch.arange(T), torch.arange(T), layer)


def latent_write() -> object:
    layer = LatentWrite(torch.ones(64, 4), torch.ones(64, 4), torch.zeros(NUM_BLOCKS, 1, BLOCK, D))
    parts = (torch.ones(T, D - 4), torch.ones(T, 4), torch.ones(T, N, D - 4), torch.ones(T, N, 4))
    return reference.latent_rope_write(*parts, torch.arange(T), torch.arange(T), layer)


def decode() -> object:
    keys, values = caches(torch.float32)
    tables, lens = torch.zeros(T, 3, dtype=torch.int32), torch.ones(T, dtype=torch.int32)
    return reference.paged_decode_attention(torch.ones(T, N, D), keys, values, tables, lens, AttentionForm(0.25))


STAND_INS: dict[str, Callable[[], object]] = {
    "embed": lambda: reference.embed(torch.arange(T), torch.ones(9, D)),
    "rms_norm": lambda: reference.rms_norm(torch.ones(T, D), torch.ones(D), 1e-5),
    "add_rms_norm": lambda: reference.add_rms_norm(torch.ones(T, D), torch.ones(T, D), torch.ones(D), 1e-5),
    "add": lambda: reference.add(torch.ones(T, D), torch.ones(T, D)),
    "lora_add": lambda: reference.lora_add(
        torch.ones(T, D),
        torch.ones(T, D),
        allocate_lora(2, 16, D, (D,), torch.float32, torch.device("cpu")),
        torch.ones(T, dtype=torch.int32),
    ),
    "pointwise": lambda: reference.pointwise(torch.ones(T, D), "soft_cap", 2.0),
    "silu_mul": lambda: reference.silu_mul(torch.ones(T, 2 * D)),
    "gelu_tanh_mul": lambda: reference.gelu_tanh_mul(torch.ones(T, 2 * D)),
    "head_squares": lambda: reference.head_squares(torch.ones(T, (N + 2 * K) * D), K, D),
    "argmax_rows": lambda: reference.argmax_rows(torch.ones(T, D), D),
    "qkv_rope_write": rope_write,
    "latent_rope_write": latent_write,
    "paged_decode_attention": decode,
}


@pytest.mark.parametrize("op", STAND_INS)
def test_a_captured_step_can_have_the_reference_of_any_op(op: str) -> None:
    with FakeTensorMode():
        STAND_INS[op]()


def test_a_mask_that_selects_would_be_found() -> None:
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        torch.ones(T)[torch.ones(T) > 0]
