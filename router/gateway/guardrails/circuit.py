"""When a guardrail is asked no more because it keeps failing, and when it is tried again. Pure.

closed ──failures in a row──> open ──a pause──> one trial ──good──> closed
                               ^───────failed──────┘
"""

from __future__ import annotations

from typing import Final, Literal

FAILURES: Final = 5
"""In a row, after which it is asked no more."""
PAUSE_S: Final = 5.0
"""Until it is tried again."""

Change = Literal["opened", "closed"] | None


class Circuit:
    """Of one guardrail. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._opened_at: float | None = None
        self._is_tried = False

    @property
    def is_open(self) -> bool:
        """Whether it is not asked, but for trials."""
        return self._opened_at is not None

    def asks(self, now: float) -> bool:
        """Whether to ask now. Where it is open this is the one trial, which must be reported or withdrawn."""
        if self._opened_at is None:
            return True
        if self._is_tried or now < self._opened_at + PAUSE_S:
            return False
        self._is_tried = True
        return True

    def passed(self) -> Change:
        """It gave a verdict."""
        was_open = self.is_open
        self._num_failed, self._opened_at, self._is_tried = 0, None, False
        return "closed" if was_open else None

    def failed(self, now: float) -> Change:
        """It gave none."""
        self._num_failed += 1
        if self.is_open:
            if self._is_tried:
                self._opened_at, self._is_tried = now, False
            return None
        if self._num_failed < FAILURES:
            return None
        self._opened_at = now
        return "opened"

    def withdrawn(self) -> None:
        """Whoever asked left before there was a verdict."""
        self._is_tried = False
