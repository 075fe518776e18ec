"""A worker's KV blocks as numbers and one set: which prefixes are cached, who holds how many, what is promised.

The rules are those of `engine/blocks/`, without ids of blocks: computed blocks are found by the hashes of their chain.
Held blocks stay. The others are evicted in the order in which they were released, the end of a chain first, and copies
of other workers' blocks before all others. Room is counted in units of 16 tokens, as many as all blocks hold; sequences
take whole blocks of them. Hashes that stand for several units (`world.prompts.HashRuns`) are stored and evicted as a
whole.

Left out: extents, for which the real block manager evicts cached blocks a little ahead of need, and tenants.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import AttemptKey, BlockHash
from disagg.proto.messages import BlocksRemoved, BlocksStored, KvEvent

PieceKey = BlockHash | AttemptKey
"""A hash; for blocks that no prompt can match (answers that no later prompt repeats), the attempt that made them."""


class BlockSet:
    """The KV blocks of one worker, as counts and one set of hashes. Owner: the fast worker."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.per_block = block_size // HASH_BLOCK_TOKENS
        """Number of units in a block."""
        self.num_units = num_blocks * self.per_block
        self.num_reserved = 0
        """Number of units that are promised and not written."""
        self.num_own = 0
        """Number of units that a single sequence holds and that are not in the prefix cache."""
        self.num_held = 0
        """Number of units in the prefix cache that sequences hold."""
        self.num_cached = 0
        """Number of units in the prefix cache that no sequence holds."""
        self.num_copied = 0
        """Number of units in `num_cached` that are evicted first, because another worker has them too."""
        self._held: dict[PieceKey, int] = {}
        """For each piece that sequences hold: how many do."""
        self._cached: OrderedDict[PieceKey, int] = OrderedDict()
        """The units of each evictable piece, in the order in which the pieces were released."""
        self._copies: set[PieceKey] = set()
        """Pieces whose KV came from another worker and was never held by a sequence whose prompt was computed here."""
        self._first: OrderedDict[PieceKey, None] = OrderedDict()
        """The evictable pieces of `_copies`, in the order in which they were released."""
        self._events: list[tuple[bool, list[BlockHash]]] = []
        """Pairs (whether the blocks were stored, else removed; their hashes), in order."""
        self.on_evict: Callable[[list[BlockHash]], None] | None = None
        """Called with the hashes of evicted blocks."""

    @property
    def num_available(self) -> int:
        """Number of units that may be taken without breaking a promise."""
        return self.num_units - self.num_own - self.num_held - self.num_reserved

    def units_for(self, num_tokens: int) -> int:
        """Number of units in the blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // (self.per_block * HASH_BLOCK_TOKENS)) * self.per_block

    # ------------------------------------------------------------ prefixes

    def match(self, keys: Sequence[PieceKey], ends: Sequence[int], most: int) -> tuple[int, int]:
        """The number of leading pieces in the prefix cache, and of their units: whole blocks, at most `most` units. A
        piece is cached only with all pieces before it.

        Args:
            keys: the keys of the pieces.
            ends: for each piece, the number of units up to its end.
            most: the most units.
        """
        held, cached = self._held, self._cached
        first, last = 0, min(len(keys), bisect_right(ends, most) + 1)
        while first < last:
            middle = (first + last + 1) >> 1
            key = keys[middle - 1]
            if key in held or key in cached:
                first = middle
            else:
                last = middle - 1
        num_units = min(ends[first - 1], most) if first else 0
        num_units -= num_units % self.per_block
        while first and (ends[first - 2] if first > 1 else 0) >= num_units:
            first -= 1  # not even one block of the last piece counts
        return first, num_units

    def num_evictable(self, keys: Sequence[PieceKey]) -> int:
        """Number of units of these pieces that no sequence holds."""
        cached = self._cached
        return sum(cached.get(key, 0) for key in keys)

    def lock(self, keys: Sequence[PieceKey]) -> None:
        """Hold cached pieces for one more sequence."""
        held, take, copies, num_found = self._held, self._cached.pop, self._copies, 0
        for key in keys:
            if size := take(key, 0):
                held[key] = 1
                if copies:
                    self._no_longer_first(key, size)
                num_found += size
            else:
                held[key] += 1
        self.num_cached -= num_found
        self.num_held += num_found

    def publish(self, keys: Sequence[PieceKey], sizes: Sequence[int], *, is_copy: bool = False) -> None:
        """Put computed pieces of one sequence into the prefix cache. The sequence keeps holding them; pieces that are
        cached already replace its own copy."""
        held, cached, copies, num_found, num_held = self._held, self._cached, self._copies, 0, 0
        new: list[BlockHash] = []
        for key, size in zip(keys, sizes, strict=True):
            if count := held.get(key, 0):
                held[key] = count + 1
                continue
            held[key] = 1
            num_held += size
            if key in cached:
                del cached[key]
                if copies:
                    self._no_longer_first(key, size)
                num_found += size
                continue
            if is_copy:
                copies.add(key)
            if isinstance(key, bytes):
                new.append(key)
        self.num_own -= sum(sizes)
        self.num_cached -= num_found
        self.num_held += num_held
        self._announce(True, new)

    def release(self, keys: Sequence[PieceKey], sizes: Sequence[int], num_own: int, *, is_copy: bool = False) -> None:
        """Release the pieces that a sequence holds, and its `num_own` other units. `is_copy`: its KV came from another
        worker."""
        held, cached, copies, num_free = self._held, self._cached, self._copies, 0
        if copies and not is_copy:
            copies.difference_update(keys)
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            if count := held.pop(key) - 1:
                held[key] = count
                continue
            cached[key] = size
            num_free += size
            if copies and key in copies:
                self._first[key] = None
                self.num_copied += size
        self.num_own -= num_own
        self.num_held -= num_free
        self.num_cached += num_free

    def make_room(self) -> None:
        """Evict the pieces whose blocks were written over."""
        surplus = self.num_own + self.num_held + self.num_cached - self.num_units
        if surplus <= 0:
            return
        gone: list[BlockHash] = []
        evict, num_left, first = self._cached.popitem, surplus, self._first
        while num_left > 0:
            if first:
                key, _ = first.popitem(last=False)
                size = self._cached.pop(key)
                self.num_copied -= size
                self._copies.discard(key)
            else:
                key, size = evict(last=False)
            num_left -= size
            if isinstance(key, bytes):
                gone.append(key)
        self.num_cached -= surplus - num_left
        self._announce(False, gone)
        if self.on_evict is not None:
            self.on_evict(gone)

    def _no_longer_first(self, key: PieceKey, size: int) -> None:
        if key in self._first:
            del self._first[key]
            self.num_copied -= size

    # ------------------------------------------------------------ what the router hears

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What was put into the prefix cache or evicted since the last call, in order."""
        events, self._events = self._events, []
        return tuple(
            BlocksStored(hashes=tuple(hashes)) if is_stored else BlocksRemoved(hashes=tuple(hashes))
            for is_stored, hashes in events
        )

    def _announce(self, is_stored: bool, hashes: list[BlockHash]) -> None:
        if not hashes:
            return
        if self._events and self._events[-1][0] == is_stored:
            self._events[-1][1].extend(hashes)
        else:
            self._events.append((is_stored, hashes))

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        problems = []
        if self.num_own < 0 or self.num_reserved < 0:
            problems.append(f"{self.num_own} units of sequences, {self.num_reserved} promised")
        if self.num_own + self.num_held + self.num_cached > self.num_units:
            problems.append(f"{self.num_own + self.num_held + self.num_cached} units used of {self.num_units}")
        if self._held.keys() & self._cached.keys():
            problems.append("blocks are held and cached")
        if self._first.keys() != self._cached.keys() & self._copies:
            problems.append("the copies that go first are not the cached ones")
        if self.num_copied != sum(self._cached.get(key, 0) for key in self._first):
            problems.append(f"{self.num_copied} copied units are counted")
        if self.num_cached != sum(self._cached.values()):
            problems.append(f"{self.num_cached} cached units are counted, and {sum(self._cached.values())} are there")
        return problems
