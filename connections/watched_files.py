"""Key files, which are read only if no other user can change or read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from disagg.proto.errors import ConfigError

ROOT: Final = 0


def read_private_file(path: str, name: str) -> bytes:
    """Read a file that only its owner may write, and only its owner and group may read. `name` is the configuration's
    key.

    Raises:
        ConfigError: if it cannot be read, belongs to another user, or others can use it.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid not in (os.geteuid(), ROOT):
                raise ConfigError(f"{name}: {path} belongs to another user (uid {status.st_uid}), who could change it")
            if mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise ConfigError(f"{name}: others can use {path} (mode {mode:04o}); next: chmod 600 {path}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path} ({error.strerror})") from None


Stamp = tuple[int, int, int, int] | None


def stamp(path: str) -> Stamp:
    """Device, inode, size and time of change of a file; None if it does not exist. If the stamp differs, read the file
    again."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
