"""Writing tokens into the paged cache, and copying ranges of tokens out of it and into another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disagg.kernels.cpu.ops import NativeOps
from disagg.kernels.reference import gather_kv, scatter_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("K", "D"), [(3, 64), (1, 80)])
def test_kv_write(ops: Any, K: int, D: int, block_size: int, dtype: torch.dtype) -> None:
    cache = torch.zeros(5, 2, 2, K, block_size, D, dtype=dtype)
    expected = cache.clone()
    rows = torch.randn(4, 3 * K, D).to(dtype)
    k, v = rows[:, K : 2 * K], rows[:, 2 * K :]
    slots = [3 * block_size + 5, 0, 5 * block_size - 1, block_size]
    for t, slot in enumerate(slots):
        for head in range(K):
            expected[slot // block_size, 1, 0, head, slot % block_size] = k[t, head]
            expected[slot // block_size, 1, 1, head, slot % block_size] = v[t, head]
    ops.kv_write(k, v, cache[:, 1, 0], cache[:, 1, 1], torch.tensor(slots))
    assert torch.equal(cache, expected)


def test_kv_write_of_no_token_changes_nothing(ops: Any) -> None:
    cache = torch.ones(2, 1, 2, 1, 16, 16)
    empty = torch.empty(0, 1, 16)
    ops.kv_write(empty, empty, cache[:, 0, 0], cache[:, 0, 1], torch.empty(0, dtype=torch.int64))
    assert torch.equal(cache, torch.ones_like(cache))


@pytest.mark.parametrize("slot", [-1, 32])
def test_cpp_kv_write_refuses_slots_outside_before_it_writes(native: NativeOps, slot: int) -> None:
    cache = torch.zeros(2, 1, 2, 1, 16, 16)
    rows = torch.ones(2, 1, 16)
    with pytest.raises(IndexError, match=f"slot {slot} of token 1 "):
        native.kv_write(rows, rows, cache[:, 0, 0], cache[:, 0, 1], torch.tensor([3, slot]))
    assert not cache.any()


def test_cpp_kv_write_declines_what_it_does_not_read(native: NativeOps) -> None:
    cache, rows, slots = torch.zeros(2, 1, 2, 3, 16, 16), torch.ones(2, 3, 16), torch.tensor([1, 2])
    k, v = cache[:, 0, 0], cache[:, 0, 1]
    assert native.kv_write(rows.bfloat16(), rows, k, v, slots) is None
    assert native.kv_write(rows, rows, k, v, slots.int()) is None
    assert native.kv_write(rows, rows, k, v, slots[:1]) is None
    assert native.kv_write(rows[:, :2], rows[:, :2], k, v, slots) is None
    assert native.kv_write(rows, rows, k[:, :, ::2], v[:, :, ::2], slots) is None
    assert not cache.any()


def random_cache(num_blocks: int, block_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_blocks, 2, 2, 3, block_size, 8, generator=generator).to(dtype)


def test_gather_is_in_canonical_order() -> None:
    cache = random_cache(4, 16, torch.bfloat16)
    out = torch.empty(2 * 2 * 3 * 20 * 16, dtype=torch.uint8)
    gather_kv(cache, [2, 0, 3], 10, 30, out)
    found = out.view(torch.bfloat16).view(2, 2, 3, 20, 8)
    table = [2, 0, 3]
    for layer in range(2):
        for kv in range(2):
            for head in range(3):
                for token in range(10, 30):
                    expected = cache[table[token // 16], layer, kv, head, token % 16]
                    assert torch.equal(found[layer, kv, head, token - 10], expected)


BLOCKS = {16: [5, 0, 7, 2, 9, 1], 32: [4, 1, 3], 48: [2, 0]}
"""96 tokens in scattered blocks."""


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    source=st.sampled_from(sorted(BLOCKS)),
    target=st.sampled_from(sorted(BLOCKS)),
    dtype=st.sampled_from(DTYPES),
    bounds=st.tuples(st.integers(0, 96), st.integers(0, 96)).map(sorted),
)
def test_any_range_survives_the_way_into_another_block_size(
    source: int, target: int, dtype: torch.dtype, bounds: list[int]
) -> None:
    start, end = bounds
    sent, received = random_cache(10, source, dtype, seed=1), random_cache(10, target, dtype, seed=2)
    before = received.clone()
    wire = torch.empty(2 * 2 * 3 * (end - start) * 8 * sent.element_size(), dtype=torch.uint8)
    gather_kv(sent, BLOCKS[source], start, end, wire)
    scatter_kv(received, BLOCKS[target], start, end, wire)
    for token in range(96):
        found = received[BLOCKS[target][token // target], :, :, :, token % target]
        origin, size, table = (
            (sent, source, BLOCKS[source]) if start <= token < end else (before, target, BLOCKS[target])
        )
        assert torch.equal(found, origin[table[token // size], :, :, :, token % size])
    unused = sorted(set(range(10)) - set(BLOCKS[target]))
    assert torch.equal(received[unused], before[unused])


def test_bytes_go_through_unchanged_even_where_they_are_nan() -> None:
    cache = torch.empty(2, 1, 2, 1, 16, 8)
    cache.view(torch.int32).random_(generator=torch.Generator().manual_seed(3))
    cache.view(torch.int32)[0, 0, 0, 0, 0, 0] = 0x7F80BEEF - 0  # a signalling NaN
    wire = torch.empty(2 * 32 * 8 * 4, dtype=torch.uint8)
    other = torch.zeros_like(cache)
    gather_kv(cache, [1, 0], 0, 32, wire)
    scatter_kv(other, [1, 0], 0, 32, wire)
    assert torch.equal(cache.view(torch.int32), other.view(torch.int32))


def test_an_unaligned_piece_of_a_staging_buffer_will_do() -> None:
    cache = random_cache(2, 16, torch.float32)
    staging = torch.zeros(2 * 2 * 3 * 4 * 8 * 4 + 3, dtype=torch.uint8)
    gather_kv(cache, [1], 2, 6, staging[3:])
    expected = cache[1, :, :, :, 2:6].contiguous().view(torch.uint8).flatten()
    assert torch.equal(staging[3:], expected)


def test_a_view_of_some_heads_is_a_cache_of_those_heads() -> None:
    cache, received = random_cache(4, 16, torch.bfloat16, seed=1), random_cache(4, 16, torch.bfloat16, seed=2)
    before = received.clone()
    wire = torch.empty(2 * 2 * 2 * 20 * 8 * 2, dtype=torch.uint8)
    gather_kv(cache[:, :, :, 1:3], [2, 0, 3], 10, 30, wire)
    scatter_kv(received[:, :, :, 0:2], [1, 2], 3, 23, wire)
    for token in range(20):
        there = received[[1, 2][(token + 3) // 16], :, :, :, (token + 3) % 16]
        assert torch.equal(there[:, :, 0:2], cache[[2, 0][(token + 10) // 16], :, :, 1:3, (token + 10) % 16])
    assert torch.equal(received[:, :, :, 2], before[:, :, :, 2])


@pytest.mark.parametrize("copy", [gather_kv, scatter_kv])
@pytest.mark.parametrize(("start", "end"), [(-1, 3), (5, 4), (0, 33), (40, 41)])
def test_a_range_outside_the_blocks_is_refused(copy: Any, start: int, end: int) -> None:
    with pytest.raises(ValueError, match="not within 2 blocks of 16"):
        copy(random_cache(4, 16, torch.float32), [0, 1], start, end, torch.empty(0, dtype=torch.uint8))


@pytest.mark.parametrize("copy", [gather_kv, scatter_kv])
@pytest.mark.parametrize(
    "buffer", [torch.empty(383, dtype=torch.uint8), torch.empty(384), torch.empty(2, 192, dtype=torch.uint8)]
)
def test_a_buffer_that_does_not_fit_is_refused(copy: Any, buffer: Tensor) -> None:
    with pytest.raises(ValueError, match="take 384 bytes"):
        copy(random_cache(4, 16, torch.float32), [0, 1], 15, 16, buffer)
