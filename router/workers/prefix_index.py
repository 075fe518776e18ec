"""Which worker has which prefix block: a map from block hash to the set of its holders, fed by the workers' KV events.

A set of workers is an integer with one bit for each worker, so that following a chain takes few lookups however many
workers there are. Along a chain the set of those that have all blocks so far only shrinks, so a match is a short list
of (number of blocks, the workers whose prefix ends there), shortest first: a thousand workers that all have the same
system prompt are one entry. A match is valid until the index changes; keep none.

Events of a worker count only while they are complete: reports have (incarnation, sequence), and a gap drops all blocks
of the worker until its next snapshot. The index has hashes only, no tokens.

    unknown ──snapshot──> synced ──next report──> synced
                             └──gap──> unknown          the caller opens a new report stream, once

What a worker reports is prefix-closed: it has a block only with the whole chain before it
(engine/blocks/prefix_cache.py). A match is exact because of that.

Predictions. A request placed on a worker makes it have the blocks of the prompt soon. `predict` lets them count at once
for `PREDICTED_FOR_S`, so that the next request with the same prefix finds them before the event comes. Predicted blocks
are kept apart from reported ones, and end by a report of the block, by time, or with the worker's incarnation:

    predicted ──stored──> reported          a later removal counts
        └──time, worker lost──> (gone)

A match thus is at least what was reported, and at most that and the chains predicted.

Workers whose layout has windows report resume points beside their blocks (engine/blocks/resume_points.py): of such a
worker the match is the deepest point on the chain that is not longer than what it has. Nothing is predicted of points.

Owner: the fleet.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence

import msgspec

from disagg.proto.ids import BlockHash, Incarnation, WorkerId
from disagg.proto.messages import (
    HASHES_PER_EXTENT,
    BlocksRemoved,
    BlocksSnapshot,
    BlocksStored,
    KvEvent,
    ResumeRemoved,
    ResumeStored,
    TierName,
    WorkerReport,
)

PREDICTED_FOR_S = 5.0
"""Seconds for which a predicted block counts without a report of it."""

WorkerSet = int
"""A set of workers: the bits that `PrefixIndex.bit` gives them."""

ALL_WORKERS: WorkerSet = -1

Shards = Sequence[Mapping[BlockHash, WorkerSet]]
"""Block -> its holders, in `NUM_SHARDS` parts by the hash's first byte. One part is small, so that the moment in which
Python moves it to a larger table is short: a second for 10 million blocks in one table, milliseconds in 256."""

NUM_SHARDS = 256
_UNKNOWN = ()
"""Result of a lookup for blocks that the worker did not report; that of reported blocks is None."""


class _Holder(msgspec.Struct, eq=False, gc=False):
    """The blocks of one incarnation of a worker."""

    incarnation: Incarnation
    slot: int
    bit: WorkerSet
    hashes: dict[BlockHash, None] = {}
    """Blocks that it reported. Not a set: the garbage collector tracks sets, but no dict of such plain values, which
    for 10 million blocks saves pauses of seconds."""
    predicted: dict[BlockHash, float] = {}
    """Blocks that it is predicted to have, and until when the prediction counts."""
    points: dict[BlockHash, None] = {}
    """Last blocks of the prefixes that it can resume; only of a worker with windows."""
    next_sequence: int | None = None
    """The sequence number of the next report; None while not synced."""


class _Prediction(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Blocks of one prompt that a worker is predicted to have, which end at the same time."""

    end: float
    holder: _Holder
    hashes: Sequence[BlockHash]


