"""Sums by tenant, day and model in one SQLite file, to which several gateways of a machine add.

Calls block on the disk: they belong on a thread. A commit survives the death of the process (`synchronous=NORMAL`); a
loss of power may take the latest ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from disagg.gateway.sqlite import add_columns, open_database, transaction
from disagg.gateway.usage.counts import OTHERS, Batch, Counts, Key, Page, Part, Row, day_of
from disagg.gateway.usage.parts import Known, continued

FILE: Final = "usage.sqlite"
MAX_ROWS_A_DAY: Final = 20_000
"""Maximum number of rows of a day, twice as many as there can be keys. Usage of further tenants is added under
`OTHERS`."""
PART_S: Final = 3600.0
"""Seconds for which the usage of an answer that broke off is remembered."""
MAX_PARTS: Final = 10_000
MAX_PART_BYTES: Final = 64 << 20
"""Maximum bytes of the marks of all parts; the latest ones are kept."""
_FIELDS: Final = Counts._fields
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS usage(
    day INTEGER NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, requests INTEGER NOT NULL,
    failed INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, PRIMARY KEY(day, tenant, model)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts(
    id INTEGER PRIMARY KEY, tenant TEXT NOT NULL, stream BLOB NOT NULL, made REAL NOT NULL,
    failed INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS parts_by_stream ON parts(stream);
"""
_LATER_COLUMNS: Final = (
    ("marks", "BLOB NOT NULL DEFAULT x''"),
    ("num_again", "INTEGER NOT NULL DEFAULT 0"),
    ("num_continued", "INTEGER NOT NULL DEFAULT 0"),
)
"""Columns of `parts` that an earlier version does not write: tokens of its parts that are delivered again are counted
again."""
_KNOWN: Final = ", ".join(Known._fields)
_WHERE: Final = " WHERE day = ? AND tenant = ? AND model = ?"
_ADD: Final = f"UPDATE usage SET {', '.join(f'{name} = {name} + ?' for name in _FIELDS)}{_WHERE}"
_INSERT: Final = (
    f"INSERT INTO usage(day, tenant, model, {', '.join(_FIELDS)}) VALUES (?, ?, ?{', ?' * len(_FIELDS)}) "
    f"ON CONFLICT DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in _FIELDS)}"
)


class UsageStore:
    """Owner of one connection; used by one thread at a time.

    Args:
        folder: of the file; made where it is missing.
        retention_days: how many days are kept, the present one included.
        busy_timeout_s: how long a call waits for other processes.

    Raises:
        OSError, sqlite3.Error: if it cannot be used; from every method, and then nothing of the call has happened.
    """

    def __init__(self, folder: Path, retention_days: int, busy_timeout_s: float) -> None:
        self._db = open_database(folder / FILE, _SCHEMA, "NORMAL", busy_timeout_s)
        try:
            with transaction(self._db):
                add_columns(self._db, "parts", _LATER_COLUMNS)
        except BaseException:
            self._db.close()
            raise
        self._retention_days = retention_days
        self._cleaned_on: int | None = None

    def close(self) -> None:
        """Close the database connection of this store."""
        self._db.close()

    def write(self, batch: Batch, now: float) -> None:
        """Add a batch to the sums, in one transaction."""
        with transaction(self._db):
            for part in batch.parts:
                self._add(part.key, self._uncounted(part, now))
            for key, counts in batch.sums.items():
                self._add(key, counts)
            today = day_of(now)
            if today != self._cleaned_on or batch.parts:
                self._forget(today, now)
        self._cleaned_on = today

    def read(self, days: int, tenant: str | None, limit: int, now: float) -> Page:
        """The usage of the last `days` days, today included.

        Args:
            days: at least 1.
            tenant: whose use; None for all.
            limit: most rows.
            now: seconds since the epoch.
        """
        last = day_of(now)
        first = last - days + 1
        whose, values = ("", ()) if tenant is None else (" AND tenant = ?", (tenant,))
        found = self._db.execute(
            f"SELECT tenant, day, model, {', '.join(_FIELDS)} FROM usage WHERE day BETWEEN ? AND ?{whose} "
            "ORDER BY day DESC, tenant, model LIMIT ?",
            (first, last, *values, limit + 1),
        ).fetchall()
        num_key = len(Key._fields)
        rows = [Row(Key(*row[:num_key]), Counts(*row[num_key:])) for row in found[:limit]]
        return Page(rows, first, last, len(found) > limit)

    def _add(self, key: Key, counts: Counts) -> None:
        if self._db.execute(_ADD, (*counts, key.day, key.tenant, key.model)).rowcount:
            return
        (count,) = self._db.execute("SELECT count(*) FROM usage WHERE day = ?", (key.day,)).fetchone()
        tenant = key.tenant if count < MAX_ROWS_A_DAY else OTHERS
        self._db.execute(_INSERT, (key.day, tenant, key.model, *counts))

    def _uncounted(self, part: Part, now: float) -> Counts:
        """The counts of an answer that no earlier call has recorded."""
        tenant, found = part.key.tenant, []
        if part.continues:
            found = self._db.execute(
                "DELETE FROM parts WHERE id = (SELECT id FROM parts WHERE stream = ? AND tenant = ? ORDER BY id DESC "
                f"LIMIT 1) RETURNING {_KNOWN}",
                (part.stream, tenant),
            ).fetchall()
        counts, known = continued(part, Known(*found[0]) if found else None)
        if part.is_open:
            self._db.execute(
                f"INSERT INTO parts(tenant, stream, made, {_KNOWN}) VALUES (?, ?, ?{', ?' * len(known)})",
                (tenant, part.stream, now, *known),
            )
        return counts

    def _forget(self, today: int, now: float) -> None:
        self._db.execute("DELETE FROM usage WHERE day <= ?", (today - self._retention_days,))
        self._db.execute(
            "DELETE FROM parts WHERE made < ? OR id <= (SELECT max(id) FROM parts) - ?", (now - PART_S, MAX_PARTS)
        )
        sums = "SELECT id, sum(length(marks)) OVER (ORDER BY id DESC) AS num_bytes FROM parts"
        self._db.execute(
            f"DELETE FROM parts WHERE id IN (SELECT id FROM ({sums}) WHERE num_bytes > ?)", (MAX_PART_BYTES,)
        )
