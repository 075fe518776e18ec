"""The thread that reads and writes the files of a worker's disk tier.

    engine thread ──orders (`DiskPort`)──> this thread ──answers, as commands──> engine thread

Reads go before writes, since a prompt waits for them. The queue of writes is bounded (`has_room`), that of reads by the
buffers that they need. The thread is never waited for but at the end: a disk that hangs holds up nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import (
    TierAnswer,
    TierFailed,
    TierForgotten,
    TierFull,
    TierRead,
    TierScanned,
    TierWritten,
)
from disagg.engine.config import WorkerConfig
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.shell.extent_files import FULL, GONE, LOCK_WAIT_S, ExtentFiles
from disagg.engine.shell.order_thread import OrderThread
from disagg.engine.shell.parts import as_it_is
from disagg.engine.tiers.extent_file import extent_format
from disagg.engine.tiers.extents import Extent
from disagg.engine.tiers.found import arranged
from disagg.engine.tiers.sizes import extent_bytes
from disagg.engine.tiers.store import MOST_WRITES, DiskPort
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

SCANNED_OVER_KEPT = 2
"""Files that one scan looks at, over those that the folder may have."""


class TierDisk(DiskPort):
    """Owner of the folder once `start` was called. Its orders come from the engine thread.

    What a scan finds beyond `most_files` is deleted, and what is in no chain; of a shared folder only as much as it has
    too many files, since they may be of use to others. So it has at most that many, and what is written between two
    scans.
    """

    def __init__(self, files: ExtentFiles, most_files: int, *, is_shared: bool = False) -> None:
        self._files = files
        self._most_files = most_files
        self._is_shared = is_shared
        self._known: set[Extent] = set()
        """Extents that the engine knows of."""
        self._is_read = False
        """Whether all that the folder had is known."""
        self._num_writes = 0
        self._counting = threading.Lock()
        self._post: Callable[[TierAnswer], None] = lambda answer: None
        self._now = process_clock().now
        self._logged: set[str] = set()
        """What was logged of files and of the folder."""
        self._thread = OrderThread("tier")

    def start(self, post: Callable[[TierAnswer], None]) -> None:
        """Begin to carry out orders; `post` takes the answers, on this thread."""
        self._post = post
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the present order; whether that was in time. What was ordered and not begun is not done."""
        if not self._thread.stop(timeout_s):
            return False
        self._files.close()
        return True

    @property
    def has_room(self) -> bool:
        """Whether another write may be ordered."""
        return self._num_writes < MOST_WRITES

    def scan(self, *, anew: bool) -> None:
        """Find out what the folder has; of one that nobody else writes to, and that was read, whether it is still
        there. Answer: `TierScanned` or `TierFailed`."""
        self._thread.order(lambda: self._scan(anew=anew))

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Write a file, behind all earlier writes and deletions. Answer: `TierWritten`."""
        with self._counting:
            self._num_writes += 1
        self._thread.order(lambda: self._write(number, extent, payload))

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Read a file, before anything that waits. Answer: `TierRead`."""
        self._thread.order(lambda: self._read(number, extent, payload), is_first=True)

    def delete(self, extents: Iterable[Extent]) -> None:
        """Delete files, behind all earlier writes. No answer."""
        gone = tuple(extents)
        self._thread.order(lambda: self._delete(gone))

    def forget(self, tag: bytes) -> None:
        """Delete all files of a tenant, behind all earlier writes. Answer: `TierForgotten`."""
        self._thread.order(lambda: self._forget(tag))

    # ------------------------------------------------------------ inside

    def _scan(self, *, anew: bool) -> None:
        most = self._most_files
        try:
            if self._is_read and not (anew or self._is_shared):
                self._files.look()
                self._post(TierScanned(()))
                return
            listing = self._files.scan(SCANNED_OVER_KEPT * most + 1)
            found = arranged(listing.extents, most)
            num_too_many = len(listing.extents) - most if self._is_shared else len(found.left)
            self._files.delete(found.left[: max(0, num_too_many)])
        except Exception as error:
            self._failed(error, of_scan=True)
            return
        if not listing.is_whole:
            self._log_once("%s has more than %d files of KV; the others are looked at later", self._files.folder, most)
        if anew:
            self._known.clear()
        now = set(found.extents)
        new = tuple([extent for extent in found.extents if extent not in self._known])
        gone = tuple([extent.key for extent in self._known - now])
        self._known = now
        self._is_read = listing.is_whole
        self._post(TierScanned(new, gone))

    def _write(self, number: int, extent: Extent, payload: Buffer) -> None:
        error: Exception | None = None
        began, cpu_began = self._now(), time.thread_time()
        try:
            self._files.write(extent, payload)
            self._known.add(extent)
        except Exception as failure:
            error = failure
        ms, cpu_ms = (self._now() - began) * 1e3, (time.thread_time() - cpu_began) * 1e3
        with self._counting:
            self._num_writes -= 1
        self._post(TierWritten(number, error is None, ms, cpu_ms))
        if error is not None:
            self._failed(error)

    def _read(self, number: int, extent: Extent, payload: Buffer) -> None:
        began = self._now()
        try:
            fault = self._files.read(extent, payload)
        except Exception as error:
            self._post(TierRead(number, False))
            self._failed(error)
            return
        if fault and fault != GONE:
            text = "a file of the KV tier in %s is not used, it has %s; further ones like it are only counted"
            self._log_once(text, self._files.folder, fault)
        self._post(TierRead(number, not fault, (self._now() - began) * 1e3))

    def _delete(self, extents: Iterable[Extent]) -> None:
        self._known.difference_update(extents)
        try:
            self._files.delete(extents)
        except Exception as error:
            self._failed(error)

    def _forget(self, tag: bytes) -> None:
        self._known = {extent for extent in self._known if extent.tag != tag}
        try:
            self._files.forget(tag)
        except Exception as error:
            self._post(TierForgotten(tag, False))
            self._failed(error)
            return
        self._post(TierForgotten(tag, True))

    def _failed(self, error: Exception, *, of_scan: bool = False) -> None:
        """Turn the tier off, or writes; an error of any kind, or the thread would end with it and nobody would be
        answered."""
        if isinstance(error, ConfigError):
            self._log_once("%s", error)
            self._post(TierFailed("the folder is not this worker's alone", of_scan))
        elif isinstance(error, OSError) and error.errno in FULL and not of_scan:
            self._post(TierFull(error.strerror or "full"))
        elif isinstance(error, OSError) and error.strerror:
            self._post(TierFailed(error.strerror, of_scan))
        else:
            logger.error("the files of the KV tier in %s failed", self._files.folder, exc_info=error)
            self._post(TierFailed(type(error).__name__, of_scan))

    def _log_once(self, text: str, *values: object) -> None:
        message = text % values
        if message not in self._logged:
            self._logged.add(message)
            logger.warning("%s", message)


def open_tier_disk(
    config: WorkerConfig,
    runner: ModelRunner,
    secret: ClusterSecret,
    wrap_files: Callable[[ExtentFiles], ExtentFiles] = as_it_is,
) -> TierDisk | None:
    """The disk tier of a worker, not started; None where it has none. `wrap_files`: what is put around its files.

    Raises:
        ConfigError: its folder cannot be used, or is another worker's and stays that for `LOCK_WAIT_S`.
    """
    if config.tiers is None or config.tiers.disk is None or len(runner.layout.groups) > 1:
        return None
    disk = config.tiers.disk
    num_bytes = extent_bytes(runner.layout, runner.shape.tp)
    computed = f"{runner.fingerprint} {runner.arithmetic}"
    format_ = extent_format(computed, runner.layout, runner.shape.tp, num_bytes, secret)
    files = ExtentFiles(Path(disk.path), format_, is_shared=disk.shared)
    files.open(LOCK_WAIT_S)
    return TierDisk(wrap_files(files), disk.bytes // num_bytes, is_shared=disk.shared)
