"""KV between workers of any stages and widths, byte for byte, over real caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from disagg.engine.cache_groups import LayerKv, layout_of
from disagg.engine.kv_transfer.transport import UNKEYED
from disagg.engine.kv_transfer.transports.digest import digest
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.runner.model.kv_digests import DigestSums
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import ONE_RANK, KvLayout, ParallelShape
from tests.support.rank_connections import carry

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_TOKENS = 8, 96
TABLES = {16: [5, 0, 7, 2, 6, 1], 32: [4, 1, 3]}
"""`NUM_TOKENS` tokens in scattered blocks."""

FULL, WINDOW, LATENT = LayerKv(0, 2, 4, 4), LayerKv(32, 2, 4, 4), LayerKv(0, 1, 6, 0, 4)
LAYOUTS = {
    "dense": layout_of([FULL] * 4, "bfloat16", 2),
    "windows": layout_of([WINDOW, FULL, WINDOW, WINDOW, FULL], "bfloat16", 2),
    "latent": layout_of([LATENT] * 4, "bfloat16", 2),
    "int8": layout_of([WINDOW, FULL, FULL, FULL], "int8", 1),
}


def shape(tp: int, *stage_ends: int) -> ParallelShape:
    return ParallelShape(tp=tp, stage_ends=stage_ends)


def raw(cache: KvCache, group: int) -> Tensor:
    """The bytes of the cache of a group, `[num_blocks, num_layers, planes, heads, block_size, row bytes]`."""
    return cache._groups_NL2KBD[group].view(torch.uint8)


def caches(layout: KvLayout, of: ParallelShape, block_size: int = 16) -> list[KvCache]:
    """One for each rank of a worker."""
    pools = [NUM_BLOCKS] * (len(layout.groups) - 1)
    return [
        KvCache(
            layout,
            NUM_BLOCKS,
            block_size,
            CPU,
            Shard.of_number(number, of.tp, of.pp),
            window_blocks=pools,
            stage_ends=of.stage_ends,
        )
        for number in range(of.num_ranks)
    ]


def noise(layout: KvLayout, block_size: int = 16) -> KvCache:
    """A whole cache of random bytes."""
    (cache,) = caches(layout, ONE_RANK, block_size)
    for group in range(len(layout.groups)):
        raw(cache, group).random_(0, 256)
    return cache


def share(cache: KvCache, whole: KvCache, group: int) -> Tensor:
    """What a rank has of a whole cache."""
    layers = list(whole.layout.groups[group].layers)
    mine = [layers.index(layer) for layer in cache.held[group]]
    heads = cache.shard.kv_heads(whole.layout.groups[group].num_heads)
    return raw(whole, group)[:, mine][:, :, :, heads.start : heads.stop]


def move(source: list[KvCache], target: list[KvCache], group: int, start: int, end: int) -> int:
    """As a transfer does: gather on every rank of P that sends, each slice to its rank of D, scatter there; the bytes
    that went between ranks."""
    moved = plan_pair(source[0].layout, source[0].shape, target[0].shape).groups[group]
    nbytes = moved.token_bytes * (end - start)
    element_bytes = moved.element_bytes(nbytes)

    def parts(side: str, of: list[KvCache]) -> list[Tensor]:
        counts = [
            sum([each.num_elements for each in moved.slices if getattr(each, side) == cache.shard.number])
            for cache in of
        ]
        return [torch.empty(count * element_bytes, dtype=torch.uint8) for count in counts]

    sent, received = parts("sender", source), parts("receiver", target)
    checksums = {
        rank: source[rank].gather_part(
            TABLES[source[rank].block_size], start, end, sent[rank], target[0].shape, group=group
        )
        for rank in moved.ranks("sender")
    }
    slices = carry(moved, nbytes, sent.__getitem__, received.__getitem__)
    assert moved.in_order("sender", checksums) == [UNKEYED(each) for each in slices]
    for rank in moved.ranks("receiver"):
        cache = target[rank]
        sums = cache.scatter_part(
            TABLES[cache.block_size], start, end, received[rank], source[0].shape, UNKEYED, group=group
        )
        assert isinstance(sums, DigestSums)
        mine = [piece for each, piece in zip(moved.slices, slices, strict=True) if each.receiver == rank]
        assert sums.digests(UNKEYED) == [digest(piece, UNKEYED) for piece in mine]
    assert sum([each.numel() for each in slices]) == nbytes
    return nbytes


def check(kind: str, sender: ParallelShape, receiver: ParallelShape, start: int, end: int) -> None:
    layout = LAYOUTS[kind]
    whole, empty = noise(layout, 16), noise(layout, 32)
    source, target = caches(layout, sender, 16), caches(layout, receiver, 32)
    for group in range(len(layout.groups)):
        for ranks, origin in ((source, whole), (target, empty)):
            for cache in ranks:
                raw(cache, group).copy_(share(cache, origin, group))
        copies = max(1, receiver.tp // layout.groups[group].num_heads)
        assert move(source, target, group, start, end) == copies * layout.groups[group].bytes_per_token * (end - start)
        for token in range(start, end):
            origin_LPHR = raw(whole, group)[TABLES[16][token // 16], :, :, :, token % 16]
            raw(empty, group)[TABLES[32][token // 32], :, :, :, token % 32] = origin_LPHR
        for cache in target:
            assert torch.equal(raw(cache, group), share(cache, empty, group))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [((1, 1), (2, 1)), ((2, 2), (1, 2)), ((4, 1), (2, 2)), ((2, 2), (2, 2)), ((1, 4), (3, 1)), ((3, 2), (2, 4))],
)
def test_pairs_of_stages_and_widths(kind: str, sender: tuple[int, int], receiver: tuple[int, int]) -> None:
    """(stages, ranks of each); stages as equal as can be."""
    num_layers = 1 + max(group.layers[-1] for group in LAYOUTS[kind].groups)

    def even(pp: int, tp: int) -> ParallelShape:
        return shape(tp, *(num_layers * (stage + 1) // pp for stage in range(pp))) if pp > 1 else shape(tp)

    check(kind, even(*sender), even(*receiver), 5, 90)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, ParallelShape, ParallelShape]:
    kind = draw(st.sampled_from(sorted(LAYOUTS)))
    num_layers = 1 + max(group.layers[-1] for group in LAYOUTS[kind].groups)

    def drawn() -> ParallelShape:
        ends = draw(st.sets(st.integers(1, num_layers - 1), max_size=3))
        return shape(draw(st.sampled_from([1, 2, 4])), *([*sorted(ends), num_layers] if ends else ()))

    return kind, drawn(), drawn()


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    case=shapes(),
    bounds=st.tuples(st.integers(0, 96), st.integers(0, 96)).filter(lambda pair: pair[0] != pair[1]).map(sorted),
)
def test_every_rank_gets_its_layers_and_heads_of_the_range_and_nothing_else(
    case: tuple[str, ParallelShape, ParallelShape], bounds: list[int]
) -> None:
    check(*case, *bounds)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_stage_holds_what_another_one_has(kind: str) -> None:
    """Bytes of the caches: all stages together hold what one rank does, and each group of each only once."""
    layout = LAYOUTS[kind]
    (whole,) = caches(layout, ONE_RANK)
    stages = caches(layout, shape(1, 1, 2, whole.layout.groups[0].layers[-1] + 1))
    assert sum([cache.nbytes for cache in stages]) == whole.nbytes
    for group, each in enumerate(layout.groups):
        assert [layer for cache in stages for layer in cache.held[group]] == list(each.layers)
        layer_bytes = raw(whole, group).numel() // len(each.layers)
        assert [raw(cache, group).numel() for cache in stages] == [
            layer_bytes * len(cache.held[group]) for cache in stages
        ]
    assert sum([size.num_bytes for cache in stages for size in cache.buffers]) == whole.nbytes
    assert all(size.num_bytes for cache in stages for size in cache.buffers)


def test_a_stage_knows_its_layers_by_the_models_numbers() -> None:
    _, second = caches(LAYOUTS["windows"], shape(1, 2, 5))
    assert second.held == ((4,), (2, 3))
    assert [second.group_of(layer) for layer in (2, 3, 4)] == [1, 1, 0]
    assert second.layer(3)[0].data_ptr() == second._groups_NL2KBD[1][:, 1, 0].data_ptr()


def test_one_stage_of_one_rank_sends_the_bytes_that_it_always_sent() -> None:
    """Within a payload: layer, K or V, head, token, dim."""
    whole = noise(LAYOUTS["dense"])
    out = torch.empty(20 * whole.layout.bytes_per_token, dtype=torch.uint8)
    whole.gather_part(TABLES[16], 10, 30, out, ONE_RANK)
    tokens = [raw(whole, 0)[TABLES[16][token // 16], :, :, :, token % 16] for token in range(10, 30)]
    assert torch.equal(out, torch.stack(tokens, dim=3).flatten())