class PrefixIndex:
    """The blocks of all workers, reported and predicted.

    Each block has a bit of `_shards[hash[0]][hash]` for every worker that reported it or is predicted to have it.
    The blocks of one chain share their set as one object where they can, so that a block with one holder costs no
    integer of its own.
    """

    def __init__(self) -> None:
        self._shards: list[dict[BlockHash, WorkerSet]] = [{} for _ in range(NUM_SHARDS)]
        self._workers: dict[WorkerId, _Holder] = {}
        self._bits: dict[WorkerId, WorkerSet] = {}
        self._slots: list[WorkerId] = []
        """The worker whose bit is 1 << position; stale if the position is free."""
        self._free_slots: list[int] = []
        self._single: dict[WorkerSet, WorkerSet] = {}
        """The shared integer for the set of each single worker."""
        self._predictions: deque[_Prediction] = deque()
        """The predictions in the order of their ends."""
        self._with_windows: WorkerSet = 0
        self._points: dict[BlockHash, WorkerSet] = {}
        """Resume points: last block -> workers with windows that can resume behind it."""

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    # ------------------------------------------------------------ workers

    def add_worker(self, worker_id: WorkerId, incarnation: Incarnation, *, has_windows: bool = False) -> None:
        """Add an incarnation of a worker; an earlier one is removed. `has_windows`: only its resume points count."""
        self.remove_worker(worker_id)
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
            self._slots[slot] = worker_id
        else:
            slot = len(self._slots)
            self._slots.append(worker_id)
        bit = 1 << slot
        self._bits[worker_id] = self._single[bit] = bit
        self._workers[worker_id] = _Holder(incarnation, slot, bit)
        if has_windows:
            self._with_windows |= bit

    def remove_worker(self, worker_id: WorkerId) -> None:
        """Remove a worker and all its blocks; the cost does not depend on other workers. Does nothing for an unknown
        one."""
        holder = self._workers.pop(worker_id, None)
        if holder is None:
            return
        self._unmark(holder.bit, {**holder.hashes, **holder.predicted})
        holder.predicted.clear()  # Predictions that wait to expire find nothing.
        self._remove_points(holder, list(holder.points))
        self._with_windows &= ~holder.bit
        del self._bits[worker_id]
        del self._single[holder.bit]
        heapq.heappush(self._free_slots, holder.slot)

    def bit(self, worker_id: WorkerId) -> WorkerSet:
        """The set of this one worker, to build sets for `PrefixMatch.best`; valid for this incarnation. 0 for an
        unknown one."""
        return self._bits.get(worker_id, 0)

    # ------------------------------------------------------------ reports

    def apply(self, report: WorkerReport) -> bool:
        """Apply a report's KV events. Returns False when a gap was found just now, so that a new report stream must be
        opened.

        Reports of unknown workers and other incarnations are ignored, as are all of a worker that is not synced until
        a snapshot."""
        holder = self._workers.get(report.worker_id)
        if holder is None or holder.incarnation != report.incarnation:
            return True
        events = _from_last_snapshot(report.kv_events)
        has_snapshot = bool(events) and isinstance(events[0], BlocksSnapshot)
        if not has_snapshot and report.sequence != holder.next_sequence:
            was_synced = holder.next_sequence is not None
            holder.next_sequence = None
            self._discard(holder, list(holder.hashes))
            self._remove_points(holder, list(holder.points))
            return not was_synced
        for event in events:
            self._apply_event(holder, event)
        holder.next_sequence = report.sequence + 1
        return True

    # ------------------------------------------------------------ predictions

    def predict(
        self, worker_id: WorkerId, hashes: Sequence[BlockHash], now: float, num_matched: int | None = None
    ) -> None:
        """A request with this chain was placed on the worker: it counts as having it until `now + PREDICTED_FOR_S`.
        Costs what the worker lacks. Does nothing for an unknown worker.

        Args:
            worker_id: the id of the worker.
            hashes: the hashes of the chain.
            now: the time.
            num_matched: its leading blocks by `find`, where that is known: it reported no more, and mostly just these.
        """
        holder = self._workers.get(worker_id)
        if holder is None:
            return
        most = len(hashes) if num_matched is None or holder.bit & self._with_windows else num_matched
        lacking = hashes[_num_leading(holder.hashes, hashes, most) :]
        if not lacking:
            return
        end, predicted = now + PREDICTED_FOR_S, holder.predicted
        predicted.update(dict.fromkeys(lacking, end))
        self._mark(holder.bit, lacking)
        self._predictions.append(_Prediction(end, holder, lacking))

    def expire(self, now: float) -> None:
        """Let predictions end whose time is over. To be called before a match; cheap when there are none."""
        predictions = self._predictions
        while predictions and predictions[0].end <= now:
            prediction = predictions.popleft()
            end, holder = prediction.end, prediction.holder
            predicted = holder.predicted
            if not predicted:
                continue
            over = [block_hash for block_hash in prediction.hashes if predicted.get(block_hash) == end]
            for block_hash in over:
                del predicted[block_hash]
            self._unmark(holder.bit, [block_hash for block_hash in over if block_hash not in holder.hashes])

    # ------------------------------------------------------------ lookups

    def find(self, hashes: Sequence[BlockHash], beyond: int = 0) -> PrefixMatch:
        """The number of leading blocks of the chain that each worker has; valid until the index changes. Workers that
        have no more than `beyond` are left out."""
        ends = prefix_ends(hashes, self._shards, beyond)
        if ends and self._with_windows:
            ends = self._resumable(ends, hashes)
        return PrefixMatch(ends, self._slots, hashes)

    def _resumable(self, ends: list[tuple[int, WorkerSet]], hashes: Sequence[BlockHash]) -> list[tuple[int, WorkerSet]]:
        """The same with workers that have windows at their deepest point: one scan of the chain, backwards."""
        found: dict[int, WorkerSet] = {}
        left = 0
        shorter = [num_blocks for num_blocks, _ in ends[:-1]]
        for (num_blocks, workers), until in zip(reversed(ends), [*reversed(shorter), 0], strict=True):
            if plain := workers & ~self._with_windows:
                found[num_blocks] = found.get(num_blocks, 0) | plain
            left |= workers & self._with_windows
            for end in range(num_blocks, until, -1):
                if not left:
                    break
                if here := self._points.get(hashes[end - 1], 0) & left:
                    found[end] = found.get(end, 0) | here
                    left ^= here
        return sorted(found.items())

    def ends_of_extents(self, hashes: Sequence[BlockHash], beyond: int) -> list[tuple[int, WorkerSet]]:
        """Where along the extents of a chain the holders' prefixes end, see `extent_ends`."""
        return extent_ends(hashes, self._shards, beyond)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks of the chain each worker has; without workers that have none."""
        return self.find(hashes).all()

    def num_reported(self, worker_id: WorkerId, hashes: Sequence[BlockHash], most: int) -> int:
        """How many leading blocks of the chain, `most` at most, the worker has reported, without those that it is
        predicted to have."""
        return _num_leading(self._workers[worker_id].hashes, hashes, most)

    def check_integrity(self) -> list[str]:
        """Inconsistencies; empty when there are none."""
        expected: list[dict[BlockHash, WorkerSet]] = [{} for _ in self._shards]
        for holder in self._workers.values():
            for block_hash in {**holder.hashes, **holder.predicted}:
                shard = expected[block_hash[0]]
                shard[block_hash] = shard.get(block_hash, 0) | holder.bit
        problems = [] if expected == self._shards else ["prefix index: hashes and holders differ"]
        points: dict[BlockHash, WorkerSet] = {}
        for holder in self._workers.values():
            for block_hash in holder.points:
                points[block_hash] = points.get(block_hash, 0) | holder.bit
        if points != self._points:
            problems.append("prefix index: resume points and workers differ")
        if self._bits != {worker_id: holder.bit for worker_id, holder in self._workers.items()}:
            problems.append("prefix index: bits and workers differ")
        ending = {(p.holder.slot, block_hash, p.end) for p in self._predictions for block_hash in p.hashes}
        if any(
            (holder.slot, *item) not in ending for holder in self._workers.values() for item in holder.predicted.items()
        ):
            problems.append("prefix index: a prediction never ends")
        return problems

    # ------------------------------------------------------------ inside

    def _apply_event(self, holder: _Holder, event: KvEvent) -> None:
        match event:
            case BlocksSnapshot(hashes=hashes, resume=points):
                self._discard(holder, list(holder.hashes.keys() - hashes))
                self._store(holder, hashes)
                self._remove_points(holder, list(holder.points))
                self._add_points(holder, points)
            case ResumeStored(hashes=points):
                self._add_points(holder, points)
            case ResumeRemoved(hashes=points):
                self._remove_points(holder, points)
            case BlocksStored(hashes=hashes):
                self._store(holder, hashes)
            case BlocksRemoved(hashes=hashes):
                self._discard(holder, hashes)

    def _store(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        """A block that was predicted has its mark."""
        predicted = holder.predicted
        fresh = [h for h in hashes if predicted.pop(h, None) is None] if predicted else hashes
        self._mark(holder.bit, fresh)
        holder.hashes.update(dict.fromkeys(hashes))

    def _discard(self, holder: _Holder, hashes: Sequence[BlockHash]) -> None:
        """A removed block that is predicted still counts until that ends: a request placed there brings it back."""
        take, predicted = holder.hashes.pop, holder.predicted
        gone = [h for h in hashes if take(h, _UNKNOWN) is None and h not in predicted]
        self._unmark(holder.bit, gone)

    def _add_points(self, holder: _Holder, points: Sequence[BlockHash]) -> None:
        for block_hash in points:
            self._points[block_hash] = self._points.get(block_hash, 0) | holder.bit
        holder.points.update(dict.fromkeys(points))

    def _remove_points(self, holder: _Holder, points: Sequence[BlockHash]) -> None:
        for block_hash in points:
            if holder.points.pop(block_hash, _UNKNOWN) is None:
                left = self._points[block_hash] & ~holder.bit
                if left:
                    self._points[block_hash] = left
                else:
                    del self._points[block_hash]

    def _mark(self, bit: WorkerSet, hashes: Iterable[BlockHash]) -> None:
        """Add a worker to the holders of blocks. Blocks in a row mostly have the same holders: they get the same
        object."""
        shards = self._shards
        before, after = bit, bit
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            holders = shard.setdefault(block_hash, bit)
            if holders is after:
                continue
            if holders is not before:
                before, after = holders, holders if holders & bit else holders | bit
            if after is not holders:
                shard[block_hash] = after

    def _unmark(self, bit: WorkerSet, hashes: Iterable[BlockHash]) -> None:
        """Take a worker, which is one of them, from the holders of blocks."""
        shards = self._shards
        before, after = bit, 0
        for block_hash in hashes:
            shard = shards[block_hash[0]]
            holders = shard[block_hash]
            if holders is not before:
                left = holders & ~bit
                before, after = holders, self._single.get(left, left)
            if after:
                shard[block_hash] = after
            else:
                del shard[block_hash]


def _num_leading(held: Container[BlockHash], hashes: Sequence[BlockHash], most: int) -> int:
    """How many leading blocks of a chain, `most` at most, are in a prefix-closed set."""
    if most == 0 or hashes[most - 1] in held:
        return most
    first, last = 0, most - 1
    while first < last:
        middle = (first + last) >> 1
        if hashes[middle] in held:
            first = middle + 1
        else:
            last = middle
    return first


def _from_last_snapshot(events: Sequence[KvEvent]) -> Sequence[KvEvent]:
    """A snapshot replaces everything, so what came before it in the same report does not matter."""
    for position in range(len(events) - 1, -1, -1):
        if isinstance(events[position], BlocksSnapshot):
            return events[position:]
    return events


class PrefixMatch:
    """The number of leading blocks of one chain that each worker has. Made by `PrefixIndex.find`."""

    __slots__ = ("_slots", "ends", "hashes", "tiers")

    def __init__(
        self, ends: list[tuple[int, WorkerSet]], slots: Sequence[WorkerId], hashes: Sequence[BlockHash]
    ) -> None:
        self.hashes = hashes
        """The chain of the lookup."""
        self.ends = ends
        """See `prefix_ends`; read only."""
        self.tiers: TierMatch | None = None
        """What the workers' tiers have of the chain; None where no worker has any. Set by the fleet."""
        self._slots = slots

    def best(
        self, limit: int, among: WorkerSet = ALL_WORKERS, turn: int = 0, more_than: int = 0
    ) -> list[tuple[WorkerId, int]]:
        """The workers of `among` with the longest prefixes, at most `limit` of them, longest first, and how many
        leading blocks each has; without workers that have no more than `more_than`.

        Args:
            turn: where to begin among workers of equal length, so that ties do not always give the same ones.
        """
        found: list[tuple[WorkerId, int]] = []
        for num_blocks, workers in reversed(self.ends):
            if num_blocks <= more_than:
                break
            workers &= among
            while workers:
                if len(found) == limit:
                    return found
                rest = workers >> turn << turn or workers
                bit = rest & -rest
                found.append((self._slots[bit.bit_length() - 1], num_blocks))
                workers ^= bit
        return found

    def blocks_of(self, bit: WorkerSet) -> int:
        """How many leading blocks one worker has."""
        for num_blocks, workers in self.ends:
            if workers & bit:
                return num_blocks
        return 0

    def least(self, among: WorkerSet) -> int:
        """How many leading blocks all workers of `among` have."""
        least = 0
        for num_blocks, workers in reversed(self.ends):
            if workers & among:
                least = num_blocks
                among &= ~workers
        return 0 if among else least

    def all(self) -> dict[WorkerId, int]:
        """How many leading blocks each worker has; without workers that have none."""
        found: dict[WorkerId, int] = {}
        slots = self._slots
        for num_blocks, workers in self.ends:
            while workers:
                bit = workers & -workers
                found[slots[bit.bit_length() - 1]] = num_blocks
                workers ^= bit
        return found


