"""Files and batches in one SQLite database and a folder of contents.

    begin_upload ──> add_file ──> create ──> claim (one owner, by a lease) ──> begin ──> answer* ──> finish
                               └─ its lease ran out: another owner claims it, and goes on with the lines left

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
"""Of the database, in `PRAGMA user_version`; see `_migrate`."""
_LATER_COLUMNS: Final = (
    ("answer_bytes", "INTEGER NOT NULL DEFAULT 0"),
    ("credential", "TEXT"),
    ("reserved", "INTEGER NOT NULL DEFAULT 0"),
    ("num_ends", "INTEGER NOT NULL DEFAULT 0"),
)
"""Of batches. A database of an earlier version lacks some, or all: version 1 has the first two, 2 the third, 3 all."""
_DAY_S: Final = 86_400.0


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
    credential: str | None = None
    """Of the caller who ordered it, see `Caller.credential`; None where an earlier version kept none."""
    num_ends: int = 0
    """Gateways that ended while they had it."""


class Held(NamedTuple):
    """A batch, as its owner has it."""

    batch: Batch
    room: int
    """Bytes that its further answers may have."""


class Answer(NamedTuple):
    """What became of a line."""

    line: int
    ok: bool
    data: bytes
    """One line of the output or the error file, without its end."""


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
        """Close the connection."""
        self._db.close()

    def path(self, file_id: str) -> Path:
        """Where the contents of a file are; `file_id` is one that the store knows or is about to add."""
        return self._contents / file_id

    def begin_upload(self, upload_id: str, tenant: str, num_bytes: int, now: float, until: float) -> None:
        """A file of at most so many bytes begins to arrive; they are its tenant's until `until`, `end_upload` or
        `add_file`. Raises `LimitError`."""
        with transaction(self._db) as db:
            db.execute("DELETE FROM uploads WHERE until <= ?", (now,))
            self._check_files(tenant)
            self._check_bytes(tenant, num_bytes, "this file")
            db.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", (upload_id, tenant, num_bytes, until))

    def end_upload(self, upload_id: str) -> None:
        """It has arrived, or will not. Idempotent."""
        self._db.execute("DELETE FROM uploads WHERE id = ?", (upload_id,))

    def uploads(self, now: float) -> set[str]:
        """Those that arrive now, at any gateway of the folder."""
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
        """Delete files that are too old, unless an open batch reads them; how many there were."""
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
        """A tenant's file."""
        row = self._db.execute("SELECT * FROM files WHERE id = ? AND tenant = ?", (file_id, tenant)).fetchone()
        return None if row is None else File(*row)

    def files(self, tenant: str) -> list[File]:
        """All of a tenant, the latest first."""
        rows = self._db.execute("SELECT * FROM files WHERE tenant = ? ORDER BY created DESC, id", (tenant,))
        return [File(*row) for row in rows]

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Whether there was one. Raises `InvalidRequestError` where a batch still reads it."""
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
        """Add a batch, `validating`, with room for its answers. Raises `InvalidRequestError` without such a file,
        `LimitError` for too many, and where there is no room."""
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

    def claim(self, owner: str, now: float, but_of: Collection[str] = (), *, takes_over: bool = True) -> Batch | None:
        """The oldest batch with work left that nobody else owns; from now on it is `owner`'s for `lease_s`.

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
        """Keep a batch; None once another owner has it."""
        renewed = self._db.execute(
            "UPDATE batches SET lease_until = ? WHERE id = ? AND owner = ?",
            (now + self._limits.lease_s, batch_id, owner),
        )
        return Held(self._get(batch_id), self._room(batch_id)) if renewed.rowcount else None

    def note(self, batch_id: str, owner: str, why: str | None) -> None:
        """Why a batch waits, for its tenant to see; None once it does not."""
        self._db.execute("UPDATE batches SET error = ? WHERE id = ? AND owner = ?", (why, batch_id, owner))

    def owners(self) -> list[str]:
        """Of batches with work left."""
        found = self._db.execute(
            f"SELECT DISTINCT owner FROM batches WHERE status IN {RUNNABLE} AND owner IS NOT NULL AND lease_until > 0"
        )
        return [owner for (owner,) in found]

    def release(self, owner: str, has_ended: bool = False) -> None:
        """Give up what an owner holds: on a graceful stop one's own batches, and at a start those of a process that
        has ended. They can be claimed at once."""
        with transaction(self._db) as db:
            held = db.execute("SELECT id FROM batches WHERE owner = ? AND lease_until > 0", (owner,)).fetchall()
            for (batch_id,) in held:
                if has_ended:
                    self.begun.gateway_ended(batch_id)
                self._give_back(batch_id, owner)

    def give_back(self, batch_id: str, owner: str) -> None:
        """Let anybody claim a batch that one owns."""
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
        """The input is valid and has so many lines, whose answers may have so many bytes. These are reserved, as far as
        half of what is left to the tenant goes. A batch that is being cancelled stays so."""
        with transaction(self._db) as db:
            db.execute(
                "UPDATE batches SET total = ?, status = CASE status WHEN 'validating' THEN 'in_progress' ELSE status "
                "END, reserved = max(reserved, min(?, max(reserved, answer_bytes) + ?)) WHERE id = ? AND owner = ?",
                (total, expected_bytes, max(0, self._num_left(self._get(batch_id).tenant)) // 2, batch_id, owner),
            )

    def answered(self, batch_id: str) -> set[int]:
        """The lines that need not run."""
        return {line for (line,) in self._db.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))}

    def answer(self, batch_id: str, owner: str, answers: Sequence[Answer]) -> int | None:
        """Keep answers, in one transaction; lines that have one keep it. Returns how many bytes further answers may
        have; None where `owner` has lost the batch or it has ended, and then nothing is kept. What was computed is kept
        also where there was less room than it needs."""
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
        """Bytes that further answers may have: what is reserved for them, and what is left to the tenant."""
        found = self._db.execute("SELECT tenant, reserved - answer_bytes FROM batches WHERE id = ?", (batch_id,))
        row: tuple[str, int] = found.fetchone()
        tenant, num_reserved = row
        return max(0, num_reserved) + max(0, self._num_left(tenant))

    def _num_left(self, tenant: str) -> int:
        """How many bytes more a tenant may have."""
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
        """The input cannot be run."""
        self._db.execute(
            "UPDATE batches SET status = 'failed', error = ?, ended = ? WHERE id = ? AND owner = ?",
            (reason, now, batch_id, owner),
        )

    def finish(self, batch_id: str, owner: str, status: str, now: float, error: str | None = None) -> None:
        """Write the files of answers, then end the batch as `status`. Nothing happens where `owner` has lost it."""
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
        """The file of the answers, or of the errors, by line; None for no line."""
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
    """Bring a database of an earlier version, or a new one, to `_VERSION`; of two processes the second finds nothing to
    do. A gateway of an earlier version that has it open already goes on; none opens it afterwards. Raises
    `sqlite3.DatabaseError` for one of a later version."""
    with transaction(db):
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > _VERSION:
            raise sqlite3.DatabaseError(f"the database has version {version}, this program knows {_VERSION} at most")
        if version == _VERSION:
            return
        add_columns(db, "batches", _LATER_COLUMNS)
        stored.migrate(db)
        db.execute(f"PRAGMA user_version = {_VERSION}")
