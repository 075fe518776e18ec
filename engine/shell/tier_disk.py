"""The thread that reads and writes the files of a worker's disk tier.

    engine thread ──orders (`DiskPort`)──> this thread ──answers, as commands──> engine thread

Reads go before writes, since a prompt waits for them. The queue of writes is bounded (`has_room`), that of reads by the
buffers that they need. The thread is never waited for but at the end: a disk that hangs holds up nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.commands import TierAnswer, TierFailed, TierRead, TierScanned, TierWritten
from disagg.engine.config import WorkerConfig
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.shell.extent_files import GONE, ExtentFiles
from disagg.engine.tiers.extent_file import extent_format
from disagg.engine.tiers.extents import Extent
from disagg.engine.tiers.store import DiskPort
from disagg.engine.tiers.tiers import extent_bytes
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

MOST_WRITES = 16
"""Writes that wait at a time."""


class TierDisk(DiskPort):
    """Owner of the folder once `start` was called. Its orders come from the engine thread."""

    def __init__(self, files: ExtentFiles) -> None:
        self._files = files
        self._reads: deque[Callable[[], None]] = deque()
        self._others: deque[Callable[[], None]] = deque()
        self._num_writes = 0
        self._wake = threading.Condition()
        self._stopping = False
        self._post: Callable[[TierAnswer], None] = lambda answer: None
        self._now = process_clock().now
        self._logged: set[str] = set()
        """Faults of files and of the folder that were logged."""
        self._thread = threading.Thread(target=self._run, name="tier", daemon=True)

    def start(self, post: Callable[[TierAnswer], None]) -> None:
        """Begin to carry out orders; `post` takes the answers, on this thread."""
        self._post = post
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End after the present order; whether that was in time. What was ordered and not begun is not done."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._files.close()
        return True

    @property
    def has_room(self) -> bool:
        """Whether another write may be ordered."""
        return self._num_writes < MOST_WRITES

    def scan(self) -> None:
        """Find out what the folder has. Answer: `TierScanned` or `TierFailed`."""
        self._order(self._others, self._scan)

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Write a file, behind all earlier writes and deletions. Answer: `TierWritten`."""
        with self._wake:
            self._num_writes += 1
        self._order(self._others, lambda: self._write(number, extent, payload))

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        """Read a file, before anything that waits. Answer: `TierRead`."""
        self._order(self._reads, lambda: self._read(number, extent, payload))

    def delete(self, extents: Iterable[Extent]) -> None:
        """Delete files, behind all earlier writes. No answer."""
        gone = tuple(extents)
        self._order(self._others, lambda: self._delete(gone))

    # ------------------------------------------------------------ inside

    def _order(self, queue: deque[Callable[[], None]], order: Callable[[], None]) -> None:
        with self._wake:
            queue.append(order)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._reads or self._others or self._stopping)
                if self._stopping:
                    return
                order = (self._reads or self._others).popleft()
            order()

    def _scan(self) -> None:
        try:
            self._post(TierScanned(tuple(self._files.scan())))
        except Exception as error:
            self._failed(error)

    def _write(self, number: int, extent: Extent, payload: Buffer) -> None:
        error: Exception | None = None
        try:
            self._files.write(extent, payload)
        except Exception as failure:
            error = failure
        with self._wake:
            self._num_writes -= 1
        self._post(TierWritten(number, error is None))
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
        if fault and fault != GONE and fault not in self._logged:
            self._logged.add(fault)
            text = "a file of the KV tier in %s is not used, it has %s; further ones like it are only counted"
            logger.warning(text, self._files.folder, fault)
        self._post(TierRead(number, not fault, (self._now() - began) * 1e3))

    def _delete(self, extents: Iterable[Extent]) -> None:
        try:
            self._files.delete(extents)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Turn the tier off; an error of any kind, or the thread would end with it and nobody would be answered."""
        if isinstance(error, ConfigError):
            if str(error) not in self._logged:
                self._logged.add(str(error))
                logger.warning("%s", error)
            self._post(TierFailed("the folder is not this worker's alone"))
        elif isinstance(error, OSError) and error.strerror:
            self._post(TierFailed(error.strerror))
        else:
            logger.error("the files of the KV tier in %s failed", self._files.folder, exc_info=error)
            self._post(TierFailed(type(error).__name__))


def open_tier_disk(config: WorkerConfig, runner: ModelRunner, secret: ClusterSecret) -> TierDisk | None:
    """The disk tier of a worker, not started; None where it has none.

    Raises:
        ConfigError: its folder cannot be used, or is another worker's.
    """
    if config.tiers is None or config.tiers.disk is None or len(runner.layout.groups) > 1:
        return None
    disk = config.tiers.disk
    num_bytes = extent_bytes(runner.layout, runner.tp)
    format_ = extent_format(runner.fingerprint, runner.layout, runner.tp, num_bytes, secret)
    files = ExtentFiles(Path(disk.path), format_, is_shared=disk.shared)
    files.open()
    return TierDisk(files)
