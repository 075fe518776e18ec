"""The files of a worker's disk tier in virtual time: names without contents, read and written one after the other.

As `engine/shell/tier_disk.py` does: reads go before writes, the queue of writes is bounded, and a worker that comes
back finds the files that its folder had. No file is damaged, and the folder never fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from disagg.engine.commands import TierAnswer, TierForgotten, TierRead, TierScanned, TierWritten
from disagg.engine.plan import Buffer
from disagg.engine.tiers.extents import Extent
from disagg.engine.tiers.store import DiskPort
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.world.clock import EventLoop

MOST_WRITES = 16
"""Writes that wait at a time, as of a worker's thread."""
Files = dict[Extent, None]
"""The files of a folder, which outlives the processes that use it."""


class TierFolder(DiskPort):
    """One process's use of a folder. Owner: the worker. `post` takes the answers."""

    def __init__(self, loop: EventLoop, times: TierTimes, files: Files, post: Callable[[TierAnswer], None]) -> None:
        self._loop = loop
        self._times = times
        self._files = files
        self._post = post
        self._reads: deque[tuple[float, Callable[[], None]]] = deque()
        """Seconds of each read that waits, and what ends it."""
        self._writes: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False
        self._is_closed = False

    def close(self) -> None:
        """The process is dead: what is under way is not done."""
        self._is_closed = True

    @property
    def has_room(self) -> bool:
        """Whether another write may be ordered."""
        return len(self._writes) < MOST_WRITES

    def scan(self, *, anew: bool) -> None:
        """Answer with the files that there are, in no time; nobody else writes there, so `anew` is always so."""
        self._loop.at(self._loop.now, self._scanned)

    def _scanned(self) -> None:
        if not self._is_closed:
            self._post(TierScanned(tuple(self._files)))

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Write a file behind all other orders."""
        self._writes.append((self._times.file_s(len(payload)), partial(self._written, number, extent)))
        self._go_on()

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Read a file before all writes that wait."""
        seconds = self._times.file_s(len(payload))
        self._reads.append((seconds, partial(self._was_read, number, extent, seconds)))
        self._go_on()

    def delete(self, extents: Iterable[Extent]) -> None:
        """Delete files, in no time."""
        for extent in extents:
            self._files.pop(extent, None)

    def forget(self, tag: bytes) -> None:
        """Delete the files of a tenant, in no time."""
        self.delete([extent for extent in self._files if extent.tag == tag])
        self._post(TierForgotten(tag, True))

    def _written(self, number: int, extent: Extent) -> None:
        self._files[extent] = None
        self._post(TierWritten(number, True))

    def _was_read(self, number: int, extent: Extent, seconds: float) -> None:
        self._post(TierRead(number, extent in self._files, seconds * 1e3))

    def _go_on(self) -> None:
        queue = self._reads or self._writes
        if queue and not self._is_busy:
            seconds, end = queue.popleft()
            self._is_busy = True
            self._loop.after(seconds, self._end, end)

    def _end(self, end: Callable[[], None]) -> None:
        if self._is_closed:
            return
        self._is_busy = False
        end()
        self._go_on()
