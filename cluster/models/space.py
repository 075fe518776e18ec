"""The disk space that an import takes: stated before it begins, and refused where there is too little."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from disagg.cluster.models.files import FICLONE
from disagg.proto.errors import ConfigError


def check_space(folder: Path, num_bytes: int, what: str, progress: Callable[[str], None]) -> None:
    """Say how much space something takes in a folder, and how much there is.

    Raises:
        ConfigError: there is too little.
    """
    free = shutil.disk_usage(folder).free
    progress(f"{what} takes {shown(num_bytes)} of {folder}, where {shown(free)} are free")
    if num_bytes > free:
        raise ConfigError(f"model import: {what} takes {shown(num_bytes)}, but {folder} has only {shown(free)} free")


def shown(num_bytes: int) -> str:
    """A size for people."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def shares_blocks(file: Path, folder: Path) -> bool:
    """Whether a copy of the file in the folder takes no space, because the file system shares the blocks of copies."""
    with file.open("rb") as read, tempfile.TemporaryFile(dir=folder) as written:
        try:
            fcntl.ioctl(written.fileno(), FICLONE, read.fileno())
        except OSError:
            return False
    return True
