"""SQLite as the stores of a gateway use it: in WAL mode, beside other processes of the machine.

SQLite's locks do not work over network file systems, so the folder must be on a local disk.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from disagg.gateway.private_files import check_folder, make_folder, make_private

_OPEN_PAUSE_S: Final = 0.05
_MAGIC: Final = b"SQLite format 3\0"
_BESIDE: Final = ("-wal", "-shm")


def open_database(
    path: Path, schema: str, synchronous: Literal["FULL", "NORMAL"], busy_timeout_s: float
) -> sqlite3.Connection:
    """A connection for one thread at a time, whose transactions begin and end as they are told to. Blocks.

    Args:
        path: of the file, which is for its owner alone; so is its folder where it is made here.
        schema: statements that change nothing where they ran before.
        synchronous: `FULL` keeps a commit over a loss of power, `NORMAL` over the death of the process.
        busy_timeout_s: how long a statement waits for other processes.

    Raises:
        OSError: if the folder cannot be made or used, or others could change the file.
        sqlite3.Error: if the file cannot be used.
    """
    make_folder(path.parent)
    for each in (path, *(path.with_name(path.name + suffix) for suffix in _BESIDE)):
        if each is path or each.exists():
            make_private(each)
    db = sqlite3.connect(path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False)
    try:
        _switch_to_wal(db, time.monotonic() + busy_timeout_s)
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.executescript(schema)
    except BaseException:
        db.close()
        raise
    return db


def check_database(path: Path) -> None:
    """Find out whether `open_database` could use a file, without changing anything.

    Raises:
        OSError: if the folder cannot be made or used, or the file is none that this user can write.
        sqlite3.DatabaseError: if it is no database.
    """
    check_folder(path.parent)
    if not path.exists():
        return
    if not path.is_file():
        raise OSError(f"{path.name} is no file")
    if not os.access(path, os.R_OK | os.W_OK):
        raise PermissionError(f"this user ({os.geteuid()}) cannot read and write {path.name}")
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
    if begin and begin != _MAGIC:
        raise sqlite3.DatabaseError(f"{path.name} is no SQLite database")


def _switch_to_wal(db: sqlite3.Connection, deadline: float) -> None:
    """SQLite does not wait here where two processes open a new file at the same time."""
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_OPEN_PAUSE_S)
        else:
            return


def add_columns(db: sqlite3.Connection, table: str, columns: Iterable[tuple[str, str]]) -> None:
    """Add those of `columns`, each a name and a type, that a table of an earlier version has not. Inside a transaction,
    so that of two processes the second finds nothing to do."""
    present = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    for name, kind in columns:
        if name not in present:
            db.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """What happens inside happens as a whole, or not at all: then the error is raised, that of the commit too."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk has ended it already
            db.execute("ROLLBACK")
        raise
