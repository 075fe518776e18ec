"""Counts of the tries of lines, kept while their batch is not open because another one has its turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MAX_LINES: Final = 100_000
"""Maximum number of lines of all batches that are not open. Lines of the batches that were open longest ago are
forgotten first."""


@dataclass(slots=True)
class Tries:
    """Counts of the tries of one line so far."""

    num: int = 0
    num_lost: int = 0
    """Tries that ended with the loss of a worker."""
    num_unjudged: int = 0
    """Tries that ended without a guardrail's verdict."""
    num_ends: int = 0
    """Gateways that ended while the line ran."""


class KeptTries:
    """Tries of lines whose batch is not open, for lines with a limited number of tries: after lost workers or missing
    verdicts."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, Tries]] = {}
        self._num_lines = 0

    def keep(self, batch_id: str, tries: dict[int, Tries]) -> None:
        """Store the tries of a batch that is not open any more."""
        self.take(batch_id)
        counted = {number: each for number, each in tries.items() if each.num_lost or each.num_unjudged}
        if counted:
            self._of[batch_id] = counted
            self._num_lines += len(counted)
        while self._num_lines > _MAX_LINES:
            self.take(next(iter(self._of)))

    def take(self, batch_id: str) -> dict[int, Tries]:
        """Remove and return the tries of a batch that is open again or has ended."""
        found = self._of.pop(batch_id, {})
        self._num_lines -= len(found)
        return found
