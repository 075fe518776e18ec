"""Which KV blocks can be found by their content, which of them may be evicted, and the events about it for routers.

    published ──> (referenced <──> evictable) ──> evicted

A physical block of k * 16 tokens is published once it is full and computed, under the chained hash of its last 16-token
sub-block, which covers all tokens before it. It keeps that hash until it is evicted. Evictable blocks (published,
without a holder) of one tenant leave in the order in which they became evictable, `cached_blocks` chooses the tenant; a
sequence releases its blocks last one first, so the tail of a chain goes before its head. All blocks of a chain are one
tenant's.

Copies leave before all other blocks: blocks that were published by sequences whose KV came from another worker, which
keeps it too, and that no sequence has held since whose prompt was computed here. So a decode worker that computes
prompts itself (local prefill) keeps those, which are cached nowhere else. Blocks of a window are treated like copies
while no resume point needs them (see `resume_points.py`).

The announced hashes are prefix-closed whenever the events are drained: with a hash, all of the chain before it is
announced. Who publishes a block holds the published blocks of the whole chain before it, because a content that is
published already replaces the caller's own copy. So no parent becomes evictable before the last of its children. A
child of a copy is a copy as soon as it is evictable: who computed it and releases it holds the parent, which is no copy
from then on. The router's index relies on that.

The router's index works on 16-token hashes. Two blocks that differ only in their second half share the hashes of their
first half, so these are counted: a hash is announced when the first block brings it, and withdrawn when the last one
leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, KeysView, Set
from collections.abc import Sequence as Seq
from itertools import chain

from disagg.engine.blocks.cached_blocks import CachedBlocks, TenantTag
from disagg.proto.ids import BlockHash
from disagg.proto.messages import BlocksRemoved, BlocksSnapshot, BlocksStored, KvEvent


class PrefixCache:
    """The content index over KV blocks. Owner: the block manager, which holds the references.

    `announces`: whether there are events. The blocks of a window are not prefix-closed, and are none of the router's.
    """

    def __init__(self, evictable: CachedBlocks | None = None, *, announces: bool = True) -> None:
        self._announces = announces
        self.on_evict: Callable[[int], None] | None = None
        """Called with each block that is evicted, before it can get other content."""
        self._block_of: dict[BlockHash, int] = {}
        self._hashes_of: dict[int, tuple[BlockHash, ...]] = {}
        self._tag_of: dict[int, TenantTag] = {}
        self._copies: set[int] = set()
        self.evictable = CachedBlocks() if evictable is None else evictable
        self._announced: dict[BlockHash, int] = {}
        """How many published blocks have each hash."""
        self._events: list[tuple[type[BlocksStored] | type[BlocksRemoved], list[BlockHash]]] = []

    @property
    def published(self) -> KeysView[int]:
        """The blocks whose content is fixed by a published hash."""
        return self._hashes_of.keys()

    @property
    def copies(self) -> Set[int]:
        """Those of them that go first once they are evictable."""
        return self._copies

    @property
    def num_evictable(self) -> int:
        """Published blocks without a holder."""
        return len(self.evictable)

    @property
    def num_copies(self) -> int:
        """Those of them that are copies."""
        return self.evictable.num_copies

    def block_of(self, key_hash: BlockHash) -> int | None:
        """The block whose last 16 tokens have this hash; None where there is none."""
        return self._block_of.get(key_hash)

    def match(self, key_hashes: Seq[BlockHash]) -> list[int]:
        """The blocks of the longest published prefix. `key_hashes` has one hash per physical block, in order."""
        blocks: list[int] = []
        for key_hash in key_hashes:
            block = self._block_of.get(key_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(
        self,
        block: int,
        hashes: Seq[BlockHash],
        tag: TenantTag = b"",
        after: int | None = None,
        *,
        is_copy: bool = False,
    ) -> int:
        """Put a full, referenced block into the prefix cache. `hashes` are those of its 16-token sub-blocks, in order.
        It is the tenant's of the published block `after`, the one before it in its chain; the first one is that of
        `tag`.

        Returns the block that is published with this content: `block`, or the one that was before.
        """
        assert block not in self._hashes_of, f"block {block} is already published"
        published = self._block_of.setdefault(hashes[-1], block)
        if published != block:
            return published
        self._hashes_of[block] = tuple(hashes)
        self._tag_of[block] = tag if after is None else self._tag_of[after]
        if is_copy:
            self._copies.add(block)
        announced, new = self._announced, []
        for block_hash in hashes:
            count = announced.get(block_hash, 0)
            if not count:
                new.append(block_hash)
            announced[block_hash] = count + 1
        self._announce(BlocksStored, new)
        return block

    def is_published(self, block: int) -> bool:
        """Whether the content of `block` is fixed by a published hash."""
        return block in self._hashes_of

    def is_evictable(self, block: int) -> bool:
        """Whether `block` is published and without a holder."""
        return block in self.evictable

    def keep(self, blocks: Seq[int]) -> None:
        """All published blocks of a chain: they are no copies any more."""
        if self._copies:
            self._copies.difference_update(blocks)

    def demote(self, block: int) -> None:
        """A published block goes first from now on, like a copy."""
        assert block in self._hashes_of, f"block {block} is not published and goes first"
        self._copies.add(block)
        self.evictable.demote(block)

    def add_evictable(self, block: int) -> None:
        """The last reference of a published block is gone."""
        assert block in self._hashes_of
        assert block not in self.evictable
        self.evictable.add(block, self._tag_of[block], is_copy=block in self._copies)

    def remove_evictable(self, block: int) -> None:
        """A published block is referenced again."""
        self.evictable.hold(block)

    @property
    def next_evicted(self) -> int:
        """The block that goes next; there is one."""
        return self.evictable.next

    def evict(self) -> int:
        """Forget the content of the block that goes next, and return that block."""
        block = self.evictable.evict()
        self._forget_content(block)
        return block

    def forget(self, tag: TenantTag) -> list[int]:
        """Forget the content of all evictable blocks of a tenant, and return those blocks."""
        blocks = self.evictable.of(tag)
        for block in blocks:
            self.evictable.hold(block)
            self._forget_content(block)
        return blocks

    def _forget_content(self, block: int) -> None:
        if self.on_evict is not None:
            self.on_evict(block)
        del self._tag_of[block]
        self._copies.discard(block)
        hashes = self._hashes_of.pop(block)
        del self._block_of[hashes[-1]]
        announced, gone = self._announced, []
        for block_hash in hashes:
            if count := announced[block_hash] - 1:
                announced[block_hash] = count
            else:
                del announced[block_hash]
                gone.append(block_hash)
        self._announce(BlocksRemoved, gone)

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What changed since the last call, in order; neighbours of one kind are merged."""
        events = tuple(kind(hashes=tuple(hashes)) for kind, hashes in self._events)
        self._events.clear()
        return events

    def snapshot(self) -> BlocksSnapshot:
        """All announced hashes. Events that are not drained yet may follow it: they change nothing in it."""
        return BlocksSnapshot(hashes=tuple(self._announced))

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        problems = []
        if {hashes[-1]: block for block, hashes in self._hashes_of.items()} != self._block_of:
            problems.append("prefix cache: hash index and block index differ")
        if dict(Counter(chain.from_iterable(self._hashes_of.values()))) != self._announced:
            problems.append("prefix cache: announced hashes are not those of the published blocks")
        problems += [f"block {block} is evictable and has no hash" for block in self.evictable.blocks - self._hashes_of]
        if self._tag_of.keys() != self._hashes_of.keys():
            problems.append("prefix cache: tenants are kept for other blocks than the published ones")
        if not self._copies <= self._hashes_of.keys():
            problems.append("prefix cache: copies are not published")
        return problems + self.evictable.check_integrity()

    def _announce(self, kind: type[BlocksStored] | type[BlocksRemoved], hashes: list[BlockHash]) -> None:
        if not hashes or not self._announces:
            return
        if self._events and self._events[-1][0] is kind:
            self._events[-1][1].extend(hashes)
        else:
            self._events.append((kind, hashes))
