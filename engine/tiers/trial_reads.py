"""Trial reads: files that are read for no sequence, to know when a slow disk is quick again. Pure.

    a load from disk is not worth its time, and none was made for `TRIED_AGAIN_S` ──> its first two files are read

The first file shows the latency, the second one the time of a file without it. A sequence that was loaded to find out
would mostly wait for a disk that is as slow as before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from disagg.engine.tiers.store import DiskRead, TierStore
from disagg.engine.tiers.tier import Pins
from disagg.proto.ids import BlockHash

NUM_FILES = 2


class TrialReads:
    """Owner: the loads of a worker."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._pins: Pins = ()
        self._num_open = 0
        """Files that are being read."""

    def begin(self, keys: Seq[BlockHash], start: int, now: float) -> None:
        """The extents from number `start` on of a chain, which is on disk, are not loaded: read the first ones if the
        disk was left alone, and nothing else is being read."""
        store = self._store
        if self._num_open or store.is_reading or not store.disk_times.is_left_alone(now):
            return
        self._pins = store.disk.pin(keys[: start + NUM_FILES])
        for number, held in enumerate(self._pins[start:], start):
            if not store.read(held.extent, number, self._take, is_first=number == start):
                break
            self._num_open += 1
        self._unpin_if_over()

    def _take(self, read: DiskRead) -> bool:
        self._num_open -= 1
        self._unpin_if_over()
        return False

    def _unpin_if_over(self) -> None:
        if not self._num_open:
            self._store.disk.unpin(self._pins)
            self._pins = ()
