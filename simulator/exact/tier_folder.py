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
from disagg.engine.tiers.found import arranged
from disagg.engine.tiers.store import MOST_WRITES, DiskPort
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.world.clock import EventLoop

Files = dict[Extent, None]
"""The files of a folder, which outlives the processes that use it."""


class TierFolder(DiskPort):
    """One process's use of a folder.

    Args:
        files: of the folder, those last that were written last.
        most: files that the worker keeps, of which one that it has at its start may have more.
        post: takes the answers.
    """

    def __init__(
        self, loop: EventLoop, times: TierTimes, files: Files, most: int, post: Callable[[TierAnswer], None]
    ) -> None:
        self._loop = loop
        self._times = times
        self._files = files
        self._most = most
        self._post = post
        self._known: set[Extent] = set()
        """Files that an earlier scan found, or that were written here."""
        self._reads: deque[tuple[float, Callable[[], None]]] = deque()
        """Seconds of each read that waits, and what ends it."""
        self._writes: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False
        self._is_closed = False

    def close(self) -> None:
        """The process is dead: what is under way is not done."""
        self._is_closed = True

    @property
    def can_vanish(self) -> bool:
        """Never."""
        return False

    @property
    def has_room(self) -> bool:
        """Whether another write may be ordered."""
        return len(self._writes) < MOST_WRITES

    def scan(self, *, anew: bool) -> None:
        """Find the files that others wrote, or an earlier process, in no time."""
        self._loop.at(self._loop.now, self._scanned, anew)

    def _scanned(self, anew: bool) -> None:
        if self._is_closed:
            return
        if anew:
            self._known.clear()
        found = arranged(self._files, self._most)
        new = tuple(extent for extent in found.extents if extent not in self._known)
        gone = tuple(extent.key for extent in self._known if extent not in self._files)
        self._known = set(found.extents)
        self._post(TierScanned(new, gone))

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Write a file behind all other orders."""
        seconds = self._times.file_s(len(payload))
        self._writes.append((seconds, partial(self._written, number, extent, seconds)))
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
            self._known.discard(extent)

    def forget(self, tag: bytes) -> None:
        """Delete the files of a tenant, in no time."""
        self.delete([extent for extent in self._files if extent.tag == tag])
        self._loop.at(self._loop.now, self._forgotten, tag)

    def _forgotten(self, tag: bytes) -> None:
        if not self._is_closed:
            self._post(TierForgotten(tag, True))

    def _written(self, number: int, extent: Extent, seconds: float) -> None:
        self._files[extent] = None
        self._known.add(extent)
        self._post(TierWritten(number, True, seconds * 1e3))

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
