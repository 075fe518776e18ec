"""Which worker keeps which extents of KV in its tiers, host memory and disk, beside its device cache.

A tier is like another worker that only this one can use: its content is prefix-closed, is reported in the same stream,
and counts while that is complete. So one index like that of the device caches has all tiers; its keys are those of
extents of 128 tokens (`engine/tiers/extents.py`), every eighth hash of a chain. The worker with bit 1 << n in the index
of device caches has bit 1 << 2n here for its host memory, and the next one for its disk: one search finds both. The
index of a cluster without tiers is empty, and no lookup is made in it.

Owner: the fleet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import msgspec

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import (
    HASHES_PER_EXTENT,
    BlocksRemoved,
    BlocksSnapshot,
    BlocksStored,
    KvEvent,
    TierName,
    TierRemoved,
    TierStored,
    WorkerReport,
)
from disagg.router.workers.prefix_index import PrefixIndex, TierMatch, WorkerSet

_TIERS: tuple[TierName, ...] = get_args(TierName)
"""In the order of their bits."""


class TierIndex:
    """The tiers of all workers."""

    def __init__(self) -> None:
        self._index = PrefixIndex()
        self._with_tiers: set[WorkerId] = set()
        self._slots: list[WorkerId] = []
        """The worker of each position among the bits of device caches; stale if the position is free."""
        self.workers: WorkerSet = 0
        """The workers that have tiers, as a set of the index of device caches; read only."""
        self.is_used = False
        """Whether any worker has tiers; read only."""

    def add_worker(self, worker_id: WorkerId, incarnation: Incarnation, *, has_tiers: bool) -> None:
        """Add an incarnation of a worker; an earlier one is removed. To be called for workers without tiers, too, so
        that the bits here follow from those in the index of device caches."""
        self.remove_worker(worker_id)
        for tier in _TIERS:
            self._index.add_worker(_holder_id(worker_id, tier), incarnation)
        slot = self._slot(worker_id)
        self._slots += [worker_id] * (slot + 1 - len(self._slots))
        self._slots[slot] = worker_id
        if has_tiers:
            self._with_tiers.add(worker_id)
            self.workers |= 1 << slot
            self.is_used = True

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker and all that its tiers have."""
        if worker_id in self._with_tiers:
            self.workers &= ~(1 << self._slot(worker_id))
            self._with_tiers.discard(worker_id)
            self.is_used = bool(self._with_tiers)
        for tier in _TIERS:
            self._index.remove_worker(_holder_id(worker_id, tier))

    def apply(self, report: WorkerReport) -> None:
        """Apply the events of tiers. A gap in the reports is found by the index of device caches, which sees the same
        ones."""
        if report.worker_id not in self._with_tiers:
            return
        for tier in _TIERS:
            events = tuple(event for each in report.kv_events for event in _of_tier(each, tier))
            holder_id = _holder_id(report.worker_id, tier)
            self._index.apply(msgspec.structs.replace(report, worker_id=holder_id, kv_events=events))

    def find(self, hashes: Sequence[BlockHash], beyond: int = 0) -> TierMatch | None:
        """What the tiers have of a chain that have more of it than its `beyond` leading blocks; None if there are
        none."""
        ends = self._index.ends_of_extents(hashes, beyond // HASHES_PER_EXTENT)
        return TierMatch(ends, self._slots) if ends else None

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        return self._index.check_integrity()

    def _slot(self, worker_id: WorkerId) -> int:
        return self._index.bit(_holder_id(worker_id, _TIERS[0])).bit_length() >> 1


def _holder_id(worker_id: WorkerId, tier: TierName) -> WorkerId:
    """The name of a tier of a worker in the index."""
    return WorkerId(f"{worker_id}/{tier}")


def _of_tier(event: KvEvent, tier: TierName) -> Iterator[KvEvent]:
    """The event as the index of one kind of tier sees it."""
    match event:
        case BlocksSnapshot(tiers=tiers):
            yield BlocksSnapshot(hashes=tiers.get(tier, ()))
        case TierStored(tier=of, hashes=hashes) if of == tier:
            yield BlocksStored(hashes=hashes)
        case TierRemoved(tier=of, hashes=hashes) if of == tier:
            yield BlocksRemoved(hashes=hashes)
