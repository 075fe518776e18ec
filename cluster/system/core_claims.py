"""Which of a machine's cores a worker takes for itself, where nobody plans them: on the nodes of a Ray cluster.

Each core is a file in a folder that all of a user's workers on the machine share, and a lock on it is the claim. The
kernel drops a lock with its process, so nothing is left of a worker that was killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


class CoreClaims:
    """Owner of the locks that it took. They last until `close`, or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: list[int] = []

    def take(self, count: int, available: Sequence[int]) -> tuple[int, ...]:
        """`count` cores of the `available` ones that no other process claims; fewer where there are fewer cores. Where
        all are claimed, cores are shared, which is warned about.

        Raises:
            OSError: if the folder cannot be used.
        """
        free = [core for core in available if len(self._fds) < count and self._claim(core)]
        missing = min(count, len(available)) - len(free)
        if missing > 0:
            shared = [core for core in available if core not in free][:missing]
            logger.warning("cores %s are shared with other workers: fine for trying out, not for timing", shared)
            free += shared
        return tuple(free)

    def close(self) -> None:
        """Give all claims back. Idempotent."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _claim(self, core: int) -> bool:
        fd = os.open(self._folder / f"core-{core}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fds.append(fd)
        return True


def shared_folder() -> Path:
    """The folder of this user's claims on this machine; made if it is missing.

    Raises:
        OSError: if it cannot be made, or is another user's.
    """
    folder = Path(tempfile.gettempdir()) / f"disagg-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    return folder
