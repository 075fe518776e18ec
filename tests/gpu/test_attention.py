"""Attention against the torch reference at the sizes of published models, on the GPU; without one, small,
interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from disagg.kernels import reference
from disagg.kernels.ops import AttentionForm, PlannedPrefills
from tests.support.paged import PagedCase

pytest.importorskip("triton")
from disagg.kernels.triton import attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.0**-6}
"""Of means of values of size 1 to 4; the weights are rounded to the dtype."""

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
FP8 = torch.float8_e4m3fn
HEADS, DIM = (32, 8), 128

FORMS: dict[str, tuple[tuple[int, int], int, float, float | None, bool]] = {
    "gpt-oss": ((64, 8), 64, 128, None, True),
    "Gemma 2": ((16, 8), 256, 4096, 50.0, False),
    "Gemma 3": ((4, 1), 256, 512, None, False),
}
"""Query and KV heads, head dim, window, soft cap, and whether there are sinks."""
LATENTS = pytest.mark.parametrize(
    "num_heads",
    [
        pytest.param(16, id="DeepSeek V2 Lite"),
        pytest.param(20, id="GLM-4.7-Flash"),
        pytest.param(128, id="DeepSeek V3", marks=pytest.mark.gpu),
    ],
)
"""All of 512 numbers, and 64 beside them. 16 are also those of a rank of eight of DeepSeek V3."""


def assert_close(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[found.dtype])


def build(device: torch.device, lens: list[int], small: list[int], **options: Any) -> PagedCase:
    """Contexts of `lens` on a GPU, of `small` in the interpreter."""
    on_gpu = device.type == "cuda"
    heads, dim = (HEADS, DIM) if on_gpu else ((4, 2), 32)
    return PagedCase(lens if on_gpu else small, heads=options.pop("heads", heads), dim=dim, device=device, **options)


def decode(case: PagedCase, q_SND: Tensor, **scales: Any) -> Tensor | None:
    return attention.paged_decode_attention(
        q_SND, case.keys_NKBD, case.values_NKBD, case.poisoned_tables_SM, case.lens_S, case.form, **scales
    )


def decode_reference(case: PagedCase, q_SND: Tensor) -> Tensor:
    keys, values = case.keys_NKBD.to(case.dtype), case.values_NKBD.to(case.dtype)
    return reference.paged_decode_attention(q_SND, keys, values, case.tables_SM, case.lens_S, case.form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_of_uneven_contexts(device: torch.device, block_size: int, dtype: torch.dtype) -> None:
    case = build(device, [4096, 1, 17, 0, 1025, 8191, 300, 2], [40, 0, 17], block_size=block_size, dtype=dtype)
    q = case.queries(len(case.lens_S))
    assert_close(decode(case, q), decode_reference(case, q))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "context"), [(1, 32768), (1, 100), (64, 1000), (256, 200)])
def test_decode_at_many_batches(device: torch.device, batch: int, context: int) -> None:
    case = build(device, [context] * batch, [], dtype=torch.bfloat16)
    q = case.queries(batch)
    assert_close(decode(case, q), decode_reference(case, q))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 32), (9, 3), (8, 1), (64, 4)])
def test_decode_of_other_groups(device: torch.device, heads: tuple[int, int]) -> None:
    case = build(device, [700, 3, 64], [], heads=heads, dtype=torch.bfloat16)
    q = case.queries(3)
    assert_close(decode(case, q), decode_reference(case, q))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_of_an_fp8_cache(device: torch.device, block_size: int) -> None:
    lens = [4096, 1, 0, 777]
    case = build(device, lens, [], block_size=block_size, dtype=torch.bfloat16, cache_dtype=FP8)
    q = case.queries(4)
    assert_close(decode(case, q), decode_reference(case, q))
    scaled = decode(case, q, key_scale=1.0, value_scale=0.5)
    assert_close(scaled, decode_reference(case, q) * 0.5)


@pytest.mark.gpu
def test_a_captured_decode_serves_other_lengths(device: torch.device) -> None:
    """The grid does not depend on the lengths, so a graph is replayed with those that are in the tensor then."""
    case = build(device, [2000, 50, 900, 3000], [], dtype=torch.bfloat16)
    q, full = case.queries(4), case.lens_S.clone()
    decode(case, q)
    graph = torch.cuda.CUDAGraph()
    case.lens_S.copy_(torch.tensor([1, 1, 0, 0]))
    with torch.cuda.graph(graph):
        found = decode(case, q)
    for lens_S in (full, full // 2, torch.zeros_like(full), full):
        case.lens_S.copy_(lens_S)
        graph.replay()
        assert_close(found, decode_reference(case, q))


def assert_prefill(case: PagedCase, chunks: list[tuple[int, int]]) -> PlannedPrefills:
    prefills = case.prompts(chunks)
    q, caches = case.queries(prefills.chunks[-1].rows.stop), (case.keys_NKBD, case.values_NKBD)
    expected, found = (q.new_empty((*q.shape[:2], case.value_dim)) for _ in range(2))
    reference.paged_prefill_attention(q, *caches, prefills, case.form, expected)
    planned = case.planned(prefills, attention.plan_prefills)
    assert_close(attention.paged_prefill_attention(q, *caches, planned, case.form, found), expected)
    return planned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("prefix", [0, 77])
def test_prefill(device: torch.device, prefix: int, block_size: int, dtype: torch.dtype) -> None:
    case = build(device, [prefix + 1500], [prefix + 9], block_size=block_size, dtype=dtype)
    assert_prefill(case, [(prefix, int(case.lens_S[0]) - prefix)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_of_many_prompts(device: torch.device, block_size: int, dtype: torch.dtype) -> None:
    chunks = [(0, 700), (3000, 33), (0, 1), (64, 64), (5000, 16)] if device.type == "cuda" else [(0, 20), (30, 5)]
    case = build(device, lens := [sum(chunk) for chunk in chunks], lens, block_size=block_size, dtype=dtype)
    assert_prefill(case, chunks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_behind_a_context_that_is_split(device: torch.device, block_size: int, dtype: torch.dtype) -> None:
    case = build(device, [32800], [], block_size=block_size, dtype=dtype)
    assert assert_prefill(case, [(32768, 32)]).work.num_joins > 0


# ---------------------------------------------------------------- forms


def formed(device: torch.device, name: str, lens: list[int], small: list[int], **options: Any) -> PagedCase:
    """With the attention of a model; without a GPU a window of 20 over a few small heads."""
    heads, dim, window, soft_cap, has_sinks = FORMS[name]
    if device.type != "cuda":
        heads, dim, window, lens = (4, 2), 32, 20, small
    case = PagedCase(lens, heads=heads, dim=dim, device=device, **options)
    sinks_N = torch.linspace(-2.0, 3.0, heads[0], device=device) if has_sinks else None
    case.form = AttentionForm(dim**-0.5, window=int(window), soft_cap=soft_cap, sinks_N=sinks_N)
    return case


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_of_forms(device: torch.device, block_size: int, dtype: torch.dtype, name: str) -> None:
    """What left the windows is gone."""
    lens = [4096, 1, 17, 0, 1025, 8191, 300, 129]
    case = formed(device, name, lens, [40, 0, 17], block_size=block_size, dtype=dtype)
    window = case.form.window
    assert window is not None
    for sequence, length in enumerate(case.lens_S.tolist()):
        case.forget(sequence, max(length - window, 0))
    q = case.queries(len(case.lens_S))
    assert_close(decode(case, q), decode_reference(case, q))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_of_forms(device: torch.device, dtype: torch.dtype, name: str) -> None:
    chunks = [(0, 700), (3000, 33), (0, 1), (64, 64), (5000, 16)] if device.type == "cuda" else [(0, 24), (30, 5)]
    case = formed(device, name, lens := [sum(chunk) for chunk in chunks], lens, block_size=64, dtype=dtype)
    assert case.form.window is not None
    for sequence, (start, _) in enumerate(chunks):
        case.forget(sequence, max(start + 1 - case.form.window, 0))
    assert_prefill(case, chunks)


def latent(device: torch.device, num_heads: int, lens: list[int], small: list[int], **options: Any) -> PagedCase:
    """Contexts of latents; without a GPU small ones."""
    on_gpu = device.type == "cuda"
    dim, value_dim = (576, 512) if on_gpu else (48, 32)
    lens = lens if on_gpu else small
    return PagedCase(lens, heads=(num_heads, 1), dim=dim, value_dim=value_dim, device=device, **options)


@LATENTS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_of_latents(device: torch.device, block_size: int, dtype: torch.dtype, num_heads: int) -> None:
    case = latent(device, num_heads, [4096, 1, 17, 0, 1025, 8191], [40, 0, 17], block_size=block_size, dtype=dtype)
    q = case.queries(len(case.lens_S))
    assert_close(decode(case, q), decode_reference(case, q))


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "context"), [(1, 32768), (64, 1000), (256, 200)])
def test_decode_of_latents_at_many_batches(device: torch.device, batch: int, context: int) -> None:
    case = latent(device, 16, [context] * batch, [], block_size=64, dtype=torch.bfloat16)
    q = case.queries(batch)
    assert_close(decode(case, q), decode_reference(case, q))


@pytest.mark.gpu
def test_decode_of_latents_in_fp8(device: torch.device) -> None:
    case = latent(device, 128, [4096, 1, 0, 777], [], block_size=64, dtype=torch.bfloat16, cache_dtype=FP8)
    q = case.queries(4)
    assert_close(decode(case, q), decode_reference(case, q))


@LATENTS
@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_of_latents(device: torch.device, dtype: torch.dtype, num_heads: int) -> None:
    chunks = [(0, 300), (3000, 33), (0, 1), (64, 64), (9000, 4)] if device.type == "cuda" else [(0, 20), (30, 5)]
    case = latent(device, num_heads, lens := [sum(chunk) for chunk in chunks], lens, block_size=64, dtype=dtype)
    assert_prefill(case, chunks)