_SHIFT: Mapping[TierName, int] = {"host": 0, "disk": 1}
"""How far the bit of each tier of a worker is from the first one."""


class TierMatch:
    """What the tiers of workers have of one chain; see `TierIndex.find`."""

    __slots__ = ("_slots", "ends")

    def __init__(self, ends: list[tuple[int, WorkerSet]], slots: Sequence[WorkerId]) -> None:
        self.ends = ends
        """(Number of extents, tiers whose prefix ends there), shortest first, as sets of the index of tiers; read
        only."""
        self._slots = slots

    def holders(self) -> WorkerSet:
        """All tiers that have anything of the chain."""
        found = 0
        for _, tiers in self.ends:
            found |= tiers
        return found

    def extents_of(self, host_bit: WorkerSet) -> tuple[int, int]:
        """Leading extents in the host memory of one worker (`Worker.host_bit`), and on its disk."""
        num_host = num_disk = 0
        disk_bit = host_bit << 1
        for num_extents, found in self.ends:
            if found & host_bit:
                num_host = num_extents
            if found & disk_bit:
                num_disk = num_extents
        return num_host, num_disk

    def best(
        self, tier: TierName, limit: int, among: WorkerSet, turn: int, more_than: int = 0
    ) -> list[tuple[WorkerId, int]]:
        """Like `PrefixMatch.best`, for one kind of tier: workers, and how many leading extents each has there. `among`:
        their host memories."""
        found: list[tuple[WorkerId, int]] = []
        shift = _SHIFT[tier]
        turn += turn
        for num_extents, there in reversed(self.ends):
            if num_extents <= more_than:
                break
            workers = there >> shift & among
            while workers:
                if len(found) == limit:
                    return found
                rest = workers >> turn << turn or workers
                bit = rest & -rest
                found.append((self._slots[bit.bit_length() >> 1], num_extents))
                workers ^= bit
        return found


