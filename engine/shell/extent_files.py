"""A folder with extents of KV: what is in it, and how a file is written so that it is whole or not there.

    <path>/.lock                 held by the worker whose folder it is, whose host and process it names; a shared folder
                                 has none
    <path>/<store>/<name>.kv     files of one model, layout and number of ranks; see `tiers/extent_file.py`

A file is written under another name, and renamed when it is complete. It is not synchronized with the disk: one that a
crash of the machine left incomplete is found out by its checksum. Whoever may read the folder can guess texts from what
is in it, so only its owner may.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from disagg.engine.plan import Buffer
from disagg.engine.tiers.extent_file import HEADER_BYTES, SUFFIX, ExtentFormat, extent_of, file_name
from disagg.engine.tiers.extents import Extent
from disagg.proto.errors import ConfigError

PATH_KEY = "kv_cache.tiers.disk.path"
GONE = "gone"
LOCK_WAIT_S = 10.0
"""How long a worker that starts waits for a folder that another one has: it may be its last process, which ends."""
_LOCK_TRIED_EVERY_S = 0.1
_MOST_OF_HOLDER = 200
"""Bytes that are read of who holds a folder."""
_TEMPORARY = ".tmp"
_STORE = re.compile(r"[0-9a-f]{32}")
_LATER = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN),
    }
)
"""Errors of a folder that may be good again later; a worker starts without it."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""Errors of a write after which files can be read."""


class Listing(NamedTuple):
    """The extents whose files are in a folder."""

    extents: list[Extent]
    """The one that was used last at the end."""
    is_whole: bool
    """Whether there are no more."""


class _TakenError(ConfigError):
    """The folder is another worker's."""


