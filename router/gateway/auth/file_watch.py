"""Reads files again when they change: keys and certificates, while the gateway runs.

A thread compares the status of the files (device, inode, size, time of change) once a second, not
their content. What cannot be used leaves everything as it was, and is logged once for each change.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0

Stamp = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class Watched:
    """Files that belong together, such as a certificate and its key."""

    name: str
    """Of the configuration's key, for the log."""
    paths: tuple[str, ...]
    reload: Callable[[], str]
    """Reads all of them and uses their content from now on; returns a description for the log. Raises `ConfigError`,
    and has changed nothing then. Called on the watch's thread."""


class FileWatch:
    """Owner of one thread, from `start` to `stop`.

    Args:
        watched: the files, as they are when this is made.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self._watched = tuple(watched)
        self._seen = [_stamps(each) for each in self._watched]
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
                logger.warning("%s: files changed and were read again: %s", each.name, each.reload())
            except ConfigError as error:
                logger.error(
                    "%s: changed files cannot be used, the earlier content stays in use until they change again: %s",
                    each.name,
                    error,
                )

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.look()
            except Exception:
                logger.exception("keys and certificates could not be checked for changes; next try in %g s", INTERVAL_S)


def _stamps(watched: Watched) -> tuple[Stamp, ...]:
    return tuple(_stamp(path) for path in watched.paths)


def _stamp(path: str) -> Stamp:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
