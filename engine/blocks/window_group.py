"""The blocks of one cache group with a window: what sequences hold of it, and what they are promised. Pure.

    promised ──extend──> held ──(its tokens leave the window)──> cached: evicted first, unless a resume point needs it
                           └──(the sequence ends)──> cached, or free

A sequence holds the blocks of its window and those that steps write to. So between two steps it holds no more than its
tokens fill, and never more than the window takes (`most_held`), however long it becomes; the steps' own tokens take
what the pool keeps apart for the steps that may be under way together. So many blocks are promised: at admission for
the tokens that are known and for some output, as in the first group, and from then on for each token that is to be
written. The sum of all promises never exceeds the pool, so that what was promised can be allocated. Where several
sequences share blocks, less is held than was promised.

Entries of a block table whose blocks have left are 0, and are never read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from disagg.engine.blocks.block_manager import BlockManager
from disagg.engine.cache_groups import most_held, window_blocks
from disagg.engine.request import WindowTable
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import BlockHash
from disagg.proto.messages import CacheGroup


class WindowGroup:
    """Owner: the `KVCacheManager`.

    Args:
        number: its place among the layout's groups.
        group: its window.
        blocks: its blocks; nothing of them is reserved.
        step_tokens: tokens of the steps that may be under way together, for whose blocks there is always room.

    Raises:
        ValueError: if not even one sequence fits.
    """

    def __init__(self, number: int, group: CacheGroup, blocks: BlockManager, step_tokens: int) -> None:
        self.number = number
        self.group = group
        self.blocks = blocks
        self.size = blocks.block_size
        self.num_window_blocks = window_blocks(group.window, self.size)
        self._most = most_held(group.window, self.size)
        self._capacity = blocks.num_blocks - -(-step_tokens // self.size)
        self._num_promised = 0
        if self._capacity < self._most:
            raise ValueError(
                f"the pool of the window of {group.window} tokens has {blocks.num_blocks} blocks; one sequence and one "
                f"step take {blocks.num_blocks - self._capacity + self._most}"
            )

    def kept_from(self, num_tokens: int) -> int:
        """The first block that is kept once `num_tokens` tokens are computed."""
        return max(0, num_tokens // self.size - self.num_window_blocks)

    # ------------------------------------------------------------ promises

    @property
    def num_available(self) -> int:
        """Blocks that can be promised."""
        return self._capacity - self._num_promised

    def share_of(self, num_blocks: int) -> int:
        """As large a part of `num_blocks` blocks as is promised of this pool."""
        return num_blocks * self._num_promised // self._capacity

    def most_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens may hold."""
        return min(self._most, self.blocks.blocks_for(num_tokens))

    def has_room(self, held: WindowTable, num_tokens: int, num_left: int = 0) -> bool:
        """Whether a sequence is promised enough for `num_tokens` tokens, or can be so that `num_left` blocks stay
        available."""
        return self.most_for(num_tokens) - held.num_promised <= max(0, self.num_available - num_left)

    # ------------------------------------------------------------ prefixes

    def needs(self, index: int, end: int) -> bool:
        """Whether a prefix of `end` blocks needs block `index` of this window."""
        return end - self.num_window_blocks <= index < end

    def first_gap(self, keys: Seq[BlockHash], start: int, end: int) -> int:
        """The first block from `start` on, and before `end`, that is not there; else `end`."""
        return next((at for at in range(start, end) if self.blocks.prefix.block_of(keys[at]) is None), end)

    # ------------------------------------------------------------ tables

    def admit(self, keys: Seq[BlockHash], first_token: int, end: int, num_promised: int) -> WindowTable:
        """The table of a sequence that needs the KV from `first_token` on, of which it finds that of the first `end`
        blocks here: these are locked. The others are published when they are computed, or have arrived, if they are
        whole."""
        first = first_token // self.size
        found = [self.blocks.prefix.block_of(keys[index]) for index in range(first, end)]
        locked = [block for block in found if block is not None]
        assert len(locked) == len(found), f"a block of the window of {self.group.window} tokens is gone"
        self.blocks.lock(locked)
        self._num_promised += num_promised
        num_published = max(first + len(locked), -(-first_token // self.size))
        return WindowTable([0] * first + locked, first, first_token, num_published, num_promised)

    def extend(self, held: WindowTable, num_tokens: int) -> None:
        """Allocate the blocks for tokens before `num_tokens`; there is room for them."""
        num_more = self.most_for(num_tokens) - held.num_promised
        if num_more > 0:
            assert num_more <= self.num_available, f"{num_more} blocks to promise, {self.num_available} available"
            self._num_promised += num_more
            held.num_promised += num_more
        table = held.block_table
        num_missing = self.blocks.blocks_for(num_tokens) - len(table)
        if num_missing > 0:
            table += self.blocks.allocate(num_missing, reserved=False, after=table[-1] if held.num_held else None)

    def publish(self, held: WindowTable, hashes: Seq[BlockHash], num_tokens: int, tag: bytes) -> None:
        """Put the blocks into the cache that the first `num_tokens` tokens fill; whether they go first is decided by
        the resume points alone."""
        per_block = self.size // HASH_BLOCK_TOKENS
        table = held.block_table
        for index in range(held.num_published, num_tokens // self.size):
            block_hashes = hashes[index * per_block : (index + 1) * per_block]
            table[index] = self.blocks.publish(table[index], block_hashes, tag, is_copy=True)
            held.num_published = index + 1

    def leave(self, held: WindowTable, first: int) -> None:
        """Give the blocks before number `first` back."""
        table, first = held.block_table, min(first, len(held.block_table))
        if first <= held.first:
            return
        self.blocks.release(table[held.first : first], is_copy=True)
        table[held.first : first] = [0] * (first - held.first)
        held.first = first
        held.first_token = max(held.first_token, first * self.size)
        held.num_published = max(held.num_published, first)

    def skip(self, held: WindowTable, num_tokens: int) -> None:
        """The KV of tokens before number `num_tokens` will not arrive; the block that it lies in will not be whole."""
        first = num_tokens // self.size
        self.leave(held, first)
        held.block_table += [0] * (first - len(held.block_table))
        held.first = max(held.first, first)
        held.first_token = num_tokens
        held.num_published = max(held.num_published, -(-num_tokens // self.size))

    def free(self, held: WindowTable) -> None:
        """Release all blocks of a sequence and its promise."""
        self.blocks.release(held.held, is_copy=True)
        self._num_promised -= held.num_promised

    # ------------------------------------------------------------ audit

    def check_integrity(self, tables: Seq[WindowTable]) -> list[str]:
        """Findings, given the table of every sequence that has one; empty when sound."""
        name = f"window of {self.group.window} tokens"
        problems = [f"{name}: {each}" for each in self.blocks.check_integrity([held.held for held in tables], 0)]
        if self._num_promised != sum(held.num_promised for held in tables):
            problems.append(f"{name}: {self._num_promised} blocks are promised, sequences have other promises")
        if self._num_promised > self._capacity:
            problems.append(f"{name}: {self._num_promised} blocks are promised of {self._capacity}")
        if any(block for held in tables for block in held.block_table[: held.first]):
            problems.append(f"{name}: an entry of a block that has left is not 0")
        return problems


def resumable_end(windows: Seq[WindowGroup], keys: Seq[BlockHash], end: int) -> int:
    """Blocks of the longest prefix, of `end` blocks at most, that all windows can resume. Looks for each block of a
    window once at most."""
    at, widest = end, max([window.num_window_blocks for window in windows])
    while at > max(0, end - widest):
        at -= 1
        if any(window.needs(at, end) and window.blocks.prefix.block_of(keys[at]) is None for window in windows):
            end = at
    return end
