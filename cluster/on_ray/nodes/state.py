"""A `NodeTable` in a file that several processes and threads change: `ray up`, the head's autoscaler, `ray down`.

Every change holds a lock on a file beside it and replaces the table in one step, so that readers see all of it or
nothing.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from disagg.cluster.core.node_table import NodeTable
from disagg.proto.errors import ConfigError


class TableFile:
    """Owner of `nodes.json` and `lock` in one folder, which only this user may read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "nodes.json"

    def read(self) -> NodeTable:
        """The table; an empty one where there is no file."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=NodeTable)
        except FileNotFoundError:
            return NodeTable()

    def change(self, edit: Callable[[NodeTable], NodeTable]) -> NodeTable:
        """Replace the table by what `edit` makes of it, and return that. What `edit` raises changes nothing.

        Raises:
            ConfigError: if the folder is another user's, who could then read and change what is below it.
        """
        with self._locked():
            table = edit(self.read())
            new = self._file.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(table))
            new.replace(self._file)
            return table

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.geteuid():
            raise ConfigError(f"{self._folder}: belongs to another user; choose another folder")
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
