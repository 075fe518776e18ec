"""Reads files again when they change: keys and certificates, while the gateway runs.

A thread compares the status of the files (device, inode, size, time of change) once a second, not
their content. What cannot be used leaves everything as it was, and is logged once for each change.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from disagg.connections.watched_files import Stamp, stamp
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Watched:
    """Files that belong together, such as a certificate and its key."""

    name: str
    """Name of the configuration's key, for the log."""
    paths: tuple[str, ...]
    reload: Callable[[], str]
    """Reads all of them and uses their content from now on; returns a description for the log. Raises `ConfigError`,
    and has changed nothing then. Called on the watch's thread."""


class FileWatch:
    """Owner of one thread, from `start` to `stop`.

    Args:
        watched: the files, as they are when this is made, just after they were read.
        wall_clock: seconds since the epoch.
    """

    def __init__(self, watched: Sequence[Watched], wall_clock: Callable[[], float] = time.time) -> None:
        self._watched = tuple(watched)
        self._wall_clock = wall_clock
        self._seen = [_stamps(each) for each in self._watched]
        self._read_at = [wall_clock() for _ in self._watched]
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look; does nothing without files."""
        if self._watched:
            self._thread = threading.Thread(target=self._run, name="file-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            thread.join()

    def look(self) -> None:
        """Read what has changed since the last look."""
        for index, each in enumerate(self._watched):
            now = _stamps(each)
            if now == self._seen[index]:
                continue
            self._seen[index] = now
            try:
                logger.info("%s: files changed and were read again: %s", each.name, each.reload())
                self._read_at[index] = self._wall_clock()
            except ConfigError as error:
                logger.error(
                    "%s: changed files cannot be used, what was read at %s stays in use until they change again: %s",
                    each.name,
                    datetime.datetime.fromtimestamp(self._read_at[index], datetime.UTC).isoformat(timespec="seconds"),
                    error,
                )

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.look()
            except Exception:
                logger.exception("keys and certificates could not be checked for changes; next try in %g s", INTERVAL_S)


def _stamps(watched: Watched) -> tuple[Stamp, ...]:
    return tuple(stamp(path) for path in watched.paths)
