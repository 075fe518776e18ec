"""KV blocks as numbers: what is found, held, cached, promised, evicted."""

from __future__ import annotations

from disagg.proto.ids import AttemptKey, BlockHash, RequestId
from disagg.proto.messages import BlocksRemoved, BlocksStored
from disagg.simulator.fast.block_set import BlockSet

A, B, C, D = (BlockHash(bytes([n]) * 16) for n in range(4))


def filled(blocks: BlockSet, keys: list[BlockHash], sizes: list[int]) -> None:
    """A sequence computes these pieces and ends."""
    blocks.num_own += sum(sizes)
    blocks.make_room()
    blocks.publish(keys, sizes)
    blocks.release(keys, sizes, 0)


def test_what_was_computed_is_found_and_held_by_several() -> None:
    blocks = BlockSet(10, 16)
    filled(blocks, [A, B], [2, 3])
    assert blocks.match([A, B, C], [2, 5, 6], 6) == (2, 5)
    assert blocks.match([A, C], [2, 5], 6) == (1, 2)
    assert blocks.match([C], [2], 6) == (0, 0)
    assert (blocks.num_cached, blocks.num_available) == (5, 10)
    blocks.lock([A, B])
    blocks.lock([A])
    assert (blocks.num_held, blocks.num_cached, blocks.num_available) == (5, 0, 5)
    blocks.release([A], [2], 0)
    assert blocks.num_held == 5
    blocks.release([A, B], [2, 3], 0)
    assert (blocks.num_held, blocks.num_cached) == (0, 5)
    assert blocks.check_integrity() == []


def test_a_match_is_cut_to_what_may_be_used_and_to_whole_blocks() -> None:
    blocks = BlockSet(10, 64)
    filled(blocks, [A, B], [6, 6])
    assert blocks.match([A, B], [6, 12], 12) == (2, 12)
    assert blocks.match([A, B], [6, 12], 11) == (2, 8)
    assert blocks.match([A, B], [6, 12], 7) == (1, 4)
    assert blocks.match([A, B], [6, 12], 3) == (0, 0)


def test_the_end_of_the_chain_that_was_given_back_first_goes_first() -> None:
    blocks = BlockSet(6, 16)
    filled(blocks, [A, B], [1, 2])
    filled(blocks, [C], [2])
    blocks.drain_events()
    blocks.num_own += 2  # one unit is free, one is needed: B, two units, goes
    blocks.make_room()
    assert blocks.drain_events() == (BlocksRemoved(hashes=(B,)),)
    assert blocks.match([A, B], [1, 3], 3) == (1, 1)
    assert blocks.num_cached == 3


def test_the_router_hears_of_changes_in_order_and_of_known_content_once() -> None:
    blocks = BlockSet(4, 16)
    filled(blocks, [A], [2])
    filled(blocks, [A], [2])
    filled(blocks, [B], [1])
    filled(blocks, [C], [3])
    assert blocks.drain_events() == (
        BlocksStored(hashes=(A, B)),
        BlocksRemoved(hashes=(A,)),
        BlocksStored(hashes=(C,)),
    )
    assert blocks.drain_events() == ()


def test_content_that_is_there_replaces_the_copy() -> None:
    blocks = BlockSet(8, 16)
    blocks.num_own = 4  # two sequences compute the same
    blocks.publish([A], [2])
    blocks.publish([A], [2])
    assert (blocks.num_own, blocks.num_held) == (0, 2)


def test_what_nobody_can_find_is_cached_without_a_word() -> None:
    blocks = BlockSet(3, 16)
    name = AttemptKey(RequestId("r"), 0)
    blocks.num_own = 2
    blocks.publish([name], [2])
    blocks.release([name], [2], 0)
    assert (blocks.num_cached, blocks.drain_events()) == (2, ())
    blocks.num_own = 3
    blocks.make_room()
    assert (blocks.num_cached, blocks.drain_events()) == (0, ())


def test_sequences_take_whole_blocks() -> None:
    blocks = BlockSet(4, 64)
    assert [blocks.units_for(tokens) for tokens in (0, 1, 64, 65)] == [0, 4, 4, 8]


def test_copies_go_first_until_a_sequence_was_computed_behind_them() -> None:
    blocks = BlockSet(6, 16)
    filled(blocks, [A], [2])
    for key in B, C:
        blocks.num_own += 2
        blocks.publish([key], [2], is_copy=True)
        blocks.release([key], [2], 0, is_copy=True)
    assert blocks.num_copied == 4
    blocks.lock([B])
    blocks.release([B], [2], 0)
    assert blocks.num_copied == 2
    blocks.drain_events()
    blocks.num_own += 4
    blocks.make_room()
    assert blocks.drain_events() == (BlocksRemoved(hashes=(C, A)),)
    assert blocks.check_integrity() == []
