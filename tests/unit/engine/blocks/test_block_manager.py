from __future__ import annotations

import random

import pytest

from disagg.engine.blocks.block_manager import LEAST_EXTENTS, BlockManager
from disagg.proto.block_hash import chain_hashes
from disagg.proto.ids import BlockHash
from disagg.proto.messages import BlocksRemoved, BlocksStored
from disagg.proto.token_ids import pack_token_ids
from tests.support.engine import ROOT, make_prompt

HASHES = chain_hashes(ROOT, pack_token_ids(make_prompt(160)))


def counts(blocks: BlockManager) -> tuple[int, int, int, int, int]:
    """free, cached, active, reserved, available."""
    return blocks.num_free, blocks.num_cached, blocks.num_active, blocks.num_reserved, blocks.num_available


def cached_chain(blocks: BlockManager, num_blocks: int) -> list[int]:
    """A published and released chain of `num_blocks` blocks of 16 tokens."""
    table = blocks.allocate(num_blocks, reserved=False)
    for block, block_hash in zip(table, HASHES, strict=False):
        assert blocks.publish(block, [block_hash]) == block
    blocks.release(table)
    return table


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "watermark", "message"),
    [
        (0, 16, 0, "at least one block"),
        (4, 24, 0, "multiple of 16"),
        (4, 0, 0, "multiple of 16"),
        (4, 16, 4, "watermark"),
    ],
)
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int, watermark: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockManager(num_blocks, block_size, watermark)


def test_allocate_and_release_of_unpublished_blocks() -> None:
    blocks = BlockManager(10, 16)
    table = blocks.allocate(4, reserved=False)
    assert table == [0, 1, 2, 3]
    assert counts(blocks) == (6, 0, 4, 0, 6)
    assert blocks.check_integrity([table], 0) == []
    blocks.release(table)
    assert counts(blocks) == (10, 0, 0, 0, 10)
    assert blocks.check_integrity([], 0) == []


def test_sequences_that_grow_in_turns_have_their_blocks_in_rows() -> None:
    blocks = BlockManager(8 * LEAST_EXTENTS, 16)
    tables = [blocks.allocate(3, reserved=False) for _ in range(2)]
    for _ in range(7):
        for table in tables:
            table += blocks.allocate(1, reserved=False, after=table[-1])
    assert tables == [[*range(8), 16, 17], [*range(8, 16), 24, 25]]
    assert (blocks.num_free, blocks.num_fragmented) == (8 * LEAST_EXTENTS - 20, 12)
    assert blocks.check_integrity(tables, 0) == []


def test_a_new_extent_is_made_of_the_oldest_cached_blocks() -> None:
    blocks = BlockManager(2 * LEAST_EXTENTS, 16)  # extents of two
    table = blocks.allocate(blocks.num_blocks, reserved=False)
    chains = [table[:3], table[3:7], table[7:]]
    hashes = iter(chain_hashes(ROOT, pack_token_ids(make_prompt(16 * len(table)))))
    for chain in chains:
        for block in chain:
            blocks.publish(block, [next(hashes)])
    for chain in chains[1], chains[0]:
        blocks.release(chain)
    assert blocks.allocate(1, reserved=False, after=table[-1]) == [4]  # 6 was given up before it, and 5 with it
    assert (blocks.num_free, blocks.num_cached) == (2, 4)
    assert blocks.allocate(3, reserved=False, after=4) == [5, 2, 3]
    assert (blocks.num_free, blocks.num_cached) == (1, 2)
    assert blocks.check_integrity([chains[2], [4, 5, 2, 3]], 0) == []


def test_no_prefix_is_given_up_where_that_makes_no_extent() -> None:
    blocks = BlockManager(2 * LEAST_EXTENTS, 16)
    table = blocks.allocate(blocks.num_blocks, reserved=False)
    for block, block_hash in zip(table[1:20:2], HASHES, strict=True):
        blocks.publish(block, [block_hash])
        blocks.release([block])
    assert blocks.allocate(2, reserved=False) == [1, 3]  # nothing else was free
    blocks.release([500])
    assert (blocks.num_free, blocks.num_fragmented, blocks.num_cached) == (1, 1, 8)
    assert blocks.allocate(1, reserved=False) == [500]
    assert blocks.num_cached == 8


