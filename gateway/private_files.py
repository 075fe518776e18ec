"""Folders and files of what clients sent and got, for the user of this process alone.

A folder may have been made by somebody else, and with another mode. Who owns it, or may write into it, can put files of
their own there and take away ours.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

logger = logging.getLogger(__name__)

_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700
_ROOT: Final = 0
_FOR_OTHERS: Final = 0o077


def make_folder(path: Path) -> None:
    """A folder for our files; one that is there already may be readable by others, because its files are not.

    Raises:
        OSError: if it cannot be made or used, or everybody may write into it.
    """
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    check_folder(path)


def check_folder(path: Path) -> None:
    """Find out whether files can be made in a folder, or it can be made, without making anything.

    Raises:
        OSError: if not, or everybody may write into it.
    """
    found = path.stat() if path.exists() else None
    if found is None:
        parent = next(each for each in path.absolute().parents if each.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(f"it is not there, and nothing can be made in {parent}")
        return
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError("it is not a folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"this user ({os.geteuid()}) cannot write into it")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"everybody can put files there (mode {mode:04o}); next: chmod 700 {path}")
    if found.st_uid not in (os.geteuid(), _ROOT):
        logger.warning("%s belongs to another user (%d), who can replace the files in it", path, found.st_uid)


def make_private(path: Path) -> None:
    """A file that others can neither read nor write, with what it has if it is there. SQLite gives the files beside it
    the same mode.

    One that is there is not opened: to close it would take the locks of all connections of this process to it (POSIX).

    Raises:
        OSError: if it cannot be made, is a link, or belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE))
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(f"{path.name} is a symbolic link")
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{path.name} belongs to another user ({found.st_uid})")
    if found.st_mode & _FOR_OTHERS:
        path.chmod(_MODE)


def create_private(path: Path) -> BinaryIO:
    """A new file for our user only, to be written. Raises `OSError`, also where there is one."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, _MODE))
