"""Which worker has which prefix block: a map from block hash to the set of its holders, fed by the workers' KV events.

A set of workers is an integer with one bit a worker, so that following a chain costs one lookup and one `and` per
block, however many workers there are. Events of a worker count only while they are complete: reports carry
(incarnation, sequence), and a gap drops all that was known of the worker until its next snapshot. Nothing here knows
tokens, only hashes.

    unknown ──snapshot──> synced ──next report──> synced
                             └──gap──> unknown          the caller asks for a new stream, once

Owner: the router's fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import BlocksRemoved, BlocksSnapshot, BlocksStored, KvEvent, WorkerReport


@dataclass(slots=True)
class _Holder:
    """What is known of one life of a worker."""

    incarnation: Incarnation
    bit: int
    hashes: set[BlockHash] = field(default_factory=set)
    next_sequence: int | None = None
    """The sequence that the next report must have; None while not synced."""


class PrefixIndex:
    """See the module docstring."""

    def __init__(self) -> None:
        self._holders_of: dict[BlockHash, int] = {}
        self._workers: dict[WorkerId, _Holder] = {}
        self._worker_of_bit: dict[int, WorkerId] = {}

    def __len__(self) -> int:
        return len(self._holders_of)

    def add_worker(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        """Begin to follow one life of a worker; an earlier life is forgotten."""
        self.remove_worker(worker_id)
        bit = 1
        while bit in self._worker_of_bit:
            bit <<= 1
        self._worker_of_bit[bit] = worker_id
        self._workers[worker_id] = _Holder(incarnation, bit)

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Forget a worker and all its blocks. Does nothing for an unknown one."""
        holder = self._workers.pop(worker_id, None)
        if holder is not None:
            self._discard(holder, list(holder.hashes))
            del self._worker_of_bit[holder.bit]

    def apply(self, report: WorkerReport) -> bool:
        """Take a report's KV events. Returns False when a gap was found just now, so that a new report stream must be
        asked for.

        Reports of unknown workers and other lives are ignored, as are all of a worker that is not synced until a
        snapshot."""
        holder = self._workers.get(report.worker_id)
        if holder is None or holder.incarnation != report.incarnation:
            return True
        events = _from_last_snapshot(report.kv_events)
        has_snapshot = bool(events) and isinstance(events[0], BlocksSnapshot)
        if not has_snapshot and report.sequence != holder.next_sequence:
            was_synced = holder.next_sequence is not None
            holder.next_sequence = None
            self._discard(holder, list(holder.hashes))
            return not was_synced
        for event in events:
            self._apply_event(holder, event)
        holder.next_sequence = report.sequence + 1
        return True

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks of the chain each worker has; workers with none are left out."""
        found: dict[WorkerId, int] = {}
        alive = self._holders_of.get(hashes[0], 0) if hashes else 0
        for num_blocks, block_hash in enumerate(hashes):
            still = alive & self._holders_of.get(block_hash, 0)
            self._note(found, alive & ~still, num_blocks)
            alive = still
            if not alive:
                return found
        self._note(found, alive, len(hashes))
        return found

    def hashes_of(self, worker_id: WorkerId) -> frozenset[BlockHash]:
        """All blocks that a worker is known to have."""
        holder = self._workers.get(worker_id)
        return frozenset(holder.hashes) if holder else frozenset()

    def check_integrity(self) -> list[str]:
        """What does not fit together; empty when all is well."""
        expected: dict[BlockHash, int] = {}
        for holder in self._workers.values():
            for block_hash in holder.hashes:
                expected[block_hash] = expected.get(block_hash, 0) | holder.bit
        return [] if expected == self._holders_of else ["prefix index: hashes and holders differ"]

    def _note(self, found: dict[WorkerId, int], mask: int, num_blocks: int) -> None:
        while mask:
            bit = mask & -mask
            found[self._worker_of_bit[bit]] = num_blocks
            mask ^= bit

    def _apply_event(self, holder: _Holder, event: KvEvent) -> None:
        match event:
            case BlocksSnapshot(hashes=hashes):
                self._discard(holder, list(holder.hashes))
                self._store(holder, hashes)
            case BlocksStored(hashes=hashes):
                self._store(holder, hashes)
            case BlocksRemoved(hashes=hashes):
                self._discard(holder, hashes)

    def _store(self, holder: _Holder, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._holders_of[block_hash] = self._holders_of.get(block_hash, 0) | holder.bit
            holder.hashes.add(block_hash)

    def _discard(self, holder: _Holder, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            if block_hash not in holder.hashes:
                continue
            holder.hashes.remove(block_hash)
            left = self._holders_of[block_hash] & ~holder.bit
            if left:
                self._holders_of[block_hash] = left
            else:
                del self._holders_of[block_hash]


def _from_last_snapshot(events: Sequence[KvEvent]) -> Sequence[KvEvent]:
    """A snapshot replaces everything, so what came before it in the same report does not matter."""
    for position in range(len(events) - 1, -1, -1):
        if isinstance(events[position], BlocksSnapshot):
            return events[position:]
    return events
