"""How much each tenant stores: sums that triggers of the database keep, within the transactions that change them.

Whoever writes keeps them, also a gateway of an earlier version that had the database open when it was completed. A look
costs the same however many files there are.
"""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

RUNNABLE: Final = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch with work left for an owner."""
_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS stored(tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL, files INTEGER NOT NULL, "
    "uploads INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS stored_by_all(one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS files_of_tenant ON files(tenant)",
    "CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches(tenant)",
    f"CREATE INDEX IF NOT EXISTS open_batches ON batches(created, id) WHERE status IN {RUNNABLE}",
)
_SUMMED: Final = (
    ("files", "bytes", "{row}bytes", 1, 0),
    ("uploads", "bytes", "{row}bytes", 0, 1),
    (
        "batches",
        "status, answer_bytes, reserved",
        f"CASE WHEN {{row}}status IN {RUNNABLE} THEN max({{row}}answer_bytes, {{row}}reserved) ELSE 0 END",
        0,
        0,
    ),
)
"""Tables, with the columns that the bytes of a row follow from, and what it counts: bytes, files and uploads."""
_ADD: Final = (
    "ON CONFLICT(tenant) DO UPDATE SET bytes = bytes + excluded.bytes, files = files + excluded.files, "
    "uploads = uploads + excluded.uploads"
)


class Stored(NamedTuple):
    """What one tenant and what all tenants together store."""

    by_all_bytes: int
    num_bytes: int
    """Bytes that the tenant stores. The next two counts are the tenant's as well."""
    num_files: int
    num_uploads: int


def stored_by(db: sqlite3.Connection, tenant: str) -> Stored:
    """The sums of one tenant, with the bytes of all tenants."""
    row = db.execute(
        "SELECT a.bytes, coalesce(s.bytes, 0), coalesce(s.files, 0), coalesce(s.uploads, 0) "
        "FROM stored_by_all a LEFT JOIN stored s ON s.tenant = ?",
        (tenant,),
    ).fetchone()
    return Stored(*row)


def migrate(db: sqlite3.Connection) -> None:
    """Create the tables of sums, fill them from the existing rows, and create the triggers that update them. Call it
    inside a transaction, once all columns exist."""
    for statement in (*_TABLES, "DELETE FROM stored"):
        db.execute(statement)
    for table, columns, num_bytes, num_files, num_uploads in _SUMMED:
        db.execute(
            f"INSERT INTO stored SELECT tenant, sum({num_bytes.format(row='')}), {num_files} * count(*), "
            f"{num_uploads} * count(*) FROM {table} WHERE true GROUP BY tenant {_ADD}"
        )
        _make_triggers(db, table, columns, num_bytes, num_files, num_uploads)
    db.execute("INSERT OR REPLACE INTO stored_by_all SELECT 1, coalesce(sum(bytes), 0) FROM stored")


def _make_triggers(
    db: sqlite3.Connection, table: str, columns: str, num_bytes: str, num_files: int, num_uploads: int
) -> None:
    new, old = num_bytes.format(row="new."), num_bytes.format(row="old.")
    changes = (
        ("INSERT", "new", new, num_files, num_uploads),
        (f"UPDATE OF {columns}", "new", f"{new} - {old}", 0, 0),
        ("DELETE", "old", f"-({old})", -num_files, -num_uploads),
    )
    for change, row, more_bytes, more_files, more_uploads in changes:
        name = f"stored_{change.split()[0].lower()}_{table}"
        db.execute(f"DROP TRIGGER IF EXISTS {name}")
        db.execute(
            f"CREATE TRIGGER {name} AFTER {change} ON {table} BEGIN "
            f"INSERT INTO stored VALUES ({row}.tenant, {more_bytes}, {more_files}, {more_uploads}) {_ADD}; "
            f"UPDATE stored_by_all SET bytes = bytes + {more_bytes}; END"
        )
