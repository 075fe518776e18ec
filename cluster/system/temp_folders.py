"""Folders for temporary files that do not outlive their process for long.

    TempFolder ──> a folder, and in it a file that this process has locked ──> remove
                   its process is killed: the lock is gone with it ──> the next `TempFolder` removes the folder

Processes that the killed process had started may outlive it by some seconds, such as agents of Ray. So the marked file
goes last, and a folder into which something was written meanwhile is removed by a later start.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

PREFIX: Final = "disagg-"
MARK: Final = ".owner"
"""Name of the file whose lock marks a folder as used; no folder without it is ever removed."""


class TempFolder:
    """Owner of one folder, from here until `remove` or the end of the process.

    Args:
        prefix: prefix of its name.
        parent: folder in which it is made; None for the system's place.

    Raises:
        OSError: if it cannot be made.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        remove_abandoned(Path(parent or tempfile.gettempdir()), PREFIX if prefix.startswith(PREFIX) else prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
        self._lock: int | None = _lock(self.path)

    def remove(self) -> None:
        """Remove it with all that is in it. Idempotent."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


@contextmanager
def temp_folder(prefix: str) -> Iterator[Path]:
    """A folder that exists while the body runs. Raises `OSError`."""
    folder = TempFolder(prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def remove_abandoned(parent: Path, prefix: str) -> list[Path]:
    """Remove the folders of processes that were killed, and return them. Folders of other users, locked ones and those
    without a mark stay."""
    try:
        found = [path for path in sorted(parent.iterdir()) if path.name.startswith(prefix)]
    except OSError:
        return []
    removed = [path for path in found if _remove_if_abandoned(path)]
    if removed:
        logger.info("removed %d folders that killed processes left, such as %s", len(removed), removed[0])
    return removed


def _lock(folder: Path) -> int:
    """Mark a folder as used by this process: the mark appears when it is locked."""
    fresh = folder / f"{MARK}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / MARK)
    return descriptor


def _remove_marked(folder: Path) -> None:
    """Remove a folder that contains its mark only. Raises `OSError` if it contains more; then it keeps the mark."""
    (folder / MARK).unlink()
    try:
        folder.rmdir()
    except OSError:
        (folder / MARK).touch(0o600)
        raise


def _remove_if_abandoned(folder: Path) -> bool:
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / MARK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()
        _remove_marked(folder)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
