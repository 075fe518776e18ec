"""Cores and CUDA devices that this process may use, is pinned to, and claims.

Claims are for the nodes of a Ray cluster, where no plan assigns cores. Each core is a file in a folder that all of a
user's workers on the machine share, and a lock on it is the claim. The kernel drops a lock with its process, so a
killed worker leaves no claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def available_cores() -> tuple[int, ...]:
    """The cores that this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def pin_process(cores: Iterable[int]) -> bool:
    """Pin all threads of this process to `cores`; threads to come inherit it. No cores: nothing is done.

    Returns:
        Whether the process is pinned now. A machine that lacks the cores, or forbids it, is warned about, not an error.
    """
    wanted = tuple(cores)
    if not wanted:
        return False
    try:
        _pin_threads(os.getpid(), wanted)
    except OSError as error:
        logger.warning("cannot pin to cores %s: %s", wanted, error.strerror)
        return False
    return True


def pin_unpinned(pid: int, anywhere: set[int], cores: Iterable[int]) -> None:
    """Pin the threads of another process, which may be gone, unless it is on other cores than `anywhere` already."""
    try:
        if os.sched_getaffinity(pid) == anywhere:
            _pin_threads(pid, tuple(cores))
    except OSError as error:
        logger.info("process %d cannot be pinned: %s", pid, error.strerror)


def _pin_threads(pid: int, cores: Sequence[int]) -> None:
    """Pin until no thread is new: a thread that started meanwhile has the cores of the thread that started it."""
    seen: set[str] = set()
    while new := {task.name for task in Path(f"/proc/{pid}/task").iterdir()} - seen:
        seen |= new
        for name in new:
            with contextlib.suppress(ProcessLookupError):  # the thread ended since it was listed
                os.sched_setaffinity(int(name), cores)


def num_cuda_devices(environment: Mapping[str, str], device_files: Path = Path("/dev")) -> int | None:
    """Number of CUDA devices of this machine, or of those that CUDA_VISIBLE_DEVICES names, without loading CUDA; None
    where it is unknown."""
    if (visible := environment.get(VISIBLE_DEVICES)) is not None:
        return len([name for name in visible.split(",") if name])
    return sum(file.name[len("nvidia") :].isdigit() for file in device_files.glob("nvidia*")) or None


def see_own_devices(device: str, count: int) -> str:
    """Let this process see only `count` CUDA devices from `device` on, and return the name that the first of them has
    then; another kind of device is returned unchanged. To be called before anything uses CUDA."""
    visible = own_devices(device, count, os.environ.get(VISIBLE_DEVICES))
    if visible is None:
        return device
    os.environ[VISIBLE_DEVICES] = visible
    return "cuda"


def own_devices(device: str, count: int, visible: str | None) -> str | None:
    """Value of CUDA_VISIBLE_DEVICES for a process that uses `count` CUDA devices from `device` on, if it is `visible`
    now; they are then the first that the process sees. None: it stays unchanged, because `device` is not a CUDA device
    or there are not enough.

    Threads begin on the first device that their process sees, and kernels are launched on the thread's device.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return None
    first = int(index or 0)
    if visible is None:
        return ",".join(map(str, range(first, first + count)))
    chosen = [name for name in visible.split(",") if name][first : first + count]
    return ",".join(chosen) if len(chosen) == count else None


def num_memory_nodes(folder: Path = Path("/sys/devices/system/node")) -> int:
    """Number of parts of this machine's memory at different distances from a core (NUMA nodes); 1 where it is
    unknown."""
    return max(1, sum(node.name.removeprefix("node").isdigit() for node in folder.glob("node*")))


class CoreClaims:
    """Owner of the locks that it took. They last until `close`, or the end of the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: list[int] = []

    def take(self, count: int, available: Sequence[int]) -> tuple[int, ...]:
        """Claim `count` cores of the `available` ones that no other process claims; fewer if there are fewer cores.
        Where all are claimed, cores are shared, which is warned about.

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
