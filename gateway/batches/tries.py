"""What became of lines so far, also while their batch is not open: it gave its turn to another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MAX_LINES: Final = 100_000
"""Of all batches that are not open. Those of the batches that were open longest ago are forgotten first."""


@dataclass(slots=True)
class Tries:
    """What became of a line so far."""

    num: int = 0
    num_lost: int = 0
    """Ended with a lost worker."""
    num_unjudged: int = 0
    """Ended without a guardrail's verdict."""
    num_ends: int = 0
    """Gateways that ended while it ran."""


class KeptTries:
    """The lines of batches that are not open, which have a bound of their own: lost workers, and missing verdicts."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, Tries]] = {}
        self._num_lines = 0

    def keep(self, batch_id: str, tries: dict[int, Tries]) -> None:
        """A batch is not open any more."""
        self.take(batch_id)
        counted = {number: each for number, each in tries.items() if each.num_lost or each.num_unjudged}
        if counted:
            self._of[batch_id] = counted
            self._num_lines += len(counted)
        while self._num_lines > _MAX_LINES:
            self.take(next(iter(self._of)))

    def take(self, batch_id: str) -> dict[int, Tries]:
        """It is open again, or has ended."""
        found = self._of.pop(batch_id, {})
        self._num_lines -= len(found)
        return found