def extent_ends(hashes: Sequence[BlockHash], shards: Shards, beyond: int) -> list[tuple[int, WorkerSet]]:
    """Like `prefix_ends`, of extents: every `HASHES_PER_EXTENT`-th hash of the chain. No slice is made of the chain,
    which would touch hashes that the search does not look at."""
    num_extents = len(hashes) // HASHES_PER_EXTENT
    if num_extents <= beyond:
        return []
    last_of = HASHES_PER_EXTENT - 1
    ends: list[tuple[int, WorkerSet]] = []
    first = beyond
    block_hash = hashes[first * HASHES_PER_EXTENT + last_of]
    alive = shards[block_hash[0]].get(block_hash, 0)
    seen: list[tuple[int, WorkerSet]] = [(num_extents, 0)]
    while alive:
        last, there = seen[-1]
        if there & alive != alive:
            while (middle := (first + last) >> 1) > first:
                block_hash = hashes[middle * HASHES_PER_EXTENT + last_of]
                here = shards[block_hash[0]].get(block_hash, 0)
                if here is alive or here & alive == alive:
                    first = middle
                else:
                    last, there = middle, here
                    seen.append((last, there))
        seen.pop()
        still = alive & there
        if still != alive:
            ends.append((last, alive ^ still))
        first, alive = last, still
    return ends