def test_blocks_between_those_of_others_will_do_where_no_extent_is_whole() -> None:
    blocks = BlockManager(2 * LEAST_EXTENTS, 16)
    table = blocks.allocate(blocks.num_blocks, reserved=False)
    for block in table[1::2]:
        blocks.release([block])
    assert blocks.allocate(3, reserved=False, after=table[0]) == [1, 3, 5]


def test_a_published_block_stays_cached_and_is_found_and_locked() -> None:
    blocks = BlockManager(10, 16)
    table = cached_chain(blocks, 3)
    assert counts(blocks) == (7, 3, 0, 0, 10)
    assert blocks.match_prefix(HASHES, 160) == table
    assert blocks.match_prefix(HASHES, 47) == table[:2]
    assert blocks.match_prefix(HASHES, 15) == []
    assert blocks.available_after_lock(table[:2]) == 8
    blocks.lock(table[:2])
    blocks.lock(table[:1])
    assert counts(blocks) == (7, 1, 2, 0, 8)
    assert blocks.available_after_lock(table[:2]) == 8
    assert blocks.check_integrity([table[:2], table[:1]], 0) == []
    blocks.release(table[:2])
    assert counts(blocks) == (7, 2, 1, 0, 9)


def test_free_blocks_go_before_cached_ones_and_the_tail_of_a_chain_before_its_head() -> None:
    blocks = BlockManager(5, 16)
    chain = cached_chain(blocks, 3)
    blocks.prefix.drain_events()
    assert blocks.allocate(4, reserved=False) == [3, 4, chain[2], chain[1]]
    assert blocks.prefix.drain_events() == (BlocksRemoved(hashes=(HASHES[2], HASHES[1])),)
    assert blocks.match_prefix(HASHES, 160) == chain[:1]


def test_a_hit_renews_a_chain() -> None:
    blocks = BlockManager(4, 16)
    chain = cached_chain(blocks, 2)
    other = blocks.allocate(2, reserved=False)
    other_hashes = chain_hashes(ROOT, pack_token_ids(make_prompt(32, seed=1)))
    for block, block_hash in zip(other, other_hashes, strict=True):
        blocks.publish(block, [block_hash])
    blocks.release(other)
    blocks.lock(chain)
    blocks.release(chain)
    assert blocks.allocate(3, reserved=False) == [other[1], other[0], chain[1]]


def test_reserved_blocks_are_counted_and_not_chosen() -> None:
    blocks = BlockManager(10, 16)
    cached_chain(blocks, 3)
    blocks.reserve(8)
    assert counts(blocks) == (7, 3, 0, 8, 2)
    blocks.allocate(2, reserved=False)
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 available"):
        blocks.allocate(1, reserved=False)
    with pytest.raises(AssertionError, match="1 blocks to reserve, 0 available"):
        blocks.reserve(1)
    table = blocks.allocate(8, reserved=True)
    assert len(table) == 8
    assert counts(blocks) == (0, 0, 10, 0, 0)


def test_a_locked_cached_block_no_longer_backs_a_promise() -> None:
    blocks = BlockManager(4, 16)
    chain = cached_chain(blocks, 3)
    blocks.reserve(2)
    assert blocks.available_after_lock(chain) == -1
    assert blocks.available_after_lock(chain[:2]) == 0


def test_a_second_copy_makes_way_for_the_published_block() -> None:
    blocks = BlockManager(4, 16)
    first, second = blocks.allocate(2, reserved=False)
    assert blocks.publish(first, HASHES[:1]) == first
    assert blocks.publish(second, HASHES[:1]) == first
    assert counts(blocks) == (3, 0, 1, 0, 3)
    assert blocks.check_integrity([[first], [first]], 0) == []


def test_a_promise_stays_good_when_a_copy_makes_way_for_a_cached_block() -> None:
    blocks = BlockManager(2, 16)
    (first,) = cached_chain(blocks, 1)
    (second,) = blocks.allocate(1, reserved=False)
    blocks.reserve(1)
    assert counts(blocks) == (0, 1, 1, 1, 0)
    assert blocks.publish(second, HASHES[:1]) == first
    assert counts(blocks) == (1, 0, 1, 1, 0)
    assert blocks.allocate(1, reserved=True) == [second]
    assert blocks.check_integrity([[first], [second]], 0) == []


