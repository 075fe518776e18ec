"""The prefixes that a model with windows can be resumed behind, and the events about them for routers. Pure.

With full attention alone a prefix can be resumed at each of its blocks. With windows only where the blocks of every
window before that place are there, too, and these leave soon. So points are chosen: the end of a prompt, the end of an
answer, and where a prompt parts from one that was computed before. In the pool of a window the blocks that no point
needs are evicted first.

A point is forgotten with the first of its blocks that is evicted, and with the last full block before it. So what is
announced is never more than true; a prefix that can be resumed elsewhere, because its blocks happen to be there, is a
gift, and becomes a point when it is taken.

A conversation leaves two points a turn, of which mostly the last one is of use. So of a path, the part of a chain
behind the last point from which several sequences went on, only `MOST_ON_PATH` points are kept (`surplus`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from disagg.engine.blocks.prefix_cache import PrefixCache
from disagg.proto.ids import BlockHash
from disagg.proto.messages import KvEvent, ResumeRemoved, ResumeStored

MOST_ON_PATH = 4


class GroupBlock(NamedTuple):
    """A block of one cache group."""

    group: int
    block: int


@dataclass(slots=True)
class Point:
    """A prefix that can be resumed."""

    block_hash: BlockHash
    """Hash of its last block."""
    blocks: tuple[GroupBlock, ...]
    """The blocks that it needs, of the first group only the last one."""
    used: int = 0
    """Number of its latest use among the uses of all points."""
    num_followers: int = 0
    """Sequences that went on from it."""


def surplus(points: Iterable[Point]) -> list[Point]:
    """Those of the points on a chain, the deepest and newest first, that are too many on its last path: the least
    recently used ones."""
    path = list(takewhile(lambda point: point.num_followers < 2, points))
    return sorted(path[1:], key=lambda point: point.used)[: max(0, len(path) - MOST_ON_PATH)]


class ResumePoints:
    """The points of a worker, and which blocks of windows go first because of them. Owner: the `KVCacheManager`.

    `caches`: of each cache group of a model with windows, the first one included.
    """

    def __init__(self, caches: Seq[PrefixCache] = ()) -> None:
        self._caches = tuple(caches)
        for group, cache in enumerate(self._caches):
            cache.on_evict = partial(self._evicted, group)
        self._points: dict[BlockHash, Point] = {}
        self._needing: dict[GroupBlock, dict[BlockHash, None]] = {}
        """Points by the blocks that they need."""
        self._num_uses = 0
        self._events: list[tuple[type[ResumeStored] | type[ResumeRemoved], list[BlockHash]]] = []

    def __len__(self) -> int:
        return len(self._points)

    def note(self, hashes: Seq[BlockHash], blocks: tuple[GroupBlock, ...]) -> None:
        """The prefix with this chain can be resumed; `blocks` are published and held, and it needs all of them."""
        block_hash = hashes[-1]
        point = self._points.get(block_hash)
        if point is not None:
            self._use(point)
            return
        point = self._points[block_hash] = Point(block_hash, blocks)
        self._use(point)
        for block in blocks:
            self._needing.setdefault(block, {})[block_hash] = None
            if block.group:
                self._caches[block.group].keep([block.block])
        self._announce(ResumeStored, block_hash)
        for each in surplus(self._on_chain(hashes)):
            self._remove(each)

    def follow(self, block_hash: BlockHash) -> None:
        """A sequence goes on from the prefix that ends with this block; it need not be a point."""
        point = self._points.get(block_hash)
        if point is not None:
            point.num_followers += 1
            self._use(point)

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What changed since the last call, in order."""
        events = tuple(kind(hashes=tuple(hashes)) for kind, hashes in self._events)
        self._events.clear()
        return events

    def snapshot(self) -> tuple[BlockHash, ...]:
        """The last block of each prefix that can be resumed."""
        return tuple(self._points)

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        problems = []
        needed = {(block, point.block_hash) for point in self._points.values() for block in point.blocks}
        if needed != {(block, point) for block, points in self._needing.items() for point in points}:
            problems.append("resume points and the blocks that they need differ")
        problems += [
            f"a resume point needs block {block.block} of group {block.group}, which is not published"
            for block in self._needing
            if not self._caches[block.group].is_published(block.block)
        ]
        for group, cache in enumerate(self._caches[1:], start=1):
            unneeded = {block for block in cache.published if (group, block) not in self._needing}
            if unneeded != cache.copies:
                problems.append(f"of group {group} not just the blocks go first that no resume point needs")
        return problems

    # ------------------------------------------------------------ inside

    def _use(self, point: Point) -> None:
        self._num_uses += 1
        point.used = self._num_uses

    def _on_chain(self, hashes: Seq[BlockHash]) -> Iterator[Point]:
        for block_hash in reversed(hashes):
            if (point := self._points.get(block_hash)) is not None:
                yield point

    def _evicted(self, group: int, block: int) -> None:
        """The content of a block is gone, and so are the points that need it."""
        for block_hash in list(self._needing.get(GroupBlock(group, block), ())):
            self._remove(self._points[block_hash])

    def _remove(self, point: Point) -> None:
        del self._points[point.block_hash]
        for block in point.blocks:
            points = self._needing[block]
            del points[point.block_hash]
            if not points:
                del self._needing[block]
                if block.group:
                    self._caches[block.group].demote(block.block)
        self._announce(ResumeRemoved, point.block_hash)

    def _announce(self, kind: type[ResumeStored] | type[ResumeRemoved], block_hash: BlockHash) -> None:
        if self._events and self._events[-1][0] is kind:
            self._events[-1][1].append(block_hash)
        else:
            self._events.append((kind, [block_hash]))
