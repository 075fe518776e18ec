"""The KV blocks of a worker: references, reservations, and reuse by content.

    free ──allocate──> active ──last holder frees it──> free     never published
      │                  │                        └──> cached    published: its content stays until the block, or the
      │                  │<──lock (prefix hit)───────────┤       extent that it lies in, is needed
      │<──evict──────────────────────────────────────────┘

A block is held by sequences, once per table that lists it (its reference count). While any sequence holds a block, it
is not reused. Other code holds none: every copy from blocks or into them is made on the engine thread, between two
steps, and is complete when it returns, or is queued on a device before all later uses of the block, like a step.

Reserving is counting: `reserved` blocks are counted for sequences and not chosen yet. free + cached >= reserved always,
so an allocation out of a reservation cannot fail. Any other allocation may only take what is `available`.

The same operations of vLLM's block pool: `publish` is `cache_full_blocks`, `lock` is `touch`, `release` is
`free_blocks`, `allocate` is `get_new_blocks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from disagg.engine.blocks.cached_blocks import CachedBlocks, TenantTag
from disagg.engine.blocks.free_blocks import FreeBlocks
from disagg.engine.blocks.prefix_cache import PrefixCache
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import BlockHash

EXTENT_TOKENS = 128
"""Tokens that lie together. On a virtual machine whose memory is on small pages, pieces of 48 KiB (128 tokens of K in a
layer of SmolLM2-135M) are read half again as fast as pieces of 6."""
LEAST_EXTENTS = 256
"""A small cache has smaller extents, because each sequence in it, running or cached, leaves half of one unused."""
MOST_FREE = 1 / 8
"""Cached blocks are evicted to free a whole extent while no more than this share of all blocks is free."""


class BlockManager:
    """A fixed number of blocks of `block_size` tokens, named 0 .. num_blocks - 1. Owner: the scheduler.

    `cached` decides which cached block goes first; by default the one that was released first. `announces`: see
    `PrefixCache`.

    Raises:
        ValueError: if there is no block, or `block_size` is not a multiple of 16.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_watermark_blocks: int = 0,
        cached: CachedBlocks | None = None,
        *,
        announces: bool = True,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        if block_size < 1 or block_size % HASH_BLOCK_TOKENS:
            raise ValueError(f"block_size must be a multiple of {HASH_BLOCK_TOKENS}, not {block_size}")
        if not 0 <= num_watermark_blocks < num_blocks:
            raise ValueError(f"the watermark must leave blocks to use: {num_watermark_blocks} of {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_watermark_blocks = num_watermark_blocks
        self.prefix = PrefixCache(cached, announces=announces)
        self._free = FreeBlocks(num_blocks, max(1, min(EXTENT_TOKENS // block_size, num_blocks // LEAST_EXTENTS)))
        self._most_free = int(num_blocks * MOST_FREE)
        self._num_reserved = 0
        self._refs = [0] * num_blocks

    # ------------------------------------------------------------ counts

    @property
    def num_free(self) -> int:
        """Blocks without content or holder."""
        return len(self._free)

    @property
    def num_fragmented(self) -> int:
        """Number of free blocks in extents that are partly in use."""
        return self._free.num_fragmented

    @property
    def num_cached(self) -> int:
        """Blocks with reusable content and no holder."""
        return self.prefix.num_evictable

    @property
    def num_active(self) -> int:
        """Blocks held by sequences."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_reserved(self) -> int:
        """Blocks reserved and not allocated."""
        return self._num_reserved

    @property
    def num_available(self) -> int:
        """Blocks that may be taken without breaking a reservation."""
        return self.num_free + self.num_cached - self._num_reserved

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def available_after_lock(self, blocks: Seq[int]) -> int:
        """What `num_available` would be if `blocks` were locked."""
        return self.num_available - sum(self.prefix.is_evictable(block) for block in blocks)

    def is_writable(self, block: int) -> bool:
        """Whether exactly one sequence holds `block` and no hash fixes its content."""
        return self._refs[block] == 1 and not self.prefix.is_published(block)

    # ------------------------------------------------------------ holds

    def match_prefix(self, hashes: Seq[BlockHash], max_tokens: int) -> list[int]:
        """The blocks that hold the longest cached prefix of at most `max_tokens` tokens; not locked yet.

        `hashes` are the chained hashes of the full 16-token blocks.
        """
        hashes_per_block = self.block_size // HASH_BLOCK_TOKENS
        num_blocks = max_tokens // self.block_size
        return self.prefix.match(hashes[hashes_per_block - 1 : num_blocks * hashes_per_block : hashes_per_block])

    def lock(self, blocks: Iterable[int]) -> None:
        """Raise the reference count of published blocks for a sequence (`touch` in vLLM); cached ones become active."""
        for block in blocks:
            self._hold(block)
            self._refs[block] += 1

    def reserve(self, num_blocks: int) -> None:
        """Reserve blocks; the caller has checked that they are available."""
        assert 0 <= num_blocks <= self.num_available, f"{num_blocks} blocks to reserve, {self.num_available} available"
        self._num_reserved += num_blocks

    def unreserve(self, num_blocks: int) -> None:
        """Cancel the reservation of `num_blocks` blocks."""
        assert 0 <= num_blocks <= self._num_reserved
        self._num_reserved -= num_blocks

    def allocate(self, num_blocks: int, *, reserved: bool, after: int | None = None) -> list[int]:
        """Choose writable blocks for a sequence, out of its reservation or of what is available: in a row behind
        `after`, its last one, as far as that is possible."""
        if reserved:
            self.unreserve(num_blocks)
        assert num_blocks <= self.num_available, f"{num_blocks} blocks wanted, {self.num_available} available"
        blocks: list[int] = []
        for _ in range(num_blocks):
            after = self._choose(after)
            self._refs[after] = 1
            blocks.append(after)
        return blocks

    def release(self, block_table: Seq[int], *, is_copy: bool = False) -> None:
        """A sequence releases its blocks. The last one goes first, so that the tail of a chain is evicted before its
        head. `is_copy`: its KV came from another worker."""
        if not is_copy:
            self.prefix.keep(block_table)
        for block in reversed(block_table):
            assert self._refs[block] > 0, f"block {block} is released and not held"
            self._refs[block] -= 1
            self._free_if_unreferenced(block)

    def publish(
        self,
        block: int,
        hashes: Seq[BlockHash],
        tag: TenantTag = b"",
        after: int | None = None,
        *,
        is_copy: bool = False,
    ) -> int:
        """Put a full, computed block into the prefix cache (`cache_full_blocks` in vLLM); see `PrefixCache.publish`.

        Returns the block that the sequence holds for this content from now on. Where another block was published with
        it before, that is the other one, and `block` is free again: reservations stay valid, because at most one cached
        block becomes active for one that becomes free.
        """
        assert self._refs[block] == 1, f"block {block} is published and has {self._refs[block]} holders"
        published = self.prefix.publish(block, hashes, tag, after, is_copy=is_copy)
        if published != block:
            self.lock([published])
            self.release([block])
        return published

    def forget(self, tag: TenantTag) -> None:
        """Free the cached blocks of a tenant that no sequence uses."""
        for block in self.prefix.forget(tag):
            self._free.free(block)

    # ------------------------------------------------------------ audit

    def check_integrity(self, block_tables: Iterable[Seq[int]], num_reserved: int) -> list[str]:
        """Findings; empty when sound.

        Args:
            block_tables: the table of every sequence.
            num_reserved: the sum of the sequences' reservations.
        """
        refs = Counter(block for table in block_tables for block in table)
        problems = self.prefix.check_integrity() + self._check_states()
        if {block: count for block, count in enumerate(self._refs) if count} != dict(refs):
            problems += [
                f"block {block}: {count} references counted, {refs[block]} tables list it"
                for block, count in enumerate(self._refs)
                if count != refs[block]
            ]
        if num_reserved != self._num_reserved:
            problems.append(f"{self._num_reserved} blocks reserved, sequences have {num_reserved}")
        if self.num_available < 0:
            problems.append(f"{self._num_reserved} blocks reserved, {self.num_free + self.num_cached} to be had")
        return problems

    def _check_states(self) -> list[str]:
        problems = []
        evictable, published = self.prefix.evictable.blocks, self.prefix.published
        for block, (is_free, num_refs) in enumerate(zip(self._free.flags, self._refs, strict=True)):
            is_cached = block in evictable
            if is_free + is_cached + (num_refs > 0) != 1:
                states = {"free": is_free, "cached": is_cached, "active": num_refs}
                problems.append(f"block {block} is {' and '.join(filter(states.get, states)) or 'lost'}")
            elif is_free and block in published:
                problems.append(f"block {block} is free and published")
        return problems

    # ------------------------------------------------------------ inside

    def _hold(self, block: int) -> None:
        assert self.prefix.is_published(block), f"block {block} is locked and not published"
        if not self._refs[block]:
            self.prefix.remove_evictable(block)

    def _free_if_unreferenced(self, block: int) -> None:
        if self._refs[block]:
            return
        if self.prefix.is_published(block):
            self.prefix.add_evictable(block)
        else:
            self._free.free(block)

    def _choose(self, after: int | None) -> int:
        """A block that is free. To begin an extent, cached blocks are given up ahead of need, in the same order as
        always, while there are few free ones."""
        block = None if after is None else self._free.take_after(after)
        if block is not None:
            return block
        while self.num_cached and not self._free.has_whole and len(self._free) <= self._most_free:
            if self._free and self._is_shared(self.prefix.next_evicted):
                break
            self._free.free(self.prefix.evict())
        return self._free.take()

    def _is_shared(self, block: int) -> bool:
        return any(self._refs[other] for other in self._free.extent(block))
