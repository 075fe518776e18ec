"""The free blocks of a KV cache, allocated so that the blocks of a sequence lie together.

The cache is seen as extents of neighbouring blocks. A sequence goes on where its last block is, to the end of that
extent, and then begins an unused one; only where there is none it gets a block of an extent that is partly in use. So
attention reads a sequence in rows of an extent, and extents become free as a whole, because the blocks of one sequence
are given up together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq


class FreeBlocks:
    """Those of 0 .. num_blocks - 1 that are neither held nor cached; all of them at first. Owner: the block manager."""

    def __init__(self, num_blocks: int, extent_blocks: int) -> None:
        firsts = range(0, num_blocks, extent_blocks)
        self._extent_blocks = extent_blocks
        self._sizes = [min(extent_blocks, num_blocks - first) for first in firsts]
        self._num_free = self._num_in_whole = num_blocks
        self._is_free = bytearray(b"\1" * num_blocks)
        self._counts = list(self._sizes)
        """Free blocks of each extent."""
        self._whole = list(range(len(firsts)))
        """A heap of the extents that are free as a whole."""
        self._broken: dict[int, None] = {}
        """Extents with a free block and one that is not, the one first that was broken first."""

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block: int) -> bool:
        return bool(self._is_free[block])

    @property
    def flags(self) -> Seq[int]:
        """For each block of the cache, whether it is free; read only."""
        return self._is_free

    @property
    def has_whole(self) -> bool:
        """Whether an extent is free as a whole."""
        return bool(self._whole)

    @property
    def num_fragmented(self) -> int:
        """Number of free blocks in extents that are partly in use."""
        return self._num_free - self._num_in_whole

    def extent(self, block: int) -> range:
        """Numbers of all blocks, free or not, of the extent that holds this one."""
        index = block // self._extent_blocks
        first = index * self._extent_blocks
        return range(first, first + self._sizes[index])

    def take_after(self, block: int) -> int | None:
        """The block after one that is not free, if it is free and of the same extent."""
        assert not self._is_free[block]
        following = block + 1
        if following % self._extent_blocks == 0 or following == len(self._is_free) or not self._is_free[following]:
            return None
        return self._take(following)

    def take(self) -> int:
        """The first block of the first whole extent, or one of a broken extent; there is one."""
        if self._whole:
            extent = heapq.heappop(self._whole)
            self._num_in_whole -= self._sizes[extent]
        else:
            extent = next(iter(self._broken))
        return self._take(self._is_free.index(1, extent * self._extent_blocks))

    def free(self, block: int) -> None:
        """It is free again."""
        assert not self._is_free[block]
        self._is_free[block] = 1
        self._num_free += 1
        extent = block // self._extent_blocks
        self._counts[extent] += 1
        if self._counts[extent] < self._sizes[extent]:
            self._broken[extent] = None
        else:
            self._broken.pop(extent, None)
            heapq.heappush(self._whole, extent)
            self._num_in_whole += self._sizes[extent]

    def _take(self, block: int) -> int:
        self._is_free[block] = 0
        self._num_free -= 1
        extent = block // self._extent_blocks
        self._counts[extent] -= 1
        if self._counts[extent]:
            self._broken[extent] = None
        else:
            self._broken.pop(extent, None)
        return block
