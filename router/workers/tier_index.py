"""Which worker keeps which extents of KV in its tiers, host memory and disk, beside its device cache.

A tier is like another worker that only this one can use: its content is prefix-closed, is reported in the same stream,
and counts while that is complete. So each kind of tier has an index like that of the device caches, in which a worker
has the same bit; its keys are those of extents of 128 tokens (`engine/tiers/extents.py`), every eighth hash of a chain.
The index of a cluster without tiers is empty, and no lookup is made in it.

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


class TierIndex:
    """The tiers of all workers, by kind."""

    def __init__(self) -> None:
        self._indexes: dict[TierName, PrefixIndex] = {tier: PrefixIndex() for tier in _TIERS}
        self._with_tiers: set[WorkerId] = set()
        self.workers: WorkerSet = 0
        """The workers that have tiers, as a set of the indexes; read only."""

    def add_worker(self, worker_id: WorkerId, incarnation: Incarnation, *, has_tiers: bool) -> None:
        """Add an incarnation of a worker; an earlier one is removed. To be called for workers without tiers, too, so
        that all have the same bits here as in the index of device caches."""
        self.remove_worker(worker_id)
        for index in self._indexes.values():
            index.add_worker(worker_id, incarnation)
        if has_tiers:
            self._with_tiers.add(worker_id)
            self.workers |= index.bit(worker_id)

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker and all that its tiers have."""
        for index in self._indexes.values():
            self.workers &= ~index.bit(worker_id)
            index.remove_worker(worker_id)
        self._with_tiers.discard(worker_id)

    def apply(self, report: WorkerReport) -> None:
        """Apply the events of tiers. A gap in the reports is found by the index of device caches, which sees the same
        ones."""
        if report.worker_id not in self._with_tiers:
            return
        for tier, index in self._indexes.items():
            events = tuple(event for each in report.kv_events for event in _of_tier(each, tier))
            index.apply(msgspec.structs.replace(report, kv_events=events))

    @property
    def is_used(self) -> bool:
        """Whether any worker has tiers."""
        return bool(self._with_tiers)

    def find(self, hashes: Sequence[BlockHash], beyond: int = 0) -> TierMatch | None:
        """What the tiers have of a chain that have more of it than its `beyond` leading blocks; None if there are
        none."""
        keys = hashes[HASHES_PER_EXTENT - 1 :: HASHES_PER_EXTENT]
        by_tier = {tier: index.find(keys, beyond // HASHES_PER_EXTENT) for tier, index in self._indexes.items()}
        workers = 0
        for match in by_tier.values():
            for _, holders in match.ends:
                workers |= holders
        return TierMatch(by_tier, workers) if workers else None

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        return [problem for index in self._indexes.values() for problem in index.check_integrity()]


def _of_tier(event: KvEvent, tier: TierName) -> Iterator[KvEvent]:
    """The event as the index of one kind of tier sees it."""
    match event:
        case BlocksSnapshot(tiers=tiers):
            yield BlocksSnapshot(hashes=tiers.get(tier, ()))
        case TierStored(tier=of, hashes=hashes) if of == tier:
            yield BlocksStored(hashes=hashes)
        case TierRemoved(tier=of, hashes=hashes) if of == tier:
            yield BlocksRemoved(hashes=hashes)
