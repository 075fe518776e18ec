"""Staging memory of several ranks: each has a part of every buffer, under the buffer's number.

Rank 0 hands out `GroupBuffer`s, which look like a flat buffer of the whole payload. The others make their part when a
command first names it, and drop it when rank 0 has freed the buffer. Numbers are never used twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from disagg.engine.parallel.interfaces import ShardRunner
from disagg.engine.plan import Buffer
from disagg.engine.sharding.kv_routes import part_bytes


class GroupBuffer:
    """A staging buffer of all ranks, as rank 0 holds it. It can be cut at its end, `buffer[:nbytes]`, and filled,
    `buffer[:] = 0`."""

    def __init__(
        self, number: int, local: Buffer, nbytes: int | None = None, clear: Callable[[int, int], None] | None = None
    ) -> None:
        """`nbytes` is that of the payload, all ranks together; `clear(number, nbytes)` fills the others' parts with
        zeros."""
        self.number = number
        self.local = local
        """Rank 0's part; always whole, because the division of a payload depends on the peer's ranks."""
        self.nbytes = local.nbytes if nbytes is None else nbytes
        self._clear = clear
        self._whole: GroupBuffer | None = None
        """The buffer that this one is a cut of, kept alive."""

    def __len__(self) -> int:
        return self.nbytes

    @property
    def whole_bytes(self) -> int:
        """Size of the buffer that this one is a cut of; its own where it is none."""
        return self.nbytes if self._whole is None else self._whole.nbytes

    def __getitem__(self, where: slice) -> GroupBuffer:
        """Raises:
        ValueError: for anything but a cut at the end.
        """
        start, stop, step = where.indices(self.nbytes)
        if (start, step) != (0, 1):
            raise ValueError(f"a buffer of several ranks can only be cut at its end, not by {where}")
        cut = GroupBuffer(self.number, self.local, max(0, stop), self._clear)
        cut._whole = self._whole or self
        return cut

    def __setitem__(self, where: slice, value: int) -> None:
        """Raises:
        ValueError: for anything but zeros in all of it.
        """
        if value != 0 or where.indices(self.nbytes) != (0, self.nbytes, 1):
            raise ValueError("a buffer of several ranks can only be filled as a whole, with zeros")
        self.local[:] = 0
        if self._clear is not None:
            self._clear(self.number, self.nbytes)


def own_part(runner: ShardRunner) -> Callable[[int], int]:
    """How many bytes a rank has of a buffer of so many bytes, all ranks' parts together."""
    return lambda nbytes: part_bytes(runner.layout, runner.shape, runner.shard.stage, nbytes)


class StagingParts:
    """A follower's parts. Thread-safe.

    Args:
        new_staging: makes a buffer of so many bytes.
        part_bytes: of a buffer of so many bytes, all ranks' parts together, how many this rank has.
    """

    def __init__(self, new_staging: Callable[[int], Buffer], part_bytes: Callable[[int], int]) -> None:
        self._new_staging = new_staging
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._parts: dict[int, Any] = {}

    def __call__(self, number: int, nbytes: int) -> Buffer:
        """The part of buffer `number`, which has `nbytes` bytes with all ranks' parts together; made at its first use.

        Raises:
            ValueError: if it is smaller than this rank's part of so many.
        """
        needed = self._part_bytes(nbytes)
        with self._lock:
            if number not in self._parts:
                self._parts[number] = self._new_staging(needed)
            part = self._parts[number]
        if part.nbytes < needed:
            raise ValueError(f"the part of staging buffer {number} has {part.nbytes} bytes, not {needed}")
        return part

    def free(self, number: int) -> None:
        """Drop a part. What still copies into it keeps it until that is over."""
        with self._lock:
            self._parts.pop(number, None)
