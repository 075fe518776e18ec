"""The findings of `disagg doctor`: what was checked, whether it is well, and what to do if not. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "FAIL"]
"""Level of a finding: `warn` works, but not as well as it could, or not everywhere; `FAIL` does not work."""


class Finding(NamedTuple):
    """Result of one check."""

    level: Level
    name: str
    text: str
    next_step: str = ""
    """A command, or another step that helps."""