def prefix_ends(hashes: Sequence[BlockHash], shards: Shards, beyond: int = 0) -> list[tuple[int, WorkerSet]]:
    """Where along the chain the workers' prefixes end: (number of blocks, workers that end there), shortest first;
    without prefixes of no more than `beyond` blocks.

    Looks at few blocks only. It halves the distance between a block that all the workers still counted have and one
    that some of them lack, and keeps what it saw further on for the workers that remain: about log2(n) looks for each
    place where a prefix ends. This is exact for every worker that has no block without the whole chain before it. One
    that has a hole may be counted beyond it, which changes no other worker's number.
    """
    if len(hashes) <= beyond:
        return []
    ends: list[tuple[int, WorkerSet]] = []
    first = beyond
    alive = shards[hashes[first][0]].get(hashes[first], 0)
    seen: list[tuple[int, WorkerSet]] = [(len(hashes), 0)]
    while alive:
        last, there = seen[-1]
        if there & alive != alive:
            while (middle := (first + last) >> 1) > first:
                block_hash = hashes[middle]
                here = shards[block_hash[0]].get(block_hash, 0)
                if here is alive or here & alive == alive:
                    first = middle
                else:
                    last, there = middle, here
                    seen.append((last, there))
        seen.pop()
        still = alive & there
        if still != alive:
            ends.append((last, alive ^ still))
        first, alive = last, still
    return ends
