"""The tiers of one worker, the memory behind them, and the copies: host memory, and files that a thread of the shell
reads and writes. Pure: what takes long is ordered here, and answered by a command.

    write    blocks ──gather──> slot of host memory ──order──> file        a file is written from the slot, which
                          └───> staging buffer ───────order──> file        is pinned until then, or from a buffer
    load     slot ──scatter──> blocks         file ──order──> staging buffer ──scatter──> blocks

Whether files are read and written is decided in `folder.py`. A folder that was not used is scanned like at the start,
because what is in it is not known any more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple, Protocol

from disagg.engine.plan import Buffer, ModelRunner, is_fatal
from disagg.engine.tiers.extents import Chain, Extent
from disagg.engine.tiers.folder import Folder
from disagg.engine.tiers.load_times import LoadTimes
from disagg.engine.tiers.sizes import MAX_STAGING
from disagg.engine.tiers.tier import Pins, Tier, Writing
from disagg.proto.ids import BlockHash
from disagg.proto.messages import EXTENT_TOKENS, KvEvent, TierCounts, TierName, TierRemoved, TierStored

_log = logging.getLogger(__name__)

MOST_WRITES = 16
"""Writes of files that wait at a time."""
LEFT_FOR_READS = 4
"""Buffers that writes leave free."""
MOST_TAKEN_IN = 2048
"""Extents of a scan that are taken in between two steps while nothing runs: some ten milliseconds."""
MOST_TAKEN_IN_BESIDE_OTHERS = 256
"""Extents of a scan that are taken in between two steps while sequences run."""
_HOST_BYTES_PER_MS, _DISK_BYTES_PER_MS = 1e6, 1e5
"""Assumed until a load was measured."""


class DiskPort(Protocol):
    """The files of the disk tier. Each call returns at once; the answers are commands, see `engine/commands.py`."""

    @property
    def can_vanish(self) -> bool:
        """Whether somebody may remove or replace the folder."""
        return True

    @property
    def has_room(self) -> bool:
        """Whether another write may be ordered."""
        ...

    def scan(self, *, anew: bool) -> None:
        """Find out what the folder has, behind all earlier writes and deletions. `anew`: nothing counts as known.
        Answer: `TierScanned`, or `TierFailed` of a scan."""
        ...

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Write a file; the buffer is not changed until the answer, `TierWritten`."""
        ...

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Read a file and check it. Answer: `TierRead`."""
        ...

    def delete(self, extents: Iterable[Extent]) -> None:
        """Delete files, where they are there. No answer."""
        ...

    def forget(self, tag: bytes) -> None:
        """Delete all files of a tenant, behind all earlier writes. Answer: `TierForgotten`."""
        ...


class DiskRead(NamedTuple):
    """A read that was answered."""

    number: int
    """Number of the extent in its chain."""
    buffer: Buffer | None
    """The KV; None where it could not be read."""


@dataclass(slots=True)
class _FileWrite:
    writing: Writing
    buffer: Buffer | None
    """Staging buffer; None where it is written from a slot of host memory."""
    host_pins: Pins


@dataclass(slots=True)
class _FileRead:
    extent: Extent
    index: int
    buffer: Buffer
    deliver: Callable[[DiskRead], bool]
    is_first: bool


@dataclass(slots=True)
class _Counts:
    written: int = 0
    loaded: int = 0
    failed: int = 0


@dataclass(slots=True)
class TierParts:
    """What the shell gives to the tiers of a worker."""

    clock: Callable[[], float] = field(default=lambda: 0.0)
    """By which copies are measured."""
    disk: DiskPort | None = None
    wall_clock: Callable[[], float] = field(default=lambda: 0.0)
    """Seconds since the epoch."""


Written = Literal["written", "present", "lacking", "failed"]
"""Result of a write: made or ordered; not needed; the blocks are gone; the copy failed, or there is no room for it."""


class TierStore:
    """Owner: the tiers of a worker.

    Args:
        runner: makes the copies.
        extent_bytes: bytes of an extent.
        host_bytes: of host memory; 0 for none.
        disk_bytes: of the folder, with `parts.disk` only.
        parts: clock and files.
        is_shared: whether others write to the folder, too.
        share, keep_s: see `Tier`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        extent_bytes: int,
        host_bytes: int,
        disk_bytes: int,
        parts: TierParts,
        is_shared: bool = False,
        share: float = 0.0,
        keep_s: float = math.inf,
    ) -> None:
        self._runner = runner
        self._extent_bytes = extent_bytes
        self._clock, self._wall_clock = parts.clock, parts.wall_clock
        self._port = parts.disk
        self._now = 0.0
        self._is_shared = is_shared
        self.host = Tier(host_bytes // extent_bytes, share, keep_s)
        self.disk = Tier(disk_bytes // extent_bytes if parts.disk is not None else 0, share, keep_s)
        self.host_times = LoadTimes(extent_bytes / _HOST_BYTES_PER_MS)
        self.disk_times = LoadTimes(extent_bytes / _DISK_BYTES_PER_MS, has_trials=True)
        self._folder = Folder(
            is_there=parts.disk is not None, is_watched=is_shared or (parts.disk is not None and parts.disk.can_vanish)
        )
        self._forgotten: set[bytes] = set()
        """Tenants whose files are to be deleted, until they are."""
        self._buffers: dict[int, Buffer] = {}
        """Memory of the slots of host memory, allocated at its first use."""
        self._staging: list[Buffer] = []
        self._num_staging = 0
        self._numbers = 0
        self._writes: dict[int, _FileWrite] = {}
        self._reads: dict[int, _FileRead] = {}
        self._host_counts, self._disk_counts = _Counts(), _Counts()

    # ------------------------------------------------------------ what there is

    @property
    def uses_disk(self) -> bool:
        """Whether files are read now."""
        return self._folder.is_on and not self.disk.is_clearing

    @property
    def can_write(self) -> bool:
        """Whether `write` may be called now."""
        if not self._writes_files or self._port is None:
            return self.host.num_slots > 0
        num_free = len(self._staging) + MAX_STAGING - self._num_staging
        return self._port.has_room and num_free > LEFT_FOR_READS and not self.disk.can_go_on

    @property
    def _writes_files(self) -> bool:
        return self.uses_disk and self._folder.takes_files(self._now)

    @property
    def due_at(self) -> float:
        """When `look_again` has something to do; infinite where it has not."""
        return self._folder.due_at

    @property
    def can_go_on(self) -> bool:
        """Whether `go_on` has something to do."""
        return self.host.can_go_on or self.disk.can_go_on

    def go_on(self, *, is_running: bool) -> None:
        """Take in a part of what was found, and drop a part of what is lost. `is_running`: sequences wait for it."""
        most = MOST_TAKEN_IN_BESIDE_OTHERS if is_running else MOST_TAKEN_IN
        self.host.go_on(most)
        left = self.disk.go_on(most)
        if left and not self._is_shared and self._port is not None:
            self._port.delete(left)
        self._delete_removed()

    def num_held(self, keys: Seq[BlockHash]) -> tuple[int, int]:
        """Leading extents of a chain in host memory, and on disk."""
        return self.host.num_held(keys), self.disk.num_held(keys) if self.uses_disk else 0

    def lacks(self, key: BlockHash) -> bool:
        """Whether some tier has neither this extent nor is getting it."""
        return (self.host.num_slots > 0 and key not in self.host) or (self._writes_files and key not in self.disk)

    def note_time(self, now: float) -> None:
        """The time of what follows."""
        self._now = max(self._now, now)
        self.host.note_time(now)
        self.disk.note_time(now)

    def touch(self, chain: Chain) -> None:
        """A sequence used the chain."""
        self.host.touch(chain.keys, is_copy=chain.is_copy)
        self.disk.touch(chain.keys, is_copy=chain.is_copy)

    # ------------------------------------------------------------ writes

    def write(self, chain: Chain, index: int, blocks: Seq[int] | None) -> Written:
        """Write one extent to the tiers that lack it. `blocks`: those of the device cache that hold it; None where they
        are gone."""
        keys, key = chain.keys[: index + 1], chain.keys[index]
        to_host = self.host.num_slots > 0 and key not in self.host
        to_disk = self._writes_files and key not in self.disk
        if not (to_host or to_disk):
            return "present"
        if blocks is None and (to_host or self.host.slot_of(key) is None):
            return "lacking"
        done = False
        if to_host and blocks is not None:
            done = self._write_host(chain, keys, blocks)
        if to_disk:
            done = self._write_disk(chain, keys, blocks) or done
        self._delete_removed()
        return "written" if done else "failed"

    def _write_host(self, chain: Chain, keys: tuple[BlockHash, ...], blocks: Seq[int]) -> bool:
        writing = self.host.begin_write(keys, chain.tag, is_copy=chain.is_copy)
        if writing is None:
            return False
        buffer, began = self._buffer(writing.held.slot), self._clock()
        if ok := self._gather(blocks, buffer):
            self.host_times.assume((self._clock() - began) * 1e3)
        self.host.end_write(writing, ok=ok)
        self._host_counts.written += ok
        return ok

    def _write_disk(self, chain: Chain, keys: tuple[BlockHash, ...], blocks: Seq[int] | None) -> bool:
        assert self._port is not None, "a file is written without a folder"
        slot = self.host.slot_of(keys[-1])
        if slot is None and blocks is None:
            return False
        writing = self.disk.begin_write(keys, chain.tag, is_copy=chain.is_copy)
        if writing is None:
            return False
        self._delete_removed()  # what gave way, before the file is written
        if slot is not None:
            host_pins, payload, buffer = self.host.pin(keys), self._buffer(slot), None
        else:
            host_pins, payload = (), self._take_staging()
            buffer = payload
            if not self._gather(blocks or (), payload):
                self._staging.append(payload)
                self.disk.end_write(writing, ok=False)
                return False
        number = self._next_number()
        self._writes[number] = _FileWrite(writing, buffer, host_pins)
        self._folder.ordered(self._now)
        self._port.write(number, writing.held.extent, payload)
        return True

    def written(self, number: int, *, ok: bool, ms: float) -> None:
        """The answer to a write of a file."""
        write = self._writes.pop(number)
        self._folder.answered(self._now)
        is_gone = write.writing.held.is_gone
        self.disk.end_write(write.writing, ok=ok)
        self.host.unpin(write.host_pins)
        if write.buffer is not None:
            self._staging.append(write.buffer)
        if ok:
            self._disk_counts.written += 1
            self.disk_times.assume(ms)
            self._folder.wrote()
            if is_gone and self.uses_disk and self._port is not None and write.writing.held.extent.key not in self.disk:
                self._port.delete([write.writing.held.extent])
        else:
            self._disk_counts.failed += 1
        self._delete_removed()

    # ------------------------------------------------------------ loads

    def scatter_host(self, key: BlockHash, block_table: Seq[int], index: int, now: float) -> bool:
        """Copy extent number `index` of a chain from host memory into a sequence's blocks; whether that was done."""
        slot = self.host.slot_of(key)
        if slot is None:
            return False
        began = self._clock()
        ok = self._scatter(block_table, index, self._buffer(slot))
        if ok:
            self._host_counts.loaded += 1
            if (ms := (self._clock() - began) * 1e3) > 0.0:
                self.host_times.observe(ms, now)
        else:
            self._host_counts.failed += 1
            self.host.drop(key)
        return ok

    def scatter_read(self, read: DiskRead, block_table: Seq[int]) -> bool:
        """The same of what was read from a file; the buffer is given back."""
        assert read.buffer is not None, "there is nothing to scatter"
        ok = self._scatter(block_table, read.number, read.buffer)
        self.give_back(read)
        self._disk_counts.loaded += ok
        return ok

    def give_back(self, read: DiskRead) -> None:
        """The buffer of a read is not needed any more."""
        if read.buffer is not None:
            self._staging.append(read.buffer)

    @property
    def is_reading(self) -> bool:
        """Whether files are being read."""
        return bool(self._reads)

    def read(self, extent: Extent, index: int, deliver: Callable[[DiskRead], bool], *, is_first: bool = False) -> bool:
        """Order the read of the file of an extent, number `index` of its chain, if there is a buffer for it. `deliver`
        gets the answer, and returns whether it takes the buffer. `is_first`: of its load."""
        if self._port is None or not (self._staging or self._num_staging < MAX_STAGING):
            return False
        number, buffer = self._next_number(), self._take_staging()
        self._reads[number] = _FileRead(extent, index, buffer, deliver, is_first)
        self._folder.ordered(self._now)
        self._port.read(number, extent, buffer)
        return True

    def answered(self, number: int, *, ok: bool, ms: float, now: float) -> None:
        """The answer to a read."""
        read = self._reads.pop(number)
        self._folder.answered(self._now)
        if ok:
            self.disk_times.observe(ms, now, is_first=read.is_first)
        else:
            self._disk_counts.failed += 1
            self.disk.drop(read.extent.key)
            if self._is_shared:  # It may be good for others.
                self.disk.take_removed()
            self._delete_removed()
        if not (read.deliver(DiskRead(read.index, read.buffer if ok else None)) and ok):
            self._staging.append(read.buffer)

    # ------------------------------------------------------------ the folder

    def look_again(self, now: float) -> None:
        """Have the folder scanned, where that is due, and see whether it answers."""
        if self._port is None:
            return
        if self._folder.became_silent(now, self._wall_clock()):
            self.disk.clear()
        if self._folder.may_scan(now):
            for tag in self._forgotten:
                self._order_forgetting(tag)
            self._port.scan(anew=self._folder.scans_whole)

    def scanned(self, extents: Iterable[Extent], gone: Iterable[BlockHash], now: float) -> None:
        """What the folder has that was not known, and what it has no more."""
        self._folder.answered(now)
        if not self._folder.scanned(now):
            return
        if self._forgotten:
            self._folder.scan_later(now)
        self.disk.drop_all(gone)
        self.disk.add_found(extent for extent in extents if extent.tag not in self._forgotten)

    def folder_failed(self, reason: str, now: float, *, of_scan: bool) -> None:
        """The folder cannot be used."""
        if of_scan:
            self._folder.answered(now)
        self._folder.failed(reason, now, of_scan=of_scan)
        self.disk.clear()

    def folder_full(self, reason: str, now: float) -> None:
        """Files can be read, and not written."""
        self._folder.full(reason, now)

    def forget(self, tag: bytes) -> None:
        """Drop what a tenant has in all tiers, and delete its files, also those that are not known; where that fails,
        when the folder is scanned again."""
        self.host.forget(tag)
        self.disk.forget(tag)
        if self._port is not None:
            self._forgotten.add(tag)
            self._order_forgetting(tag)

    def forgotten(self, tag: bytes, *, ok: bool) -> None:
        """The answer to that."""
        self._folder.answered(self._now)
        if ok:
            self._forgotten.discard(tag)
        else:
            self._folder.scan_later(self._now)

    def _order_forgetting(self, tag: bytes) -> None:
        assert self._port is not None, "files are deleted without a folder"
        self._folder.ordered(self._now)
        self._port.forget(tag)

    # ------------------------------------------------------------ reports

    @property
    def names(self) -> tuple[TierName, ...]:
        """The tiers that there are."""
        return tuple(name for name, tier in self._tiers() if tier.num_slots)

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What can be loaded, or no more, since the last call; neighbours of one kind are merged."""
        events: list[KvEvent] = []
        for name, tier in self._tiers():
            for is_stored, changes in groupby(tier.drain_changes(), attrgetter("is_stored")):
                kind = TierStored if is_stored else TierRemoved
                events.append(kind(tier=name, hashes=tuple([change.key for change in changes])))
        return tuple(events)

    def snapshot(self) -> dict[TierName, tuple[BlockHash, ...]]:
        """All extents of each tier. Events that are not drained yet may follow: they change nothing in it."""
        return {name: tier.keys() for name, tier in self._tiers() if tier.num_slots}

    def _tiers(self) -> tuple[tuple[TierName, Tier], ...]:
        return ("host", self.host), ("disk", self.disk)

    def counts(self, now: float, *, copy_ms: float, queue_ms: float) -> tuple[TierCounts, ...]:
        """What was done with each tier since the start, and what it holds. `copy_ms`: between two copies at least;
        `queue_ms`: until what is being loaded is there."""
        host_ms = max(copy_ms, self.host_times.ms(now))
        disk_ms = max(copy_ms, self.disk_times.ms(now)) if self._folder.is_on else 0.0
        host = self._counts_of("host", self.host, self._host_counts, host_ms, queue_ms)
        queue_ms += self.disk_times.latency_ms
        disk = self._counts_of("disk", self.disk, self._disk_counts, disk_ms, queue_ms, self._folder.off_reason)
        return tuple([counts for tier, counts in ((self.host, host), (self.disk, disk)) if tier.num_slots])

    def _counts_of(
        self, name: TierName, tier: Tier, counts: _Counts, ms: float, queue_ms: float, off_reason: str = ""
    ) -> TierCounts:
        return TierCounts(
            name=name,
            extent_ms=ms,
            queue_ms=queue_ms,
            capacity_bytes=tier.num_slots * self._extent_bytes,
            held_bytes=len(tier) * self._extent_bytes,
            written_extents=counts.written,
            loaded_extents=counts.loaded,
            evicted_extents=tier.num_evicted,
            failed_extents=counts.failed,
            off_reason=off_reason,
        )

    def check_integrity(self, *, is_loading: bool) -> list[str]:
        """Findings; empty when sound. `is_loading`: whether sequences load."""
        num_used = len(self._reads) + sum(write.buffer is not None for write in self._writes.values())
        problems = self.host.check_integrity() + self.disk.check_integrity()
        if len(self._staging) + num_used > self._num_staging:
            problems.append("a staging buffer of the tiers was given back twice")
        if not (is_loading or self._writes or self._reads or self.can_go_on) and (
            self.host.num_pinned or self.disk.num_pinned
        ):
            problems.append("extents of the tiers are kept for nobody")
        return problems

    # ------------------------------------------------------------ inside

    def _gather(self, blocks: Seq[int], out: Buffer) -> bool:
        try:
            self._runner.gather(blocks, 0, EXTENT_TOKENS, out, self._runner.shape)
        except Exception as error:
            if is_fatal(error):
                raise
            _log.error("copying KV to a tier failed; it is not kept there", exc_info=error)
            return False
        return True

    def _scatter(self, block_table: Seq[int], index: int, data: Buffer) -> bool:
        start = index * EXTENT_TOKENS
        try:
            self._runner.scatter(block_table, start, start + EXTENT_TOKENS, data, self._runner.shape)
        except Exception as error:
            if is_fatal(error):
                raise
            _log.error("copying KV from a tier failed; it is computed", exc_info=error)
            return False
        return True

    def _buffer(self, slot: int) -> Buffer:
        if slot not in self._buffers:
            self._buffers[slot] = self._runner.new_staging(self._extent_bytes)
        return self._buffers[slot]

    def _take_staging(self) -> Buffer:
        if self._staging:
            return self._staging.pop()
        self._num_staging += 1
        return self._runner.new_staging(self._extent_bytes)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _delete_removed(self) -> None:
        self.host.take_removed()
        removed = self.disk.take_removed()
        if removed and self._port is not None:
            self._port.delete(removed)
