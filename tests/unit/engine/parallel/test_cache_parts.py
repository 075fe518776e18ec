"""KV between workers of any two widths, byte for byte, over real caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disagg.engine.cache_groups import LayerKv, layout_of
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.sharding.kv_routes import head_slices
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.messages import ONE_RANK, KvLayout, ParallelShape

CPU = torch.device("cpu")
LAYERS, DIM, NUM_BLOCKS = 2, 2, 8
TABLES = {16: [5, 0, 7, 2, 6, 1], 32: [4, 1, 3]}
"""96 tokens in scattered blocks."""


def layout(num_kv_heads: int) -> KvLayout:
    return KvLayout.dense(
        num_layers=LAYERS,
        num_kv_heads=num_kv_heads,
        head_dim=DIM,
        dtype="float32",
        bytes_per_token=2 * LAYERS * num_kv_heads * DIM * 4,
    )


def whole_cache(num_kv_heads: int, block_size: int) -> KvCache:
    """No two elements are equal."""
    cache = KvCache(layout(num_kv_heads), NUM_BLOCKS, block_size, CPU)
    cache.tensor_NL2KBD.copy_(torch.arange(cache.tensor_NL2KBD.numel()).view(cache.tensor_NL2KBD.shape))
    return cache


def caches_of_ranks(whole: KvCache, size: int) -> list[KvCache]:
    """Each holds its heads of the whole cache."""
    caches: list[KvCache] = []
    for rank in range(size):
        cache = KvCache(whole.layout, NUM_BLOCKS, whole.block_size, CPU, Shard(rank, size))
        heads = cache.shard.kv_heads(whole.layout.groups[0].num_heads)
        cache.tensor_NL2KBD.copy_(whole.tensor_NL2KBD[:, :, :, heads.start : heads.stop])
        caches.append(cache)
    return caches


def move(source: list[KvCache], target: list[KvCache], start: int, end: int) -> None:
    """As a transfer does: gather on every rank of P, each slice to its rank of D, scatter there."""
    heads = source[0].layout.groups[0].num_heads
    slices = head_slices(heads, len(source), len(target))
    head_bytes = source[0].layout.bytes_per_token // heads * (end - start)
    parts = [
        torch.empty(sum(e.num_heads for e in slices if e.sender == sender) * head_bytes, dtype=torch.uint8)
        for sender in range(len(source))
    ]
    arrived: list[list[Tensor]] = [[] for _ in target]
    for sender, (cache, part) in enumerate(zip(source, parts, strict=True)):
        checksums = cache.gather_part(TABLES[cache.block_size], start, end, part, ParallelShape(tp=len(target)))
        mine = [each for each in slices if each.sender == sender]
        pieces = torch.split(part, [each.num_heads * head_bytes for each in mine])
        assert checksums == [UNKEYED(piece) for piece in pieces]
        for each, piece in zip(mine, pieces, strict=True):
            arrived[each.receiver].append(piece)
    for cache, part_of_rank in zip(target, arrived, strict=True):
        part = torch.cat(part_of_rank)
        cache.scatter_part(TABLES[cache.block_size], start, end, part, ParallelShape(tp=len(source)))


def widths(num_kv_heads: int) -> st.SearchStrategy[int]:
    return st.sampled_from([tp for tp in range(1, 9) if not num_kv_heads % tp or not tp % num_kv_heads])


CASES = st.sampled_from([1, 2, 3, 4, 8]).flatmap(lambda heads: st.tuples(st.just(heads), widths(heads), widths(heads)))


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    case=CASES,
    sizes=st.tuples(st.sampled_from(sorted(TABLES)), st.sampled_from(sorted(TABLES))),
    bounds=st.tuples(st.integers(0, 96), st.integers(0, 96)).filter(lambda pair: pair[0] != pair[1]).map(sorted),
)
def test_every_rank_gets_its_heads_of_the_range_and_nothing_else(
    case: tuple[int, int, int], sizes: tuple[int, int], bounds: list[int]
) -> None:
    num_kv_heads, sender_tp, receiver_tp = case
    (sent_size, received_size), (start, end) = sizes, bounds
    whole = whole_cache(num_kv_heads, sent_size)
    empty = KvCache(whole.layout, NUM_BLOCKS, received_size, CPU)
    empty.tensor_NL2KBD.fill_(-1.0)
    target = caches_of_ranks(empty, receiver_tp)

    move(caches_of_ranks(whole, sender_tp), target, start, end)

    expected = empty.tensor_NL2KBD
    for token in range(start, end):
        origin = whole.tensor_NL2KBD[TABLES[sent_size][token // sent_size], :, :, :, token % sent_size]
        expected[TABLES[received_size][token // received_size], :, :, :, token % received_size] = origin
    for cache in target:
        heads = cache.shard.kv_heads(num_kv_heads)
        assert torch.equal(cache.tensor_NL2KBD, expected[:, :, :, heads.start : heads.stop])


@pytest.mark.parametrize(("sender_tp", "receiver_tp"), [(1, 2), (2, 4), (8, 1)])
def test_rows_of_8_bits_move_with_their_scales(sender_tp: int, receiver_tp: int) -> None:
    in_int8 = layout_of([LayerKv(0, 4, DIM, DIM)] * LAYERS, "int8", 1)
    whole, empty = (KvCache(in_int8, NUM_BLOCKS, block_size, CPU) for block_size in (16, 32))
    assert whole.tensor_NL2KBD.shape[-1] == DIM + 2
    whole.tensor_NL2KBD.random_(-128, 128)
    empty.tensor_NL2KBD.zero_()
    target = caches_of_ranks(empty, receiver_tp)
    move(caches_of_ranks(whole, sender_tp), target, 5, 90)
    for token in range(5, 90):
        origin = whole.tensor_NL2KBD[TABLES[16][token // 16], :, :, :, token % 16]
        empty.tensor_NL2KBD[TABLES[32][token // 32], :, :, :, token % 32] = origin
    for cache in target:
        heads = cache.shard.kv_heads(4)
        assert torch.equal(cache.tensor_NL2KBD, empty.tensor_NL2KBD[:, :, :, heads.start : heads.stop])


def test_parts_of_a_staging_buffer_are_slices_in_canonical_order() -> None:
    """Rank 1 of 3 has heads 2 and 3 of six, and sends one to each of two ranks."""
    whole = whole_cache(6, 16)
    (_, cache, _) = caches_of_ranks(whole, 3)
    part = torch.zeros(2 * 20 * 2 * LAYERS * DIM * 4 + 5, dtype=torch.uint8)
    cache.gather_part(TABLES[16], 10, 30, part, ParallelShape(tp=2))
    found = part[:-5].view(torch.float32).view(2, LAYERS, 2, 1, 20, DIM)
    for index, head in enumerate((2, 3)):
        for token in range(10, 30):
            origin = whole.tensor_NL2KBD[TABLES[16][token // 16], :, :, head, token % 16]
            assert torch.equal(found[index, :, :, 0, token - 10], origin)
    assert not part[-5:].any()


def test_what_moves_to_more_ranks_than_heads_is_sent_to_each() -> None:
    cache = whole_cache(2, 16)
    part = torch.empty(4 * 2 * LAYERS * DIM * 4 * 10, dtype=torch.uint8)
    checksums = cache.gather_part(TABLES[16], 0, 10, part, ParallelShape(tp=4))
    assert checksums[0] == checksums[1] != checksums[2] == checksums[3]


def test_a_rank_that_has_nothing_to_send_writes_nothing() -> None:
    idle = caches_of_ranks(whole_cache(2, 16), 4)[1]
    assert idle.gather_part(TABLES[16], 0, 96, torch.empty(0, dtype=torch.uint8), ONE_RANK) == []


def test_a_part_that_is_too_small_is_refused_before_a_byte_moves() -> None:
    cache = whole_cache(4, 16)
    before = cache.tensor_NL2KBD.clone()
    part = torch.zeros(10 * cache.layout.bytes_per_token - 1, dtype=torch.uint8)
    message = rf"tokens \[20, 30\) take {len(part) + 1} bytes; the buffer has {len(part)}"
    with pytest.raises(ValueError, match=message):
        cache.gather_part(TABLES[16], 20, 30, part, ParallelShape(tp=2))
    with pytest.raises(ValueError, match=message):
        cache.scatter_part(TABLES[16], 20, 30, part, ParallelShape(tp=2))
    assert not part.any()
    assert torch.equal(cache.tensor_NL2KBD, before)


def test_widths_that_do_not_go_with_the_heads_are_refused() -> None:
    cache = KvCache(layout(4), NUM_BLOCKS, 16, CPU, WHOLE)
    with pytest.raises(ValueError, match="4 cannot be divided among 3 ranks"):
        cache.gather_part(TABLES[16], 0, 1, torch.empty(1000, dtype=torch.uint8), ParallelShape(tp=3))