def test_writable_means_held_once_and_unpublished() -> None:
    blocks = BlockManager(3, 16)
    table = blocks.allocate(2, reserved=False)
    blocks.publish(table[0], HASHES[:1])
    assert [blocks.is_writable(block) for block in (*table, 2)] == [False, True, False]


def test_blocks_of_32_tokens_are_keyed_by_their_last_hash() -> None:
    blocks = BlockManager(4, 32)
    table = blocks.allocate(2, reserved=False)
    assert [blocks.publish(table[0], HASHES[0:2]), blocks.publish(table[1], HASHES[2:4])] == table
    assert blocks.match_prefix(HASHES, 64) == table
    assert blocks.match_prefix(HASHES, 63) == table[:1]
    assert blocks.match_prefix(HASHES[:3], 64) == table[:1]
    assert blocks.prefix.drain_events() == (BlocksStored(hashes=tuple(HASHES[:4])),)


def test_integrity_findings() -> None:
    blocks = BlockManager(3, 16)
    table = blocks.allocate(1, reserved=False)
    blocks.reserve(1)
    assert blocks.check_integrity([], 0) == [
        "block 0: 1 references counted, 0 tables list it",
        "1 blocks reserved, sequences have 0",
    ]
    assert [blocks._free.take(), blocks._free.take()] == [1, 2]
    blocks._free.free(1)
    blocks._free.free(0)
    assert blocks.check_integrity([table], 1) == ["block 0 is free and active", "block 2 is lost"]
    assert blocks._free.take() == 0
    blocks._free.free(2)
    blocks._num_reserved = 3
    assert blocks.check_integrity([table], 3) == ["3 blocks reserved, 2 to be had"]


@pytest.mark.parametrize("seed", range(4))
def test_a_block_leaves_after_its_children_whoever_had_them_as_copies(seed: int) -> None:
    """Sequences with common beginnings, computed here or elsewhere, in a cache that is too small for all of them."""
    random_, blocks = random.Random(seed), BlockManager(24, 16)
    held: list[tuple[list[int], bool]] = []
    there: set[BlockHash] = set()
    chains = [
        chain_hashes(ROOT, pack_token_ids([*[7] * (16 * common), *[chain] * (16 * (8 - common))]))
        for chain, common in enumerate((0, 1, 1, 3, 3, 5))
    ]
    for _ in range(2000):
        if held and random_.random() < 0.5:
            table, is_copy = held.pop(random_.randrange(len(held)))
            blocks.release(table, is_copy=is_copy)
        else:
            chain, is_copy = random_.choice(chains)[: random_.randint(1, 8)], random_.random() < 0.5
            table = blocks.match_prefix(chain, 16 * len(chain))
            if len(chain) - len(table) <= blocks.available_after_lock(table):
                blocks.lock(table)
                num_matched = len(table)
                table = [*table, *blocks.allocate(len(chain) - num_matched, reserved=False)]
                for index in range(num_matched, len(chain)):
                    table[index] = blocks.publish(table[index], [chain[index]], is_copy=is_copy)
                held.append((table, is_copy))
        for event in blocks.prefix.drain_events():
            there = there - {*event.hashes} if isinstance(event, BlocksRemoved) else there | {*event.hashes}
        for chain in chains:
            found = [block_hash in there for block_hash in chain]
            assert found == sorted(found, reverse=True), "a block is there without the one before it"
    assert blocks.check_integrity([table for table, _ in held], 0) == []


def test_copies_go_first_until_a_sequence_was_computed_behind_them() -> None:
    blocks = BlockManager(6, 16)
    chains = [chain_hashes(ROOT, pack_token_ids([seed] * 32)) for seed in range(3)]
    for chain, is_copy in zip(chains, (False, True, True), strict=True):
        table = blocks.allocate(2, reserved=False)
        for block, block_hash in zip(table, chain, strict=True):
            blocks.publish(block, [block_hash], is_copy=is_copy)
        blocks.release(table, is_copy=is_copy)
    table = blocks.match_prefix(chains[1], 32)
    blocks.lock(table)
    blocks.release(table)  # a prompt that was computed here began with it
    assert blocks.prefix.num_copies == 2
    new = blocks.allocate(4, reserved=False)
    assert [len(blocks.match_prefix(chain, 32)) for chain in chains] == [0, 2, 0]
    assert blocks.check_integrity([new], 0) == []
