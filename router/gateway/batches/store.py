"""Files and batches in one SQLite database and a folder of contents.

    add_file ──> create ──> claim (one owner, by a lease) ──> begin ──> answer* ──> finish
                               └─ its lease ran out: another owner claims it, and goes on with the lines left

    validating ──> in_progress ──> finalizing ──> completed
        └─> failed     ├─> cancelling ──> cancelled
                       └─> expired

An answer and its line number are one row, whose key is the line: a line is answered once, whoever answers it and how
often. The row is written only while its writer owns the batch. A killed process loses what it had not committed, and
those lines are run again. The files of answers are written from the rows at the end, under names that follow from the
batch, so that a finish that was cut off is made again.

Calls block on the disk: they belong on a thread. Several processes of one machine may open the same folder (WAL).
SQLite's locks do not work over network file systems, so gateways of several machines have a folder each.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from disagg.proto.config import Bytes, Count
from disagg.proto.errors import InvalidRequestError, LimitError

LEASE_S: Final = 15.0
"""How long a batch stays with its owner after the last renewal."""
_BUSY_TIMEOUT_S: Final = 10.0
RUNNABLE: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""States with work left for an owner."""
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files(
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS batches(
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, status TEXT NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, ended REAL, total INTEGER NOT NULL DEFAULT 0,
    output_file TEXT, error_file TEXT, error TEXT, owner TEXT, lease_until REAL NOT NULL DEFAULT 0,
    num_completed INTEGER, num_failed INTEGER, metadata TEXT);
CREATE TABLE IF NOT EXISTS answers(
    batch TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY(batch, line)
    ) WITHOUT ROWID;
"""


class StoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of what clients can store."""

    max_files: Count = 100
    """Files of a tenant, those of answers among them; one more is refused."""
    max_total_bytes: Bytes = 4 << 30
    """Contents of all files of all tenants; an upload that exceeds it is refused."""
    max_batches: Count = 100
    """Batches of a tenant that have not ended; and of those that have, the latest that are remembered."""


class File(NamedTuple):
    """One stored file."""

    id: str
    tenant: str
    name: str
    purpose: str
    num_bytes: int
    created: float
    """Seconds since the epoch, as all times here."""


class Batch(NamedTuple):
    """One batch, as it was when it was read."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    status: str
    created: float
    expires: float
    ended: float | None
    total: int
    """Lines; 0 until the input is validated."""
    output_file: str | None
    error_file: str | None
    error: str | None
    """Why it failed."""
    num_completed: int
    num_failed: int
    metadata: str | None
    """The client's own notes, JSON."""


class Answer(NamedTuple):
    """What became of a line."""

    line: int
    ok: bool
    data: bytes
    """One line of the output or the error file, without its end."""


_BATCH: Final = """SELECT id, tenant, endpoint, input_file, status, created, expires, ended, total, output_file,
    error_file, error,
    coalesce(num_completed, (SELECT count(*) FROM answers WHERE batch = id AND ok)),
    coalesce(num_failed, (SELECT count(*) FROM answers WHERE batch = id AND NOT ok)), metadata
    FROM batches """


class BatchStore:
    """Owner of one connection to the database; used by one thread at a time.

    Args:
        folder: of the database and the contents; made where it is missing, for its owner alone.
        limits: see there.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self._contents = folder / "files"
        self._limits = limits
        self._contents.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._db = sqlite3.connect(
            folder / "batches.sqlite", timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the connection."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def path(self, file_id: str) -> Path:
        """Where the contents of a file are; `file_id` is one that the store knows or is about to add."""
        return self._contents / file_id

    def add_file(self, file: File, uploaded: Path) -> None:
        """Take over the contents at `uploaded`, on the same file system. Raises `LimitError`; then nothing changed."""
        with self._transaction() as db:
            (count,) = db.execute("SELECT count(*) FROM files WHERE tenant = ?", (file.tenant,)).fetchone()
            (total,) = db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()
            if count >= self._limits.max_files:
                raise LimitError(file.tenant, "files", f"there are {count} already; delete some", None)
            if total + file.num_bytes > self._limits.max_total_bytes:
                limit = self._limits.max_total_bytes
                raise LimitError(file.tenant, "stored bytes", f"all files together may have {limit}", None)
            uploaded.replace(self.path(file.id))
            db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", file)

    def file(self, tenant: str, file_id: str) -> File | None:
        """A tenant's file."""
        row = self._db.execute("SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        return None if row is None else File(*row)

    def files(self, tenant: str) -> list[File]:
        """All of a tenant, the latest first."""
        rows = self._db.execute("SELECT * FROM files WHERE tenant = ? ORDER BY created DESC, id", (tenant,))
        return [File(*row) for row in rows]

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Whether there was one. Raises `InvalidRequestError` where a batch still reads it."""
        with self._transaction() as db:
            used = f"SELECT 1 FROM batches WHERE input_file = ? AND status IN {RUNNABLE}"
            if self.file(tenant, file_id) is None:
                return False
            if db.execute(used, (file_id,)).fetchone():
                raise InvalidRequestError("file_id", "a batch that has not ended reads this file; cancel it first")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)
        return True

    def create(
        self,
        batch_id: str,
        tenant: str,
        endpoint: str,
        input_file: str,
        now: float,
        window_s: float,
        metadata: str | None = None,
    ) -> Batch:
        """Add a batch, `validating`. Raises `InvalidRequestError` without such a file, `LimitError` for too many."""
        with self._transaction() as db:
            if self.file(tenant, input_file) is None:
                raise InvalidRequestError("input_file_id", "there is no such file")
            open_ones = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN {RUNNABLE}"
            (count,) = db.execute(open_ones, (tenant,)).fetchone()
            if count >= self._limits.max_batches:
                raise LimitError(tenant, "batches", f"{count} have not ended", None)
            db.execute(
                "INSERT INTO batches(id, tenant, endpoint, input_file, status, created, expires, metadata) "
                "VALUES (?, ?, ?, ?, 'validating', ?, ?, ?)",
                (batch_id, tenant, endpoint, input_file, now, now + window_s, metadata),
            )
            db.execute(
                "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE tenant = ? AND ended IS NOT NULL "
                "ORDER BY ended DESC LIMIT -1 OFFSET ?)",
                (tenant, self._limits.max_batches),
            )
        return self._get(batch_id)

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """A tenant's batch."""
        row = self._db.execute(_BATCH + "WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
        return None if row is None else Batch(*row)

    def batches(self, tenant: str, limit: int) -> list[Batch]:
        """At most so many of a tenant, the latest first."""
        rows = self._db.execute(_BATCH + "WHERE tenant = ? ORDER BY created DESC, id LIMIT ?", (tenant, limit))
        return [Batch(*row) for row in rows]

    def cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Ask for the end of a batch; its owner writes what is answered so far. One that has ended stays as it is."""
        self._db.execute(
            "UPDATE batches SET status = 'cancelling' WHERE id = ? AND tenant = ? "
            "AND status IN ('validating', 'in_progress')",
            (batch_id, tenant),
        )
        return self.batch(tenant, batch_id)

    def claim(self, owner: str, now: float) -> Batch | None:
        """The oldest batch with work left that nobody else owns; from now on it is `owner`'s for `LEASE_S`."""
        row = self._db.execute(
            "UPDATE batches SET owner = ?, lease_until = ? WHERE id = (SELECT id FROM batches WHERE "
            f"status IN {RUNNABLE} AND (owner = ? OR lease_until <= ?) ORDER BY created, id LIMIT 1) RETURNING id",
            (owner, now + LEASE_S, owner, now),
        ).fetchall()
        return self._get(row[0][0]) if row else None

    def renew(self, batch_id: str, owner: str, now: float) -> Batch | None:
        """Keep a batch; None once another owner has it."""
        renewed = self._db.execute(
            "UPDATE batches SET lease_until = ? WHERE id = ? AND owner = ?", (now + LEASE_S, batch_id, owner)
        )
        return self._get(batch_id) if renewed.rowcount else None

    def release(self, owners: str) -> None:
        """Give up what owners hold whose names begin so: on a graceful stop one's own batch, and at a start those of
        this gateway's former lives. They can be claimed at once."""
        self._db.execute("UPDATE batches SET lease_until = 0 WHERE substr(owner, 1, ?) = ?", (len(owners), owners))

    def begin(self, batch_id: str, owner: str, total: int) -> None:
        """The input is valid and has so many lines. A batch that is being cancelled stays so."""
        self._db.execute(
            "UPDATE batches SET total = ?, status = CASE status WHEN 'validating' THEN 'in_progress' ELSE status END "
            "WHERE id = ? AND owner = ?",
            (total, batch_id, owner),
        )

    def answered(self, batch_id: str) -> set[int]:
        """The lines that need not run."""
        return {line for (line,) in self._db.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    def answer(self, batch_id: str, owner: str, answers: Sequence[Answer]) -> bool:
        """Keep answers, in one transaction; lines that have one keep it. False, and nothing kept, where `owner` has
        lost the batch or it has ended."""
        with self._transaction() as db:
            owned = f"SELECT 1 FROM batches WHERE id = ? AND owner = ? AND status IN {RUNNABLE}"
            if not db.execute(owned, (batch_id, owner)).fetchone():
                return False
            db.executemany(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", [(batch_id, *answer) for answer in answers]
            )
        return True

    def fail(self, batch_id: str, owner: str, reason: str, now: float) -> None:
        """The input cannot be run."""
        self._db.execute(
            "UPDATE batches SET status = 'failed', error = ?, ended = ? WHERE id = ? AND owner = ?",
            (reason, now, batch_id, owner),
        )

    def finish(self, batch_id: str, owner: str, status: str, now: float) -> None:
        """Write the files of answers, then end the batch as `status`. Nothing happens where `owner` has lost it."""
        made = [self._write(batch_id, ok, now) for ok in (True, False)]
        with self._transaction() as db:
            ended: Any = db.execute(
                "UPDATE batches SET status = ?, ended = ?, output_file = ?, error_file = ?, "
                "num_completed = (SELECT count(*) FROM answers WHERE batch = id AND ok), "
                "num_failed = (SELECT count(*) FROM answers WHERE batch = id AND NOT ok) WHERE id = ? AND owner = ?"
                f" AND status IN {RUNNABLE}",
                (status, now, *(None if file is None else file.id for file in made), batch_id, owner),
            )
            if ended.rowcount:
                rows = [file for file in made if file is not None]
                db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
                db.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))

    def _write(self, batch_id: str, ok: bool, now: float) -> File | None:
        """The file of the answers, or of the errors, by line; None for no line."""
        kind = "output" if ok else "error"
        file_id = f"file-{batch_id}-{kind}"
        written, partial = 0, self._contents / f"{file_id}.{os.getpid()}"
        rows = self._db.execute("SELECT data FROM answers WHERE batch = ? AND ok = ? ORDER BY line", (batch_id, ok))
        with partial.open("wb") as target:
            for (data,) in rows:
                written += target.write(data + b"\n")
            target.flush()
            os.fsync(target.fileno())
        if not written:
            partial.unlink()
            return None
        partial.replace(self.path(file_id))
        return File(file_id, self._get(batch_id).tenant, f"{batch_id}_{kind}.jsonl", "batch_output", written, now)

    def _get(self, batch_id: str) -> Batch:
        return Batch(*self._db.execute(_BATCH + "WHERE id = ?", (batch_id,)).fetchone())
