"""How far along a chain of prefix blocks each worker has them: the answer to one question to the prefix index.

A set of workers is an integer with one bit a worker. Along a chain the set of those that have all blocks so far only
shrinks, so the answer is a short list of (number of blocks, the workers whose prefix ends there), shortest first. A
thousand workers that all have the same system prompt are one entry, and nobody has to name them one by one.

An answer is good until the index changes; keep none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from disagg.proto.ids import BlockHash, WorkerId

WorkerSet = int
"""A set of workers: the bits that `PrefixIndex.bit` gives them."""

EVERYBODY: WorkerSet = -1

Shards = Sequence[Mapping[BlockHash, WorkerSet]]
"""Block -> its holders, in `NUM_SHARDS` parts by the hash's first byte. One part is small, so that the moment in which
Python moves it to a larger table is short: a second for 10 million blocks in one table, milliseconds in 256."""

NUM_SHARDS = 256


class PrefixMatch:
    """See the module docstring. Made by `PrefixIndex.find`."""

    __slots__ = ("_ends", "_slots", "hashes")

    def __init__(
        self, ends: list[tuple[int, WorkerSet]], slots: Sequence[WorkerId], hashes: Sequence[BlockHash]
    ) -> None:
        self.hashes = hashes
        """The chain that was asked for."""
        self._ends = ends
        self._slots = slots

    def best(self, limit: int, among: WorkerSet = EVERYBODY, turn: int = 0) -> list[tuple[WorkerId, int]]:
        """The workers of `among` with the longest prefixes, at most `limit` of them, longest first, and how many
        leading blocks each has. Those with none are left out.

        Args:
            turn: where to begin to count among workers of equal length, so that ties do not always name the same ones.
        """
        found: list[tuple[WorkerId, int]] = []
        for num_blocks, workers in reversed(self._ends):
            workers &= among
            while workers:
                if len(found) == limit:
                    return found
                pool = workers >> turn << turn or workers
                bit = pool & -pool
                found.append((self._slots[bit.bit_length() - 1], num_blocks))
                workers ^= bit
        return found

    def blocks_of(self, bit: WorkerSet) -> int:
        """How many leading blocks one worker has."""
        for num_blocks, workers in self._ends:
            if workers & bit:
                return num_blocks
        return 0

    def all(self) -> dict[WorkerId, int]:
        """How many leading blocks each worker has; workers with none are left out."""
        found: dict[WorkerId, int] = {}
        slots = self._slots
        for num_blocks, workers in self._ends:
            while workers:
                bit = workers & -workers
                found[slots[bit.bit_length() - 1]] = num_blocks
                workers ^= bit
        return found


def prefix_ends(hashes: Sequence[BlockHash], shards: Shards) -> list[tuple[int, WorkerSet]]:
    """Where along the chain the workers' prefixes end: (number of blocks, workers that end there), shortest first.

    Looks at few blocks only. It halves the distance between a block that all the workers still counted have and one
    that some of them lack, and keeps what it saw further on for the workers that remain: about log2(n) looks for each
    place where a prefix ends. This is exact for every worker that has no block without the whole chain before it. One
    that has a hole may be counted beyond it, which changes no other worker's number.
    """
    if not hashes:
        return []
    ends: list[tuple[int, WorkerSet]] = []
    alive = shards[hashes[0][0]].get(hashes[0], 0)
    first = 0
    seen: list[tuple[int, WorkerSet]] = [(len(hashes), 0)]
    while alive:
        last, there = seen[-1]
        if there & alive != alive:
            while last - first > 1:
                middle = (first + last) >> 1
                block_hash = hashes[middle]
                here = shards[block_hash[0]].get(block_hash, 0)
                if here is alive or here & alive == alive:
                    first = middle
                else:
                    last, there = middle, here
                    seen.append((last, there))
        seen.pop()
        still = alive & there
        if still != alive:
            ends.append((last, alive ^ still))
        first, alive = last, still
    return ends
