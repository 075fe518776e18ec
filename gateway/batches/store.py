"""Files and batches in one SQLite database and a folder of contents.

    begin_upload ──> add_file ──> create ──> claim (one owner, by a lease) ──> begin ──> answer* ──> finish
                               └─ its lease ran out: another owner claims it and runs the lines left

    validating ──> in_progress ──> finalizing ──> completed
        └─> failed     ├─> cancelling ──> cancelled
                       └─> expired

An answer and its line number are one row, whose key is the line: a line is answered once, whoever answers it and how
often. The row is written only while its writer owns the batch. A killed process loses what it had not committed, and
those lines are run again. The files of answers are written from the rows at the end, under names that follow from the
batch, so that a finish that was cut off is made again.

Bytes are a tenant's. Its files, uploads under way, and for each open batch its answers so far, or what is reserved for
them where that is more, are at most as many as are left free of `max_total_bytes` after them (dynamic thresholds:
Choudhury and Hahne, 1998). So one tenant has half of all, two a third each, and there is room for one that comes later.

Calls block on the disk: they belong on a thread. Several processes of one machine may open the same folder (WAL).
SQLite's locks do not work over network file systems, so gateways of several machines have a folder each.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from disagg.gateway.batches import stored
from disagg.gateway.batches.begun_lines import SCHEMA, BegunLines
from disagg.gateway.batches.leases import is_alive
from disagg.gateway.batches.stored import RUNNABLE, stored_by
from disagg.gateway.config import StoreLimits
from disagg.gateway.private_files import create_private, make_folder
from disagg.gateway.sqlite import add_columns, open_database, transaction
from disagg.proto.errors import InvalidRequestError, LimitError

FILE: Final = "batches.sqlite"
_BUSY_TIMEOUT_S: Final = 10.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS files(
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS batches(
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL, status TEXT NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, ended REAL, total INTEGER NOT NULL DEFAULT 0,
    output_file TEXT, error_file TEXT, error TEXT, owner TEXT, lease_until REAL NOT NULL DEFAULT 0,
    num_completed INTEGER, num_failed INTEGER, metadata TEXT);
CREATE TABLE IF NOT EXISTS uploads(
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL, until REAL NOT NULL);
CREATE TABLE IF NOT EXISTS answers(
    batch TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY(batch, line)
    ) WITHOUT ROWID;
"""
_VERSION: Final = 4
"""Schema version of the database, in `PRAGMA user_version`; see `_migrate`."""
_LATER_COLUMNS: Final = (
    ("answer_bytes", "INTEGER NOT NULL DEFAULT 0"),
    ("credential", "TEXT"),
    ("reserved", "INTEGER NOT NULL DEFAULT 0"),
    ("num_ends", "INTEGER NOT NULL DEFAULT 0"),
)
"""Columns of `batches` that were added later: a database of version 1 has the first two, version 2 the first three,
version 3 all, and an older one none."""
_DAY_S: Final = 86_400.0


class File(NamedTuple):
    """One stored file, of a client or of a batch's answers."""

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
    """Number of lines; 0 until the input is validated."""
    output_file: str | None
    error_file: str | None
    error: str | None
    """The reason why the batch failed or waits, as its tenant sees it."""
    num_completed: int
    num_failed: int
    metadata: str | None
    """The client's own notes, JSON."""
    credential: str | None = None
    """Credential of the caller who created the batch, see `Caller.credential`; None if an earlier version created
    it."""
    num_ends: int = 0
    """Number of gateways that ended while they owned the batch."""


class Held(NamedTuple):
    """A batch with the state that only its owner needs."""

    batch: Batch
    room: int
    """Bytes that further answers of the batch may have."""


class Answer(NamedTuple):
    """The answer to one line, or its error."""

    line: int
    ok: bool
    data: bytes
    """One line of the output or the error file, without the line break."""


