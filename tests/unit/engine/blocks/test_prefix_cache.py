from __future__ import annotations

import pytest

from disagg.engine.blocks.prefix_cache import PrefixCache
from disagg.proto.ids import BlockHash
from disagg.proto.messages import BlocksRemoved, BlocksSnapshot, BlocksStored


def hashes(*names: str) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(name.encode()) for name in names)


A, B, C = hashes("a", "b", "c")


def test_match_is_the_longest_published_prefix() -> None:
    cache = PrefixCache()
    for block, block_hash in [(5, A), (3, C)]:
        assert cache.publish(block, [block_hash]) == block
    assert cache.match([A, B, C]) == [5]
    assert cache.publish(4, [B]) == 4
    assert cache.match([A, B, C]) == [5, 4, 3]
    assert cache.match([B]) == [4]
    assert cache.match([]) == []


def test_a_second_block_of_the_same_content_is_not_published() -> None:
    cache = PrefixCache()
    assert cache.publish(0, [A]) == 0
    assert cache.publish(1, [A]) == 0
    assert cache.match([A]) == [0]
    assert (cache.is_published(0), cache.is_published(1)) == (True, False)
    assert cache.drain_events() == (BlocksStored(hashes=(A,)),)


def test_a_published_hash_is_immutable() -> None:
    cache = PrefixCache()
    cache.publish(0, [A])
    with pytest.raises(AssertionError, match="already published"):
        cache.publish(0, [B])


def test_blocks_are_evicted_in_the_order_in_which_they_became_evictable() -> None:
    cache = PrefixCache()
    for block, block_hash in enumerate((A, B, C)):
        cache.publish(block, [block_hash])
    for block in (2, 0, 1):
        cache.add_evictable(block)
    cache.remove_evictable(2)
    cache.add_evictable(2)
    assert cache.num_evictable == 3
    assert [cache.evict() for _ in range(3)] == [0, 1, 2]
    assert cache.num_evictable == 0
    assert cache.match([A]) == []
    assert cache.check_integrity() == []


def test_events_come_in_order_merged_and_once() -> None:
    cache = PrefixCache()
    cache.publish(0, [A])
    cache.publish(1, [B])
    cache.add_evictable(0)
    cache.evict()
    cache.publish(0, [C])
    assert cache.snapshot() == BlocksSnapshot(hashes=(B, C))
    assert cache.drain_events() == (
        BlocksStored(hashes=(A, B)),
        BlocksRemoved(hashes=(A,)),
        BlocksStored(hashes=(C,)),
    )
    assert cache.drain_events() == ()


def test_large_blocks_announce_every_16_token_hash_until_the_last_holder_goes() -> None:
    first, left, right = hashes("first", "left", "right")
    cache = PrefixCache()
    assert cache.publish(0, [first, left]) == 0
    assert cache.publish(1, [first, right]) == 1
    assert cache.match([left]) == [0]
    assert cache.match([first]) == []
    assert cache.drain_events() == (BlocksStored(hashes=(first, left, right)),)
    for block in (0, 1):
        cache.add_evictable(block)
    cache.evict()
    assert cache.drain_events() == (BlocksRemoved(hashes=(left,)),)
    assert cache.snapshot() == BlocksSnapshot(hashes=(first, right))
    cache.evict()
    assert cache.drain_events() == (BlocksRemoved(hashes=(first, right)),)
    assert cache.snapshot() == BlocksSnapshot(hashes=())
    assert cache.check_integrity() == []


def test_integrity_findings() -> None:
    cache = PrefixCache()
    cache.publish(0, [A])
    cache.evictable.add(7, b"")
    cache._block_of[B] = 3
    cache._announced[C] = 1
    assert cache.check_integrity() == [
        "prefix cache: hash index and block index differ",
        "prefix cache: announced hashes are not those of the published blocks",
        "block 7 is evictable and has no hash",
    ]
