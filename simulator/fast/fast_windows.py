"""The pools of windows of a fast worker as counts, and where its prefixes can be resumed: the rules of
`engine/blocks/window_group.py` and `resume_points.py`, without blocks.

A sequence is promised what its windows take of the tokens that it is admitted with, and more as it grows. What the
promises leave of the pools holds resume points, each with whole windows; the least recently used ones are forgotten
first.

Left out: points that share blocks, points that are too many on a path, and hits beyond the points whose blocks happen
to be there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
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
    """Most blocks that may be promised: all but those of the steps that may be under way together."""
    most: int
    """Most blocks of one sequence."""
    window: int
    """Blocks of the window, which a resume point needs."""
    watermark: int
    """Blocks that admission leaves available."""
    num_promised: int = 0

    def promised_to(self, num_blocks: int) -> int:
        """What a sequence of so many blocks is promised."""
        return min(self.most, num_blocks)


class FastWindows:
    """The windows of one worker. Owner: its `FastRoom`."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        limits: PoolLimits,
        watermark_of: Callable[[int], int] = lambda num_blocks: 0,
    ) -> None:
        """`watermark_of`: blocks that admission leaves available of so many."""
        pools = window_pools(layout, num_blocks, block_size, limits)
        step_blocks = -(-limits.token_budget // block_size)
        self._pools = [
            _Pool(
                num_blocks=pool,
                capacity=pool - step_blocks,
                most=most_held(group.window, block_size),
                window=window_blocks(group.window, block_size),
                watermark=watermark_of(pool),
            )
            for group, pool in zip(layout.groups[1:], pools, strict=True)
        ]
        self._most = max(pool.most for pool in self._pools)
        self._points: OrderedDict[PieceKey, None] = OrderedDict()
        """The keys of the last block of each prefix that can be resumed, in the order of their last use."""
        self._events: list[tuple[bool, BlockHash]] = []
        """Pairs (whether the point was stored, else removed; its hash), in order."""

    @property
    def num_promised(self) -> int:
        """Number of promised blocks of all pools."""
        return sum(pool.num_promised for pool in self._pools)

    # ------------------------------------------------------------ promises

    def share_of(self, num_blocks: int) -> int:
        """As large a part of `num_blocks` blocks as is promised of the fullest pool."""
        return max(num_blocks * pool.num_promised // pool.capacity for pool in self._pools)

    def may_admit(self, num_blocks: int, *, is_alone: bool) -> bool:
        """Whether a sequence of `num_blocks` blocks can be promised its windows. One that is alone may have all."""
        return all(
            pool.num_promised + pool.promised_to(num_blocks) <= pool.capacity - (0 if is_alone else pool.watermark)
            for pool in self._pools
        )

    def has_room(self, promised: int, num_blocks: int) -> bool:
        """Whether a sequence that is promised its windows for `promised` blocks can have them for `num_blocks`."""
        return all(
            pool.num_promised + pool.promised_to(num_blocks) - pool.promised_to(promised) <= pool.capacity
            for pool in self._pools
        )

    def promise(self, promised: int, num_blocks: int) -> None:
        """Promise a sequence its windows for `num_blocks` blocks, in place of `promised`."""
        for pool in self._pools:
            pool.num_promised += pool.promised_to(num_blocks) - pool.promised_to(promised)
        self._forget_surplus()

    def is_enough(self, promised: int) -> bool:
        """Whether a sequence that is promised its windows for so many blocks needs no more, however long it gets."""
        return promised >= self._most

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

    def note_point(self, key: PieceKey) -> None:
        """Note that the prefix that ends with this block can be resumed."""
        if key in self._points:
            return
        self._points[key] = None
        if isinstance(key, bytes):
            self._events.append((True, key))
        self._forget_surplus()

    def evicted(self, keys: Iterable[PieceKey]) -> None:
        """Forget the points whose last block was evicted from the first group."""
        for key in keys:
            if key in self._points:
                del self._points[key]
                self._removed(key)

    def _forget_surplus(self) -> None:
        most = min((pool.num_blocks - pool.num_promised) // pool.window for pool in self._pools)
        while len(self._points) > most:
            self._removed(self._points.popitem(last=False)[0])

    def _removed(self, key: PieceKey) -> None:
        if isinstance(key, bytes):
            self._events.append((False, key))

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return tuple(
            ResumeStored(hashes=(key,)) if is_stored else ResumeRemoved(hashes=(key,)) for is_stored, key in events
        )
