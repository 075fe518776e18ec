"""Copying ranges of tokens out of the paged cache and into another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disagg.kernels.reference import gather_kv, scatter_kv

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


SCATTERED = [(16, [5, 0, 7, 2, 9, 1]), (32, [4, 1, 3]), (48, [2, 0])]
IN_RUNS = [(16, [6, 7, 8, 1, 2, 0]), (32, [3, 4, 5]), (48, [0, 1])]
"""Block sizes, and blocks of 96 tokens."""


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    source=st.sampled_from(SCATTERED + IN_RUNS),
    target=st.sampled_from(SCATTERED + IN_RUNS),
    dtype=st.sampled_from(DTYPES),
    bounds=st.tuples(st.integers(0, 96), st.integers(0, 96)).map(sorted),
)
def test_any_range_survives_the_way_into_another_block_size(
    source: tuple[int, list[int]], target: tuple[int, list[int]], dtype: torch.dtype, bounds: list[int]
) -> None:
    start, end = bounds
    (source_size, source_table), (target_size, target_table) = source, target
    sent, received = random_cache(10, source_size, dtype, seed=1), random_cache(10, target_size, dtype, seed=2)
    received = received.permute(1, 2, 0, 3, 4, 5).contiguous().permute(2, 0, 1, 3, 4, 5)  # as `KvCache` has it
    before = received.clone()
    wire = torch.empty(2 * 2 * 3 * (end - start) * 8 * sent.element_size(), dtype=torch.uint8)
    gather_kv(sent, source_table, start, end, wire)
    scatter_kv(received, target_table, start, end, wire)
    for token in range(96):
        found = received[target_table[token // target_size], :, :, :, token % target_size]
        origin, size, table = (
            (sent, source_size, source_table) if start <= token < end else (before, target_size, target_table)
        )
        assert torch.equal(found, origin[table[token // size], :, :, :, token % size])
    unused = sorted(set(range(10)) - set(target_table))
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
@pytest.mark.parametrize(("table", "blocks"), [([0, 2, 3, 4], r"\[2, 5\)"), ([-1], r"\[-1, 0\)")])
def test_a_block_outside_the_cache_is_refused(copy: Any, table: list[int], blocks: str) -> None:
    buffer = torch.empty(len(table) * 16 * 2 * 2 * 3 * 8 * 4, dtype=torch.uint8)
    with pytest.raises(IndexError, match=f"blocks {blocks} are not within a cache of 4"):
        copy(random_cache(4, 16, torch.float32), table, 0, len(table) * 16, buffer)


@pytest.mark.parametrize("copy", [gather_kv, scatter_kv])
@pytest.mark.parametrize(
    "buffer", [torch.empty(383, dtype=torch.uint8), torch.empty(384), torch.empty(2, 192, dtype=torch.uint8)]
)
def test_a_buffer_that_does_not_fit_is_refused(copy: Any, buffer: Tensor) -> None:
    with pytest.raises(ValueError, match="take 384 bytes"):
        copy(random_cache(4, 16, torch.float32), [0, 1], 15, 16, buffer)