_BATCH: Final = """SELECT id, tenant, endpoint, input_file, status, created, expires, ended, total, output_file,
    error_file, error,
    coalesce(num_completed, (SELECT count(*) FROM answers WHERE batch = id AND ok)),
    coalesce(num_failed, (SELECT count(*) FROM answers WHERE batch = id AND NOT ok)), metadata,
    credential, num_ends
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
        self._db = open_database(folder / FILE, _SCHEMA + SCHEMA, "FULL", _BUSY_TIMEOUT_S)
        try:
            _migrate(self._db)
            self.begun = BegunLines(self._db)
        except BaseException:
            self._db.close()
            raise
        make_folder(self._contents)

    @property
    def lease_s(self) -> float:
        """Length of a lease; the clock of leases is the wall clock."""
        return self._limits.lease_s

    def close(self) -> None:
        """Close the database connection of this store."""
        self._db.close()

    def path(self, file_id: str) -> Path:
        """Where the contents of a file are; `file_id` is one that the store knows or is about to add."""
        return self._contents / file_id

    def begin_upload(self, upload_id: str, tenant: str, num_bytes: int, now: float, until: float) -> None:
        """Reserve `num_bytes` of the tenant's space for an upload, until `until`, `end_upload` or `add_file`. Raises
        `LimitError`."""
        with transaction(self._db) as db:
            db.execute("DELETE FROM uploads WHERE until <= ?", (now,))
            self._check_files(tenant)
            self._check_bytes(tenant, num_bytes, "this file")
            db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", (upload_id, tenant, num_bytes, until))

    def end_upload(self, upload_id: str) -> None:
        """Release the space that was reserved for an upload. Idempotent."""
        self._db.execute("DELETE FROM uploads WHERE id = ?", (upload_id,))

    def uploads(self, now: float) -> set[str]:
        """Ids of the uploads under way at all gateways that share the folder."""
        return {name for (name,) in self._db.execute("SELECT id FROM uploads WHERE until > ?", (now,))}

    def add_file(self, file: File, uploaded: Path) -> None:
        """Take over the contents at `uploaded`, on the same file system; its name is that of the upload. Raises
        `LimitError`; then nothing changed."""
        with transaction(self._db) as db:
            db.execute("DELETE FROM uploads WHERE id = ?", (uploaded.name,))
            self._check_files(file.tenant)
            self._check_bytes(file.tenant, file.num_bytes, "this file")
            uploaded.replace(self.path(file.id))
            db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", file)

    def expire(self, now: float) -> int:
        """Delete files that are too old, unless an open batch reads them. Returns their number."""
        with transaction(self._db) as db:
            old = db.execute(
                "DELETE FROM files WHERE created < ? AND id NOT IN "
                f"(SELECT input_file FROM batches WHERE status IN {RUNNABLE}) RETURNING id",
                (now - _DAY_S * self._limits.file_days,),
            ).fetchall()
        for (file_id,) in old:
            self.path(file_id).unlink(missing_ok=True)
        return len(old)

    def file(self, tenant: str, file_id: str) -> File | None:
        """The file of that id if the tenant has it, else None."""
        row = self._db.execute("SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        return None if row is None else File(*row)

    def files(self, tenant: str) -> list[File]:
        """All files of a tenant, the latest first."""
        rows = self._db.execute("SELECT * FROM files WHERE tenant = ? ORDER BY created DESC, id", (tenant,))
        return [File(*row) for row in rows]

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a tenant's file. Returns false if there is none. Raises `InvalidRequestError` while an open batch
        reads it."""
        with transaction(self._db) as db:
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
        credential: str = "",
    ) -> Batch:
        """Add a batch in state `validating` and reserve space for its answers. Raises `InvalidRequestError` if the
        input file does not exist, `LimitError` if there are too many batches or files, or too little space."""
        with transaction(self._db) as db:
            if (file := self.file(tenant, input_file)) is None:
                raise InvalidRequestError("input_file_id", "there is no such file")
            open_ones = f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN {RUNNABLE}"
            (count,) = db.execute(open_ones, (tenant,)).fetchone()
            if count >= self._limits.max_batches:
                raise LimitError(tenant, "batches", f"{count} have not ended", None)
            self._check_files(tenant)
            self._check_bytes(tenant, file.num_bytes, "answers to as many bytes as the input has")
            db.execute(
                "INSERT INTO batches(id, tenant, endpoint, input_file, status, created, expires, metadata, "
                "credential, reserved) VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, ?, ?)",
                (batch_id, tenant, endpoint, input_file, now, now + window_s, metadata, credential, file.num_bytes),
            )
            db.execute(
                "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE tenant = ? AND ended IS NOT NULL "
                "ORDER BY ended DESC LIMIT -1 OFFSET ?)",
                (tenant, self._limits.max_batches),
            )
        return self._get(batch_id)

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """The batch of that id if the tenant has it, else None."""
        row = self._db.execute(_BATCH + "WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
        return None if row is None else Batch(*row)

    def batches(self, tenant: str, limit: int) -> list[Batch]:
        """The latest batches of a tenant, at most `limit`, the latest first."""
        rows = self._db.execute(_BATCH + "WHERE tenant = ? ORDER BY created DESC, id LIMIT ?", (tenant, limit))
        return [Batch(*row) for row in rows]

    def cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Ask for the end of a batch; its owner then writes the answers so far. A batch that has ended does not
        change."""
        self._db.execute(
            "UPDATE batches SET status = 'cancelling' WHERE id = ? AND tenant = ? "
            "AND status IN ('validating', 'in_progress')",
            (batch_id, tenant),
        )
        return self.batch(tenant, batch_id)

    def claim(self, owner: str, now: float, but_of: Collection[str] = (), *, takes_over: bool = True) -> Batch | None:
        """Claim the oldest batch with work left that no other owner holds; it then belongs to `owner` for `lease_s`.

        Args:
            owner: see `leases.owner_of`.
            now: when it is claimed.
            but_of: tenants whose batches are left alone.
            takes_over: whether leases that ran out are taken over as well. Where the process of such an owner does not
                run any more, that is the end of a gateway with this batch.
        """
        with transaction(self._db) as db:
            row = db.execute(
                f"SELECT id, owner, lease_until FROM batches WHERE status IN {RUNNABLE} AND (owner = ? OR "
                f"lease_until <= ?) AND tenant NOT IN ({', '.join('?' * len(but_of))}) ORDER BY created, id LIMIT 1",
                (owner, now if takes_over else 0.0, *but_of),
            ).fetchone()
            if row is None:
                return None
            batch_id, before, lease_until = row
            if before not in (None, owner) and lease_until > 0 and not is_alive(before):
                self.begun.gateway_ended(batch_id)
            until = now + self._limits.lease_s
            db.execute("UPDATE batches SET owner = ?, lease_until = ? WHERE id = ?", (owner, until, batch_id))
            return self._get(batch_id)

    def renew(self, batch_id: str, owner: str, now: float) -> Held | None:
        """Renew the lease of a batch. Returns None if another owner has it."""
        renewed = self._db.execute(
            "UPDATE batches SET lease_until = ? WHERE id = ? AND owner = ?",
            (now + self._limits.lease_s, batch_id, owner),
        )
        return Held(self._get(batch_id), self._room(batch_id)) if renewed.rowcount else None

    def note(self, batch_id: str, owner: str, why: str | None) -> None:
        """Set the reason why a batch waits, which its tenant sees; None when it does not wait any more."""
        self._db.execute("UPDATE batches SET error = ? WHERE id = ? AND owner = ?", (why, batch_id, owner))

    def owners(self) -> list[str]:
        """Owners that hold batches with work left."""
        found = self._db.execute(
            f"SELECT DISTINCT owner FROM batches WHERE status IN {RUNNABLE} AND owner IS NOT NULL AND lease_until > 0"
        )
        return [owner for (owner,) in found]

    def release(self, owner: str, has_ended: bool = False) -> None:
        """Give back all batches of an owner, so that they can be claimed at once: one's own on a graceful stop, and
        those of an ended process at a start."""
        with transaction(self._db) as db:
            held = db.execute("SELECT id FROM batches WHERE owner = ? AND lease_until > 0", (owner,)).fetchall()
            for (batch_id,) in held:
                if has_ended:
                    self.begun.gateway_ended(batch_id)
                self._give_back(batch_id, owner)

    def give_back(self, batch_id: str, owner: str) -> None:
        """Give back one batch of an owner, so that anyone can claim it."""
        with transaction(self._db):
            self._give_back(batch_id, owner)

    def _give_back(self, batch_id: str, owner: str) -> None:
        given = self._db.execute("UPDATE batches SET lease_until = 0 WHERE id = ? AND owner = ?", (batch_id, owner))
        if given.rowcount:
            self.begun.rest_all(batch_id)

    def remove_orphans(self) -> list[str]:
        """Remove contents that no row names: their process was killed before its commit. Returns their names. An upload
        of another gateway is not among them, because it is moved here and committed under one lock."""
        with transaction(self._db) as db:
            known = {name for (name,) in db.execute("SELECT id FROM files")}
            running = [name for (name,) in db.execute(f"SELECT id FROM batches WHERE status IN {RUNNABLE}")]
            being_written = tuple(f"file-{batch_id}-" for batch_id in running)
            found = [path for path in self._contents.iterdir() if path.name not in known]
            orphans = [path for path in found if not path.name.startswith(being_written)]
            for path in orphans:
                path.unlink(missing_ok=True)
        return [path.name for path in orphans]

    def begin(self, batch_id: str, owner: str, total: int, expected_bytes: int = 0) -> None:
        """Record that the input is valid and has `total` lines, whose answers may have `expected_bytes`. These bytes
        are reserved, using at most half of what is left to the tenant. A batch that is being cancelled stays so."""
        with transaction(self._db) as db:
            db.execute(
                "UPDATE batches SET total = ?, status = CASE status WHEN 'validating' THEN 'in_progress' ELSE status "
                "END, reserved = max(reserved, min(?, max(reserved, answer_bytes) + ?)) WHERE id = ? AND owner = ?",
                (total, expected_bytes, max(0, self._num_left(self._get(batch_id).tenant)) // 2, batch_id, owner),
            )

    def answered(self, batch_id: str) -> set[int]:
        """Numbers of the batch's lines that have an answer."""
        return {line for (line,) in self._db.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    def answer(self, batch_id: str, owner: str, answers: Sequence[Answer]) -> int | None:
        """Store answers in one transaction; a line that has one keeps it. Returns the bytes that further answers may
        have, or None, without storing any, if `owner` has lost the batch or it has ended. Computed answers are stored
        even if they exceed the space."""
        with transaction(self._db) as db:
            owned = f"SELECT 1 FROM batches WHERE id = ? AND owner = ? AND status IN {RUNNABLE}"
            if not db.execute(owned, (batch_id, owner)).fetchone():
                return None
            lines = ", ".join("?" * len(answers))
            found = db.execute(
                f"SELECT line FROM answers WHERE batch = ? AND line IN ({lines})",
                (batch_id, *(answer.line for answer in answers)),
            )
            done = {line for (line,) in found}
            new = [answer for answer in answers if answer.line not in done]
            num_bytes = sum(len(answer.data) + 1 for answer in new)
            db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?)", [(batch_id, *answer) for answer in new])
            db.execute("UPDATE batches SET answer_bytes = answer_bytes + ? WHERE id = ?", (num_bytes, batch_id))
            self.begun.forget(batch_id, [answer.line for answer in answers])
            return self._room(batch_id)

    def _room(self, batch_id: str) -> int:
        """Bytes that further answers may have: the rest of the reservation plus what is left to the tenant."""
        found = self._db.execute("SELECT tenant, reserved - answer_bytes FROM batches WHERE id = ?", (batch_id,))
        row: tuple[str, int] = found.fetchone()
        tenant, num_reserved = row
        return max(0, num_reserved) + max(0, self._num_left(tenant))

    def _num_left(self, tenant: str) -> int:
        """Further bytes that a tenant may store."""
        by_all, own, _, _ = stored_by(self._db, tenant)
        return (self._limits.max_total_bytes - by_all - own) // 2

    def _check_files(self, tenant: str) -> None:
        _, _, num_files, num_uploads = stored_by(self._db, tenant)
        if num_files + num_uploads >= self._limits.max_files:
            found = f"there are {num_files}" + (f" and {num_uploads} arrive" if num_uploads else "")
            raise LimitError(tenant, "files", f"{found}; at most {self._limits.max_files}: delete some", None)

    def _check_bytes(self, tenant: str, num_bytes: int, what: str) -> None:
        left = self._num_left(tenant)
        if num_bytes > left:
            why = f"there is room for {max(0, left)} bytes more of tenant {tenant}, and {what} may need {num_bytes}"
            raise LimitError(tenant, "stored bytes", f"{why}; delete some files", None)

    def fail(self, batch_id: str, owner: str, reason: str, now: float) -> None:
        """End a batch whose input cannot be run."""
        self._db.execute(
            "UPDATE batches SET status = 'failed', error = ?, ended = ? WHERE id = ? AND owner = ?",
            (reason, now, batch_id, owner),
        )

    def finish(self, batch_id: str, owner: str, status: str, now: float, error: str | None = None) -> None:
        """Write the files of answers, then end the batch as `status`. The batch does not change if `owner` has lost
        it."""
        made = [self._write(batch_id, ok, now) for ok in (True, False)]
        with transaction(self._db) as db:
            ended: Any = db.execute(
                "UPDATE batches SET status = ?, ended = ?, error = ?, output_file = ?, error_file = ?, "
                "num_completed = (SELECT count(*) FROM answers WHERE batch = id AND ok), "
                "num_failed = (SELECT count(*) FROM answers WHERE batch = id AND NOT ok) WHERE id = ? AND owner = ?"
                f" AND status IN {RUNNABLE}",
                (status, now, error, *(None if file is None else file.id for file in made), batch_id, owner),
            )
            if ended.rowcount:
                rows = [file for file in made if file is not None]
                db.executemany("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
                db.execute("DELETE FROM answers WHERE batch = ?", (batch_id,))
                self.begun.forget(batch_id)

    def _write(self, batch_id: str, ok: bool, now: float) -> File | None:
        """Write the file of answers, or of errors, in the order of lines. Returns None if there are none."""
        kind = "output" if ok else "error"
        file_id = f"file-{batch_id}-{kind}"
        written, partial = 0, self._contents / f"{file_id}.{os.getpid()}"
        rows = self._db.execute("SELECT data FROM answers WHERE batch = ? AND ok = ? ORDER BY line", (batch_id, ok))
        partial.unlink(missing_ok=True)  # of an earlier process with this number, which was killed
        with create_private(partial) as target:
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


def _migrate(db: sqlite3.Connection) -> None:
    """Bring an older or a new database to `_VERSION`. If two processes do so, the second finds nothing to do. A gateway
    of an earlier version that has the database open continues to work; none can open it afterwards. Raises
    `sqlite3.DatabaseError` for a later version."""
    with transaction(db):
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise sqlite3.DatabaseError(f"the database has version {version}, this program knows {_VERSION} at most")
        if version == _VERSION:
            return
        add_columns(db, "batches", _LATER_COLUMNS)
        stored.migrate(db)
        db.execute(f"PRAGMA user_version = {_VERSION}")
