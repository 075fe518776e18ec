"""What `disagg doctor` finds: one thing looked at, whether it is well, and what to do if not. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "FAIL"]
"""`warn` works, but not as well as it could, or not everywhere; `FAIL` does not work."""


class Finding(NamedTuple):
    """One thing that was looked at."""

    level: Level
    name: str
    text: str
    next_step: str = ""
    """A command, or what else to do."""
