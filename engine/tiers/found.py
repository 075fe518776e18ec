"""What a folder has, put in order before a worker takes it in. Pure; called on the thread of the files.

names of files, by the time of their last use ──arranged──> chains from their beginnings, the last used one first
                                                  └───────> what is in no chain that could be read, and what is too
                                                            much
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.proto.ids import BlockHash


class Found(NamedTuple):
    """The extents of a folder."""

    extents: tuple[Extent, ...]
    """Each one behind the one before it in its chain, and chains that were used later before others."""
    left: tuple[Extent, ...]
    """Extents that cannot be held: out of reach because a file of their chain is missing, second files of an extent,
    and what is beyond the most. What is useful least comes first."""


def arranged(extents: Iterable[Extent], most: int) -> Found:
    """Put extents in order, the one that was used last at the end; of those that can be reached `most` are kept. A
    chain counts as used when any extent of it was."""
    used_at: dict[BlockHash, int] = {}
    following: dict[BlockHash, list[Extent]] = defaultdict(list)
    left: list[Extent] = []
    for number, extent in enumerate(extents):
        if extent.key in used_at:
            left.append(extent)
        else:
            used_at[extent.key] = number
            following[extent.parent].append(extent)
    level = deque(following.pop(NO_PARENT, ()))
    reached: list[Extent] = []
    while level:
        reached.append(extent := level.popleft())
        level += following.pop(extent.key, ())
    left += [extent for extents in following.values() for extent in extents]
    for extent in reversed(reached):
        if extent.parent in used_at:
            used_at[extent.parent] = max(used_at[extent.parent], used_at[extent.key])
    reached.sort(key=lambda extent: -used_at[extent.key])
    return Found(tuple(reached[:most]), (*left, *reversed(reached[most:])))
