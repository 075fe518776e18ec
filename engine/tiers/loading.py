"""Sequences whose prefix is loaded from a tier. Pure.

    add ──> waits ──> loads ──> begins          as in any queue of prompts; its prefix is in the device cache then
              │         └── an error, or it takes too long ──> begins with what arrived in order
              └── computing is quicker by now, another sequence loads the same, or there is no place ──> begins

While it loads, a sequence holds the blocks that are loaded and no place in the batch. The blocks are published as they
arrive. When it begins it lets go of them, so that it is admitted like a sequence whose prefix somebody else computed;
they are then the last ones to be evicted.

Sequences that want the same extents share a load: one loads, the others wait for it, no longer than computing takes. At
most `max_loading` load at a time, those of the highest priority first. How many blocks they take at most:
`engine/core/load_room.py`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from disagg.engine.core.load_room import load_room
from disagg.engine.core.scheduler import Scheduler
from disagg.engine.request import Sequence
from disagg.engine.tiers.extents import extent_keys
from disagg.engine.tiers.load_times import Loadable, LoadPlan, plan_load
from disagg.engine.tiers.store import DiskRead, TierStore
from disagg.engine.tiers.tier import Pins
from disagg.engine.tiers.trial_reads import TrialReads
from disagg.proto.ids import AttemptKey, BlockHash
from disagg.proto.messages import EXTENT_TOKENS

MOST_IN_A_TURN = 32
"""Extents that are copied between two steps while nothing runs; then commands are looked at."""
MOST_BESIDE_OTHERS = 2
"""The same while sequences run, which wait for the copies: about a millisecond for 3 MB."""
LEAST_S = 0.05
"""No load ends sooner for taking too long: it may have to wait for a step."""
_TURN_WEIGHT = 1 / 8
"""Weight of the latest turn in their mean duration."""
_LATE = 2.0
"""A load that takes more than so many times as long as predicted ends."""


@dataclass(slots=True, eq=False)
class _Waiting:
    sequence: Sequence
    until: float | None = None
    """When it begins without a load; None until it was first tried."""
    tried_at: int = -1
    """Number of loads that had ended when it was last tried."""


@dataclass(slots=True, eq=False)
class _Load:
    sequence: Sequence
    keys: tuple[BlockHash, ...]
    """Extents of the prompt up to the last one to load."""
    plan: LoadPlan
    end: int
    """Extents before this one are loaded; fewer than planned where one cannot be read."""
    next: int
    """Number of the extent that is copied next."""
    next_read: int
    """Number of the file that is ordered next."""
    began: float
    until: float
    host_pins: Pins
    disk_pins: Pins
    arrived: dict[int, DiskRead] = field(default_factory=dict)
    """Files that were read before those in front of them."""
    is_over: bool = False

    @property
    def is_done(self) -> bool:
        """Whether all is there."""
        return self.next >= self.end

    @property
    def can_go_on(self) -> bool:
        """Whether the next extent can be copied now."""
        return self.next < self.end and (self.next < self.plan.host_end or self.next in self.arrived)


class Loading:
    """Owner: the tiers of a worker.

    Args:
        store: what the tiers hold.
        scheduler: the sequences and their blocks.
        compute_ms: predicted milliseconds to compute prompt tokens [start, end).
        begin: takes each sequence that loads no more.
        max_loading: sequences that load at a time.
    """

    def __init__(
        self,
        store: TierStore,
        scheduler: Scheduler,
        compute_ms: Callable[[int, int], float],
        begin: Callable[[Sequence], None],
        max_loading: int,
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._compute_ms = compute_ms
        self._begin_sequence = begin
        self._max_loading = max_loading
        self._trials = TrialReads(store)
        self._waiting: OrderedDict[AttemptKey, _Waiting] = OrderedDict()
        self._loads: dict[AttemptKey, _Load] = {}
        self._num_ended = 0
        self._turn_at: float | None = None
        """When the last turn began beside which sequences run."""
        self._turn_ms = 0.0
        """Mean time between two such turns; 0 until there were some."""
        self.num_loaded_tokens = 0
        """Tokens that were loaded since the start."""
        self.num_late = 0
        """Loads that ended because they took too long."""

    def __len__(self) -> int:
        """Sequences in state LOADING."""
        return len(self._waiting) + len(self._loads)

    @property
    def can_go_on(self) -> bool:
        """Whether `advance` would change something without a command or a deadline."""
        return any(load.can_go_on for load in self._loads.values()) or any(
            each.tried_at != self._num_ended for each in self._waiting.values()
        )

    @property
    def due_at(self) -> float:
        """When `advance` must be called at the latest."""
        untils = [load.until for load in self._loads.values()]
        untils += [each.until for each in self._waiting.values() if each.until is not None]
        return min(untils, default=math.inf)

    def note_turn(self, now: float) -> None:
        """A turn begins."""
        if not self._scheduler.running:
            self._turn_at = None
            return
        if self._turn_at is not None:
            ms = (now - self._turn_at) * 1e3
            self._turn_ms += (ms - self._turn_ms) * (_TURN_WEIGHT if self._turn_ms else 1.0)
        self._turn_at = now

    @property
    def copy_ms(self) -> float:
        """Milliseconds between two copies at least; 0 where no sequence runs that they would hold up."""
        return self._turn_ms / MOST_BESIDE_OTHERS if self._scheduler.running else 0.0

    def queue_ms(self, now: float) -> float:
        """Milliseconds until all is loaded that is being loaded, at least."""
        num_ahead, ms = self._ahead(now)
        return max(ms, num_ahead * self.copy_ms)

    def wants(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that came now is better loaded than computed."""
        return self._plan(sequence, now) is not None

    def add(self, sequence: Sequence) -> None:
        """Load a sequence in state LOADING, from the next `advance` on."""
        self._waiting[sequence.key] = _Waiting(sequence)

    def advance(self, now: float) -> int:
        """Copy what can be copied, and start what can start; how many sequences began, which now wait as prompts."""
        num_before = len(self)
        left = MOST_BESIDE_OTHERS if self._scheduler.running else MOST_IN_A_TURN
        left = self._go_on(now, left)
        self._start_waiting(now)
        left = self._go_on(now, left)
        self._start_waiting(now)
        return num_before - len(self)

    def forget(self, key: AttemptKey) -> None:
        """The sequence is over."""
        self._waiting.pop(key, None)
        load = self._loads.get(key)
        if load is not None:
            self._end(load)

    def check_integrity(self, loading: set[AttemptKey]) -> list[str]:
        """Findings, given the sequences in state LOADING; empty when sound."""
        if loading == {*self._waiting, *self._loads} and not self._waiting.keys() & self._loads.keys():
            return []
        return ["loads are kept for other sequences than those in state loading"]

    # ------------------------------------------------------------ inside

    def _plan(self, sequence: Sequence, now: float) -> LoadPlan | None:
        kv_cache, store = self._scheduler.kv_cache, self._store
        most = sequence.num_tokens if sequence.is_prefix else kv_cache.most_cached(sequence)
        keys = extent_keys(sequence.block_hashes, most)
        if not keys:
            return None
        num_host, num_disk = store.num_held(keys)
        if not (num_host or num_disk):
            return None
        blocks = kv_cache.blocks
        cached_tokens = len(blocks.match_prefix(sequence.block_hashes, most)) * blocks.block_size
        times = store.host_times.ms(now), store.disk_times.ms(now)
        latency_ms = store.disk_times.latency_ms
        has = Loadable(cached_tokens, num_host, num_disk, *times, *self._ahead(now), self.copy_ms, latency_ms)
        plan = plan_load(has, self._compute_ms)
        left_out = max(num_host, plan.end if plan is not None else cached_tokens // EXTENT_TOKENS)
        if left_out < num_disk:
            self._trials.begin(keys[:num_disk], left_out, now)
        return plan

    def _ahead(self, now: float) -> tuple[int, float]:
        """Extents that are still to be loaded, and the milliseconds that their tiers take for them."""
        num_host = sum(max(0, min(load.end, load.plan.host_end) - load.next) for load in self._loads.values())
        num_ahead = sum(max(0, load.end - load.next) for load in self._loads.values())
        num_arrived = sum(len(load.arrived) for load in self._loads.values())
        host_ms, disk_ms = self._store.host_times.ms(now), self._store.disk_times.ms(now)
        return num_ahead, num_host * host_ms + (num_ahead - num_host - num_arrived) * disk_ms

    def _start_waiting(self, now: float) -> None:
        for each in sorted(self._waiting.values(), key=lambda each: -each.sequence.spec.priority):
            if each.until is not None and now >= each.until:
                self.num_late += 1
                self._begin(each.sequence)
            elif each.tried_at != self._num_ended:
                each.tried_at = self._num_ended
                self._try(each, now)

    def _try(self, waiting: _Waiting, now: float) -> None:
        sequence = waiting.sequence
        plan = self._plan(sequence, now)
        if plan is None:
            self._begin(sequence)
            return
        keys = extent_keys(sequence.block_hashes, plan.end * EXTENT_TOKENS)
        is_shared = any(keys[plan.start] in load.keys[load.next :] for load in self._loads.values())
        if is_shared or len(self._loads) >= self._max_loading:
            if waiting.until is None:
                waiting.until = now + max(LEAST_S, plan.compute_ms / 1e3)
            return
        end = self._most_with_blocks(sequence, plan)
        if end <= plan.start or not self._scheduler.kv_cache.admit_loading(
            sequence, plan.start * EXTENT_TOKENS, end * EXTENT_TOKENS
        ):
            self._begin(sequence)
            return
        del self._waiting[sequence.key]
        host_end = min(end, plan.host_end)
        sequence.loading_tokens = end * EXTENT_TOKENS
        load = self._loads[sequence.key] = _Load(
            sequence=sequence,
            keys=keys[:end],
            plan=plan._replace(host_end=host_end, end=end),
            end=end,
            next=plan.start,
            next_read=max(plan.start, host_end),
            began=now,
            until=now + max(LEAST_S, _LATE * plan.ms / 1e3, plan.compute_ms / 1e3),
            host_pins=self._store.host.pin(keys[:host_end]) if host_end > plan.start else (),
            disk_pins=self._store.disk.pin(keys[:end]) if end > host_end else (),
        )
        self._order_reads(load)

    def _most_with_blocks(self, sequence: Sequence, plan: LoadPlan) -> int:
        """Up to which extent there are blocks for the load."""
        if self._scheduler.num_preempted:  # Those go first.
            return plan.start
        blocks = self._scheduler.blocks
        per_extent = EXTENT_TOKENS // blocks.block_size
        num_taken = sum(load.plan.end - load.plan.start for load in self._loads.values()) * per_extent
        matched = blocks.match_prefix(sequence.block_hashes, plan.start * EXTENT_TOKENS)
        num_blocks = load_room(self._scheduler, sequence, matched, num_taken)
        return min(plan.end, plan.start + num_blocks // per_extent)

    def _go_on(self, now: float, left: int) -> int:
        for load in sorted(self._loads.values(), key=lambda load: -load.sequence.spec.priority):
            while left > 0 and load.can_go_on:
                left -= 1
                self._copy_next(load, now)
            self._order_reads(load)
            if not load.is_done and now < load.until:
                continue
            if not load.is_done:
                self.num_late += 1
                if load.next >= load.plan.host_end:
                    self._store.disk_times.late(load.began, now)
            self._end(load)
            self._begin(load.sequence)
        return left

    def _copy_next(self, load: _Load, now: float) -> None:
        sequence, index, kv_cache = load.sequence, load.next, self._scheduler.kv_cache
        kv_cache.extend(sequence, (index + 1) * EXTENT_TOKENS)
        if index < load.plan.host_end:
            ok = self._store.scatter_host(load.keys[index], sequence.block_table, index, now)
        else:
            ok = self._store.scatter_read(load.arrived.pop(index), sequence.block_table)
        if not ok:
            load.end = index
            return
        load.next = index + 1
        start, sequence.num_computed_tokens = sequence.num_computed_tokens, load.next * EXTENT_TOKENS
        kv_cache.publish(sequence, start)
        self.num_loaded_tokens += EXTENT_TOKENS

    def _order_reads(self, load: _Load) -> None:
        while load.next_read < load.end:
            index = load.next_read
            is_first = index == max(load.plan.start, load.plan.host_end)
            if not self._store.read(load.disk_pins[index].extent, index, partial(self._take, load), is_first=is_first):
                return
            load.next_read += 1

    def _take(self, load: _Load, read: DiskRead) -> bool:
        if load.is_over:
            return False
        if read.buffer is None:
            load.end = min(load.end, read.number)
            return False
        if read.number >= load.end:
            return False
        load.arrived[read.number] = read
        return True

    def _end(self, load: _Load) -> None:
        del self._loads[load.sequence.key]
        self._num_ended += 1
        load.is_over = True
        for read in load.arrived.values():
            self._store.give_back(read)
        load.arrived.clear()
        self._store.host.unpin(load.host_pins)
        self._store.disk.unpin(load.disk_pins)

    def _begin(self, sequence: Sequence) -> None:
        self._waiting.pop(sequence.key, None)
        self._begin_sequence(sequence)
