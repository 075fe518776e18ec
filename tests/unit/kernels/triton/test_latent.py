"""Triton's latent attention in the interpreter against the torch reference, and what is written before it.

What the real compiler makes of the kernels: test_attention_compiles.py; bf16: tests/gpu/test_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import prefill_work, reference
from disagg.kernels.ops import AttentionForm, AttentionSpec
from disagg.kernels.triton import attention
from disagg.kernels.triton.decode_attention import DecodeShape, decode_attention
from disagg.kernels.triton.heads import HeadTiles, head_tiles
from disagg.kernels.triton.ops import TritonOps
from tests.support.latent import LatentRows
from tests.support.paged import PagedCase
from tests.unit.kernels.triton.test_attention import assert_close, assert_prefill, expected_decode, planned

LENGTHS = [65, 0, 16, 1]
SIZES = pytest.mark.parametrize(
    ("num_heads", "dims", "block_size", "dtype"),
    [
        (4, (32, 16), 16, torch.float32),
        (20, (24, 6), 48, torch.float32),
        (68, (64, 32), 16, torch.float16),
        (128, (512, 64), 64, torch.float16),
    ],
    ids=["tiny", "odd", "two tiles of heads", "DeepSeek V3"],
)
"""Query heads, and numbers of a latent and of what a key has beside it."""


def latent_case(
    lengths: list[int], num_heads: int, dims: tuple[int, int], block_size: int, **options: Any
) -> PagedCase:
    return PagedCase(lengths, heads=(num_heads, 1), dim=sum(dims), value_dim=dims[0], block_size=block_size, **options)


def decode(case: PagedCase, q_SND: Tensor) -> Tensor | None:
    caches = (case.keys_NKBD, case.values_NKBD)
    return attention.paged_decode_attention(q_SND, *caches, case.poisoned_tables_SM, case.lens_S, case.form)


@pytest.mark.parametrize(
    ("num_heads", "tiles", "group"), [(1, 1, 1), (16, 1, 16), (64, 1, 64), (96, 2, 48), (128, 2, 64), (67, 67, 1)]
)
def test_query_heads_are_divided_into_tiles_of_64_at_most(num_heads: int, tiles: int, group: int) -> None:
    assert head_tiles(num_heads, 1, 576, 512, torch.bfloat16) == HeadTiles(tiles, group, 512, 64)
    assert head_tiles(8 * num_heads, 8, 128, 128, torch.bfloat16) == HeadTiles(8, num_heads, 128, 0)
    assert head_tiles(48, 1, 576, 512, torch.float32) == HeadTiles(3, 16, 512, 64)


@SIZES
def test_decode(num_heads: int, dims: tuple[int, int], block_size: int, dtype: torch.dtype) -> None:
    lengths = LENGTHS if num_heads < 64 else LENGTHS[:2]
    case = latent_case(lengths, num_heads, dims, block_size, dtype=dtype)
    q = case.queries(len(lengths))
    assert_close(decode(case, q), expected_decode(case, q))


@SIZES
def test_prompts(num_heads: int, dims: tuple[int, int], block_size: int, dtype: torch.dtype) -> None:
    chunks = [(0, 1), (0, 5), (50, 3), (63, 1)]
    assert_prefill(latent_case([sum(chunk) for chunk in chunks], num_heads, dims, block_size, dtype=dtype), chunks)


@pytest.mark.parametrize("num_programs", [1, 4, 40])
def test_decode_is_the_same_however_many_programs_share_the_contexts(num_programs: int) -> None:
    """With 40 the long context is in 14 pieces."""
    case = latent_case([5, 211, 0, 17], 6, (32, 16), 16)
    q = case.queries(4)
    shape = DecodeShape(tile=16, num_programs=num_programs, num_warps=4, num_stages=3)
    args = (case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S)
    found = decode_attention(q, *args, case.form.scale * math.log2(math.e), 1.0, shape, case.form)
    assert_close(found, expected_decode(case, q))


def test_a_long_context_of_a_prompt_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_work, "MIN_PIECE_TOKENS", 1)
    works: list[prefill_work.PrefillWork] = []

    def plan(
        places: list[prefill_work.ChunkPlace], spec: AttentionSpec, window: int | None
    ) -> prefill_work.PrefillWork:
        monkeypatch.setattr(attention, "_num_multiprocessors", lambda _: 1000)
        works.append(attention.plan_prefills(places, spec, window))
        return works[0]

    chunks = [(0, 3), (200, 2)]
    assert_prefill(latent_case([3, 202], 96, (32, 16), 16, dtype=torch.float16), chunks, plan)
    assert works[0].num_pieces >= 4


def test_windows_soft_caps_and_sinks() -> None:
    """Of latents whose first tokens are gone."""
    chunks = [(0, 30), (60, 9), (64, 5)]
    case = latent_case([sum(chunk) for chunk in chunks], 6, (32, 16), 16)
    case.form = AttentionForm(0.15, window=20, soft_cap=1.5, sinks_N=torch.linspace(-2.0, 3.0, 6))
    for sequence, (start, _) in enumerate(chunks):
        case.forget(sequence, max(start - 19, 0))
    assert_prefill(case, chunks)
    q = case.queries(3)
    assert_close(decode(case, q), expected_decode(case, q))


def test_latents_in_fp8_are_read_with_their_scale() -> None:
    case = latent_case([100, 31], 4, (32, 16), 16, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    q, rows = case.queries(2), case.keys_NKBD.to(torch.float16) * 0.5
    caches = (case.keys_NKBD, case.values_NKBD)
    found = attention.paged_decode_attention(q, *caches, case.poisoned_tables_SM, case.lens_S, case.form, 0.5, 0.5)
    wanted = reference.paged_decode_attention(q, rows, rows[..., :32], case.tables_SM, case.lens_S, case.form)
    assert_close(found, wanted)


@pytest.mark.parametrize(
    "values",
    [
        lambda keys: torch.zeros(1 << 14).as_strided((*keys.shape[:3], 32), keys.stride()),
        lambda keys: keys[..., 1:33],
        lambda keys: keys[..., :8],
        lambda keys: keys[1:, ..., :32],
    ],
    ids=["another cache", "other columns", "few numbers", "fewer blocks"],
)
def test_values_that_are_not_the_first_numbers_of_the_keys_are_declined(values: Callable[[Tensor], Tensor]) -> None:
    case = latent_case([3, 4], 4, (32, 16), 16)
    q, caches = case.queries(2), (case.keys_NKBD, values(case.keys_NKBD))
    out = torch.empty(2, 4, caches[1].shape[3])
    assert attention.paged_decode_attention(q, *caches, case.tables_SM, case.lens_S, case.form) is None
    assert attention.paged_prefill_attention(q, *caches, planned(case, [(1, 2)]), case.form, out) is None


def test_results_of_another_width_are_declined() -> None:
    case = latent_case([3, 4], 4, (32, 16), 16)
    q, caches, out = case.queries(2), (case.keys_NKBD, case.values_NKBD), torch.empty(2, 4, 48)
    assert attention.paged_decode_attention(q, *caches, case.tables_SM, case.lens_S, case.form, out_SND=out) is None
    assert attention.paged_prefill_attention(q, *caches, planned(case, [(1, 2)]), case.form, out) is None


# ---------------------------------------------------------------- what is written


@pytest.mark.parametrize(
    ("num_heads", "dims", "dtype"),
    [(4, (32, 16), torch.float32), (5, (24, 6), torch.float16), (16, (512, 64), torch.float16)],
)
def test_rows_are_written_and_queries_put_together(num_heads: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """The bits of the reference."""
    case = LatentRows(8, num_heads, dims, dtype)
    expected_cache = case.cache.clone()
    expected, found = case.write(reference, expected_cache), case.write(TritonOps(), case.cache)
    assert expected is not None
    assert found is not None
    assert found.is_contiguous()
    assert torch.equal(found, expected)
    assert torch.equal(case.cache.isnan(), expected_cache.isnan())
    assert torch.equal(case.cache.nan_to_num(), expected_cache.nan_to_num())


def test_rows_in_fp8_are_clamped() -> None:
    """With numbers that e4m3 holds: the interpreter loses the carry when it rounds."""
    case = LatentRows(8, 2, (32, 16), torch.float32)
    case.latent, case.k = (case.latent * 4).round().clamp(-8.0, 8.0) * 64, (case.k * 4).round().clamp(-8.0, 8.0)
    case.cos, case.sin = torch.ones(64, 16), torch.zeros(64, 16)
    cache = torch.zeros(case.cache.shape, dtype=torch.float8_e4m3fn)
    assert case.write(TritonOps(), cache) is not None
    rows = cache[:, 1].float().view(-1, 48)[case.slots[case.slots >= 0]]
    expected = torch.cat((case.latent.clamp(-448.0, 448.0), case.k), dim=1)[case.slots >= 0]
    assert case.latent.max() > 448.0
    assert torch.equal(rows, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(8, 16).half()},
        {"latent": torch.zeros(32, 8).t()},
        {"absorbed": torch.zeros(8, 32, 4).transpose(1, 2)},
        {"slots": torch.zeros(8)},
        {"cache": torch.zeros(4, 3, 1, 2, 16, 48)},
        {"cache": torch.zeros(4, 3, 1, 1, 16, 64)},
        {"cos": torch.zeros(64, 12)},
    ],
    ids=[
        "dtype of k",
        "latents",
        "heads",
        "slots",
        "two heads in the cache",
        "width of the cache",
        "width of the tables",
    ],
)
def test_what_cannot_be_read_is_declined(change: dict[str, Tensor]) -> None:
    case = LatentRows(8, 4, (32, 16), torch.float32)
    vars(case).update(change)
    assert case.write(TritonOps(), case.cache) is None


def test_nothing_of_no_rows() -> None:
    case = LatentRows(8, 4, (32, 16), torch.float32)
    for name in ("latent", "k", "absorbed", "q", "positions", "slots"):
        setattr(case, name, getattr(case, name)[:0])
    found = case.write(TritonOps(), case.cache)
    assert found is not None
    assert found.shape == (0, 4, 48)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_heads_are_multiplied_where_their_result_belongs(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(3)
    x = torch.randn((5, 4, 30), generator=random).to(dtype)[..., 6:]
    weight = torch.randn((4, 16, 24), generator=random).to(dtype)
    found = TritonOps().linear_by_head(x, weight)
    assert found is not None
    assert found.is_contiguous()
    torch.testing.assert_close(found, reference.linear_by_head(x, weight), rtol=2.0**-8, atol=1e-5)
