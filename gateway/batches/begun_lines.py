"""Lines that ran when their gateway ended: remembered, run alone, and at last not run again.

    begun ──answer──> forgotten
      └── its gateway ends ──> a suspect, which runs alone ── its gateway ends ──> answered as failed

Lines of a batch are noted once a gateway has ended with it: until then no line costs a write before its answer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import Final

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS begun(
    batch TEXT NOT NULL, line INTEGER NOT NULL, runs INTEGER NOT NULL, ends INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY(batch, line)) WITHOUT ROWID;
"""
MAX_ENDS: Final = 2
"""Number of gateways that may end while a line runs; after that it is not run again."""


class BegunLines:
    """The table of begun lines in a store's database. Its methods run within the store's transaction, if there is
    one."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def begin(self, batch_id: str, lines: Collection[int]) -> None:
        """Note that these lines run from now on."""
        self._db.executemany(
            "INSERT INTO begun(batch, line, runs) VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET runs = 1",
            [(batch_id, line) for line in lines],
        )

    def rest(self, batch_id: str, lines: Collection[int]) -> None:
        """Note that these lines have no answer and do not run at present."""
        rows = [(batch_id, line) for line in lines]
        self._db.executemany("UPDATE begun SET runs = 0 WHERE batch = ? AND line = ?", rows)

    def rest_all(self, batch_id: str) -> None:
        """Note that no line of the batch runs any more, because its gateway gave it back."""
        self._db.execute("UPDATE begun SET runs = 0 WHERE batch = ?", (batch_id,))

    def gateway_ended(self, batch_id: str) -> None:
        """Count the end of the gateway that had the batch, for the batch and for each line that ran there."""
        self._db.execute("UPDATE batches SET num_ends = num_ends + 1 WHERE id = ?", (batch_id,))
        self._db.execute("UPDATE begun SET ends = ends + 1, runs = 0 WHERE batch = ? AND runs", (batch_id,))

    def forget(self, batch_id: str, lines: Collection[int] | None = None) -> None:
        """Delete the notes of these lines, which have answers, or of all lines of the batch if None."""
        if lines is None:
            self._db.execute("DELETE FROM begun WHERE batch = ?", (batch_id,))
            return
        self._db.executemany("DELETE FROM begun WHERE batch = ? AND line = ?", [(batch_id, line) for line in lines])

    def num_ends(self, batch_id: str) -> dict[int, int]:
        """Number of gateways that ended while a line ran, by line number; lines with none are left out."""
        return dict(self._db.execute("SELECT line, ends FROM begun WHERE batch = ? AND ends", (batch_id,)).fetchall())
