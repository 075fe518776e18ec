"""The pools of windows of a fast worker as counts, and where its prefixes can be resumed: the rules of
`engine/blocks/window_group.py` and `resume_points.py`, without blocks.

A sequence is promised the most that its windows take, or it is not admitted. What the promises leave of the pools holds
resume points, each with whole windows; the least recently used ones are forgotten first.

Left out: points that share blocks, and hits beyond the points whose blocks happen to be there. So a simulated worker
has at most the hits of a real one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.engine.cache_groups import PoolLimits, most_held, window_blocks, window_pools
from disagg.proto.ids import BlockHash
from disagg.proto.messages import KvEvent, KvLayout, ResumeRemoved, ResumeStored
from disagg.simulator.fast.block_set import PieceKey


@dataclass(slots=True)
class _Pool:
    """The pool of one window, in blocks."""

    num_blocks: int
    capacity: int
    """Most blocks that may be promised: all but those of one step."""
    most: int
    """Most blocks of one sequence."""
    window: int
    """Blocks of the window, which a resume point needs."""
    num_promised: int = 0


class FastWindows:
    """The windows of one worker. Owner: its `FastRoom`."""

    def __init__(self, layout: KvLayout, num_blocks: int, block_size: int, limits: PoolLimits) -> None:
        pools = window_pools(layout, num_blocks, block_size, limits)
        step_blocks = -(-limits.token_budget // block_size)
        self._pools = [
            _Pool(
                pool, pool - step_blocks, most_held(group.window, block_size), window_blocks(group.window, block_size)
            )
            for group, pool in zip(layout.groups[1:], pools, strict=True)
        ]
        self._points: OrderedDict[PieceKey, bool] = OrderedDict()
        """The keys of the last block of each prefix that can be resumed, in the order of their last use, and whether
        routers know of it."""
        self._events: list[tuple[bool, BlockHash]] = []
        """Pairs (whether the point was stored, else removed; its hash), in order."""

    @property
    def num_promised(self) -> int:
        """Number of promised blocks of all pools."""
        return sum(pool.num_promised for pool in self._pools)

    # ------------------------------------------------------------ promises

    def has_room(self, num_blocks: int) -> bool:
        """Whether a sequence of at most `num_blocks` blocks can be promised its windows."""
        return all(pool.num_promised + min(pool.most, num_blocks) <= pool.capacity for pool in self._pools)

    def promise(self, num_blocks: int) -> None:
        """Promise a sequence of at most `num_blocks` blocks its windows."""
        for pool in self._pools:
            pool.num_promised += min(pool.most, num_blocks)
        self._forget_surplus()

    def take_back(self, num_blocks: int) -> None:
        """Take the promise to such a sequence back."""
        for pool in self._pools:
            pool.num_promised -= min(pool.most, num_blocks)

    # ------------------------------------------------------------ resume points

    def resumable(self, keys: Sequence[PieceKey], num_keys: int) -> int:
        """The number of leading keys, at most `num_keys`, behind which a sequence can be resumed."""
        points = self._points
        for number in range(num_keys, 0, -1):
            if keys[number - 1] in points:
                points.move_to_end(keys[number - 1])
                return number
        return 0

    def received_to(self, keys: Sequence[PieceKey], num_keys: int, num_blocks: int, per_block: int) -> int:
        """The number of leading keys, at most `num_keys`, that a sequence of `num_blocks` blocks need not be sent by
        another worker: those before its windows, or up to a point within them, before which its windows are here."""
        before = min([max(0, num_blocks - pool.window) for pool in self._pools]) * per_block
        point = self.resumable(keys, min(len(keys), num_blocks * per_block))
        return min(num_keys, max(before, point))

    def has_window(self, end: int, num_blocks: int) -> bool:
        """Whether a sequence of which only the windows of its first `num_blocks` blocks were received has those of its
        first `end` blocks."""
        return all(end >= num_blocks or num_blocks <= pool.window for pool in self._pools)

    def note_point(self, key: PieceKey, *, is_announced: bool = True) -> None:
        """Note that the prefix that ends with this block can be resumed, whether a worker announces it or not."""
        if self._points.get(key, False) or (key in self._points and not is_announced):
            return
        self._points[key] = is_announced
        if is_announced and isinstance(key, bytes):
            self._events.append((True, key))
        self._forget_surplus()

    def evicted(self, keys: Iterable[PieceKey]) -> None:
        """Forget the points whose last block was evicted from the first group."""
        for key in keys:
            if key in self._points:
                self._removed(key, self._points.pop(key))

    def _forget_surplus(self) -> None:
        most = min((pool.num_blocks - pool.num_promised) // pool.window for pool in self._pools)
        while len(self._points) > most:
            self._removed(*self._points.popitem(last=False))

    def _removed(self, key: PieceKey, was_announced: bool) -> None:
        if was_announced and isinstance(key, bytes):
            self._events.append((False, key))

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return tuple(
            ResumeStored(hashes=(key,)) if is_stored else ResumeRemoved(hashes=(key,)) for is_stored, key in events
        )