class ExtentFiles:
    """The files of one worker, or those that it shares. Owner: the thread that reads and writes them; `open` may be
    called before that is started.

    Args:
        folder: made if it is not there.
        format_: of its files.
        is_shared: whether others use it, too. Then what is not ours is left alone.
    """

    def __init__(self, folder: Path, format_: ExtentFormat, *, is_shared: bool) -> None:
        self.folder = folder
        self._files = folder / format_.store.hex()
        self._format = format_
        self._is_shared = is_shared
        self._lock: int | None = None
        self._temporary = f".{uuid.uuid4().hex[:16]}{_TEMPORARY}"
        """How the files end that are not complete. Process ids are alike where workers have containers of their own."""

    def open(self, wait_s: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> None:
        """Make the folder and take it, before the worker is used; up to `wait_s` seconds later where another one has
        it.

        Raises:
            ConfigError: it cannot be used, others may read it, or it is another worker's. Not where that may change.
        """
        try:
            while True:
                try:
                    self._make()
                    return
                except _TakenError:
                    if wait_s <= 0.0:
                        raise
                wait_s -= _LOCK_TRIED_EVERY_S
                sleep(_LOCK_TRIED_EVERY_S)
        except OSError as error:
            if error.errno not in _LATER:
                self.close()
                raise ConfigError(f"{PATH_KEY}: {self.folder} cannot be used: {error.strerror or error}") from error

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def scan(self, most: int) -> Listing:
        """What the folder has, by the names of its files, of `most` files at most. Leftovers of earlier processes and
        models are removed, unless it is shared.

        Raises:
            OSError: the folder cannot be read, or made.
            ConfigError: as `open`.
        """
        self._make()
        if not self._is_shared:
            self._remove_leftovers()
        found: list[tuple[int, Extent]] = []
        with os.scandir(self._files) as entries:
            for entry in entries:
                extent = extent_of(entry.name)
                if extent is None:
                    continue
                if len(found) >= most:
                    return Listing([extent for _, extent in sorted(found)], is_whole=False)
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime_ns, extent))
        return Listing([extent for _, extent in sorted(found)], is_whole=True)

    def look(self) -> None:
        """Find out whether the folder is still there. Raises `OSError` where it is not, or cannot be looked at."""
        if self._lock is not None and not os.path.samestat(os.fstat(self._lock), (self.folder / ".lock").stat()):
            raise FileNotFoundError(errno.ENOENT, "another folder is in its place")
        self._files.stat()

    def write(self, extent: Extent, payload: Buffer) -> None:
        """Write the file of an extent.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        path = self._files / file_name(extent)
        temporary = path.with_suffix(self._temporary)
        header = self._format.header(extent, payload)
        try:
            with open(temporary, "wb", buffering=0, opener=_private) as file:
                _write_all(file.fileno(), memoryview(header))
                _write_all(file.fileno(), memoryview(payload))
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def read(self, extent: Extent, payload: Buffer) -> str:
        """Read the file of an extent into `payload`; what is wrong with it, empty where it is good. Then it counts as
        used now, for all that scan the folder.

        Raises:
            OSError: it cannot be read.
        """
        try:
            path = self._files / file_name(extent)
            with path.open("rb", buffering=0) as file:
                header = file.read(HEADER_BYTES)
                view, num_read = memoryview(payload), 0
                while num_read < len(view) and (count := file.readinto(view[num_read:])):
                    num_read += count
                if num_read < len(view) or file.read(1):
                    return "another length"
        except FileNotFoundError:
            return GONE
        fault = self._format.fault(extent, header, payload)
        if not fault:
            with contextlib.suppress(OSError):
                os.utime(path)
        return fault

    def delete(self, extents: Iterable[Extent]) -> None:
        """Delete files, those that are there. Raises `OSError` where that is impossible."""
        for extent in extents:
            (self._files / file_name(extent)).unlink(missing_ok=True)

    def forget(self, tag: bytes) -> None:
        """Delete all files of a tenant, of whatever model and cluster. Raises `OSError` where that is impossible."""
        with contextlib.suppress(FileNotFoundError):
            stores = [path for path in self.folder.iterdir() if _STORE.fullmatch(path.name) and not path.is_symlink()]
            for store in stores:
                self._forget_in(store, tag)

    def _forget_in(self, store: Path, tag: bytes) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(store) as entries:
            for entry in entries:
                extent = extent_of(entry.name)
                if extent is not None and extent.tag == tag:
                    Path(entry.path).unlink(missing_ok=True)

    # ------------------------------------------------------------ inside

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.stat()
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise ConfigError(f"{PATH_KEY}: {self.folder} must be for its owner alone (mode 0700), who is this user")
        if not self._is_shared:
            self._take()
        self._files.mkdir(mode=0o700, exist_ok=True)
        if not os.access(self._files, os.W_OK | os.X_OK):
            if os.statvfs(self._files).f_flag & os.ST_RDONLY:  # as a file system becomes when its disk breaks
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            raise PermissionError(errno.EACCES, "nothing can be written there")

    def _take(self) -> None:
        """Hold the lock; again where the folder was removed meanwhile."""
        path = self.folder / ".lock"
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._lock), path.stat()):
                    return
            self.close()
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = ""
            with contextlib.suppress(OSError):
                holder = os.read(lock, _MOST_OF_HOLDER).decode("ascii", "replace").strip()
            os.close(lock)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                which = f", {holder}" if holder and holder.isprintable() else ""
                raise _TakenError(f"{PATH_KEY}: {self.folder} is used by another worker{which}") from error
            raise
        self._lock = lock
        with contextlib.suppress(OSError):  # full or read only: then nobody is told who has it
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()} on {os.uname().nodename}\n".encode())

    def _remove_leftovers(self) -> None:
        for path in self.folder.iterdir():
            if path != self._files and _STORE.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                _remove_store(path)
        for path in self._files.iterdir():
            if path.name.endswith(_TEMPORARY) or (path.name.endswith(SUFFIX) and extent_of(path.name) is None):
                path.unlink(missing_ok=True)


def _remove_store(folder: Path) -> None:
    """Remove the files of another model, and their folder unless something else is in it."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.endswith(_TEMPORARY) or extent_of(path.name) is not None:
                path.unlink()
        folder.rmdir()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]
