"""The prefixes that a model with windows can be resumed behind, and the events about them for routers. Pure.

With full attention alone a prefix can be resumed at each of its blocks. With windows only where the blocks of every
window before that place are there, too, and these leave soon. So points are chosen: the end of a prompt, the end of an
answer, and where a prompt parts from one that was computed before. The blocks of a point are not the first to be
evicted when they leave the windows of their sequences.

A point is forgotten with the first of its blocks that is evicted, and with the last full block before it. So what is
announced is never more than true; a prefix that can be resumed elsewhere, because its blocks happen to be there, is a
gift.
"""

from __future__ import annotations

from typing import NamedTuple

from disagg.proto.ids import BlockHash
from disagg.proto.messages import KvEvent, ResumeRemoved, ResumeStored


class GroupBlock(NamedTuple):
    """A block of one cache group."""

    group: int
    block: int


class ResumePoints:
    """The points of a worker. Owner: the `KVCacheManager`."""

    def __init__(self) -> None:
        self._blocks_of: dict[BlockHash, tuple[GroupBlock, ...]] = {}
        self._points_of: dict[GroupBlock, dict[BlockHash, None]] = {}
        self._events: list[tuple[type[ResumeStored] | type[ResumeRemoved], list[BlockHash]]] = []

    def __len__(self) -> int:
        return len(self._blocks_of)

    def note(self, block_hash: BlockHash, blocks: tuple[GroupBlock, ...]) -> None:
        """The prefix that ends with this block can be resumed; `blocks` are published, and it needs all of them."""
        if block_hash in self._blocks_of:
            return
        self._blocks_of[block_hash] = blocks
        for block in blocks:
            self._points_of.setdefault(block, {})[block_hash] = None
        self._announce(ResumeStored, block_hash)

    def needs(self, group: int, block: int) -> bool:
        """Whether a point needs this block."""
        return (group, block) in self._points_of

    def evicted(self, group: int, block: int) -> None:
        """The content of a block is gone, and so are the points that need it."""
        for block_hash in list(self._points_of.get(GroupBlock(group, block), ())):
            for needed in self._blocks_of.pop(block_hash):
                points = self._points_of[needed]
                del points[block_hash]
                if not points:
                    del self._points_of[needed]
            self._announce(ResumeRemoved, block_hash)

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What changed since the last call, in order."""
        events = tuple(kind(hashes=tuple(hashes)) for kind, hashes in self._events)
        self._events.clear()
        return events

    def snapshot(self) -> tuple[BlockHash, ...]:
        """The last block of each prefix that can be resumed."""
        return tuple(self._blocks_of)

    def check_integrity(self, published: list[frozenset[int]]) -> list[str]:
        """Findings, given the published blocks of each group; empty when sound."""
        problems = []
        needed = {(block, point) for point, blocks in self._blocks_of.items() for block in blocks}
        if needed != {(block, point) for block, points in self._points_of.items() for point in points}:
            problems.append("resume points and the blocks that they need differ")
        problems += [
            f"a resume point needs block {block.block} of group {block.group}, which is not published"
            for block in self._points_of
            if block.block not in published[block.group]
        ]
        return problems

    def _announce(self, kind: type[ResumeStored] | type[ResumeRemoved], block_hash: BlockHash) -> None:
        if self._events and self._events[-1][0] is kind:
            self._events[-1][1].append(block_hash)
        else:
            self._events.append((kind, [block_hash]))
