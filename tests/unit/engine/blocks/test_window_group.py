"""Prefixes that all windows can resume, and what a window promises to sequences."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest
from typing_extensions import override

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.blocks.prefix_cache import PrefixCache
from disagg.engine.blocks.window_group import WindowGroup, resumable_end
from disagg.proto.ids import BlockHash
from disagg.proto.messages import CacheGroup

KEYS = [BlockHash(number.to_bytes(2, "big")) for number in range(200)]


def group_of(window: int, num_blocks: int = 300, step_tokens: int = 48) -> WindowGroup:
    group = CacheGroup(
        kind="window", layers=(0,), num_heads=1, key_dim=1, value_dim=1, dtype="fake", bytes_per_token=8, window=window
    )
    return WindowGroup(1, group, BlockManager(num_blocks, 16, announces=False), step_tokens)


def window_without(missing: Collection[int], num_window_blocks: int) -> WindowGroup:
    """A window of so many blocks whose pool has those of the chain, but for the missing ones."""
    group = group_of(16 * num_window_blocks)
    numbers = [number for number in range(len(KEYS)) if number not in missing]
    for number, block in zip(numbers, group.blocks.allocate(len(numbers), reserved=False), strict=True):
        group.blocks.publish(block, [KEYS[number]])
    return group


def by_hand(windows: list[WindowGroup], end: int) -> int:
    """What `resumable_end` finds, by looking at every prefix."""
    for each in range(end, 0, -1):
        needed = [(w, number) for w in windows for number in range(max(0, each - w.num_window_blocks), each)]
        if all(w.blocks.prefix.block_of(KEYS[number]) is not None for w, number in needed):
            return each
    return 0


def test_the_longest_prefix_that_all_windows_have() -> None:
    draw = random.Random(1)
    for _ in range(200):
        missing = [{draw.randrange(40) for _ in range(draw.randrange(8))} for _ in range(3)]
        windows = [window_without(numbers, draw.randint(1, 9)) for numbers in missing]
        assert resumable_end(windows, KEYS, 40) == by_hand(windows, 40)


class CountingPrefixes(PrefixCache):
    """Notes what is looked for."""

    def __init__(self) -> None:
        super().__init__(announces=False)
        self.looks: list[BlockHash] = []

    @override
    def block_of(self, key_hash: BlockHash) -> int | None:
        self.looks.append(key_hash)
        return super().block_of(key_hash)


def test_each_block_is_looked_for_once() -> None:
    """A narrow window lacks all blocks, and a wide one none."""
    narrow, wide = CountingPrefixes(), CountingPrefixes()
    for number, key in enumerate(KEYS):
        wide.publish(number, [key])
    windows = [group_of(1600), group_of(16)]
    windows[0].blocks.prefix, windows[1].blocks.prefix = wide, narrow
    assert resumable_end(windows, KEYS, 200) == 0
    for prefixes in (narrow, wide):
        assert len(prefixes.looks) == len(set(prefixes.looks)) == 200


class TestPromises:
    """A window of 40 tokens takes five blocks of a sequence; a step takes three of the twelve."""

    @pytest.mark.parametrize(("num_tokens", "most"), [(1, 1), (16, 1), (17, 2), (64, 4), (65, 5), (4000, 5)])
    def test_no_more_than_the_tokens_fill(self, num_tokens: int, most: int) -> None:
        assert group_of(40).most_for(num_tokens) == most

    def test_they_grow_while_there_is_room(self) -> None:
        group = group_of(40, 12)
        short, other = (group.admit((), 0, 0, 2) for _ in range(2))
        assert (group.num_available, group.share_of(90)) == (5, 40)
        assert group.has_room(short, 4000, num_left=2)
        assert not group.has_room(short, 4000, num_left=3)
        group.extend(short, 100)
        assert (short.num_promised, group.num_available) == (5, 2)
        assert [group.has_room(other, num_tokens) for num_tokens in (32, 64, 65)] == [True, True, False]
        assert group.has_room(other, 32, num_left=100)
        group.leave(short, 3)
        group.free(short)
        assert group.num_available == 7
        assert group.check_integrity([other]) == []

    def test_more_than_the_pool_has_is_never_promised(self) -> None:
        group = group_of(40, 12)
        first, second = (group.admit((), 0, 0, 4) for _ in range(2))
        group.extend(first, 80)
        with pytest.raises(AssertionError, match="1 blocks to promise, 0 available"):
            group.extend(second, 80)
