"""How long the turns of the gateway's event loop take: the longest, and how many were too long. Pure.

A turn is all that the loop does between two polls of its sockets; everything that the loop serves waits that long.
"""

from __future__ import annotations

LIMITS_S = (0.005, 0.05)
"""Turns above these are counted; above the last one they are logged."""
WINDOW_S = 60.0
"""Length of a window in seconds. The longest turn of a window is kept for one window more."""


class LoopTimes:
    """Owner: the loop's selector, which writes on the loop's thread. Others read single numbers on any thread."""

    def __init__(self) -> None:
        self.began: float | None = None
        """When the present turn began; `None` while the loop waits."""
        self.num_turns = 0
        self.num_long = [0] * len(LIMITS_S)
        """Turns that were longer than each of `LIMITS_S`."""
        self.longest_s = 0.0
        """Longest turn above the first of `LIMITS_S` since the last `forget`, in seconds."""
        self._window = 0
        self._longest = [0.0, 0.0]
        """Longest turns of the window before the present one, and of the present one, in seconds."""

    def forget(self) -> None:
        """Reset the counts of long turns, so that they leave out the start of the process."""
        self.num_long = [0] * len(LIMITS_S)
        self.longest_s, self._longest = 0.0, [0.0, 0.0]

    def turn(self, seconds: float, now: float) -> None:
        """Record a turn that took longer than the first of `LIMITS_S`."""
        for i, limit_s in enumerate(LIMITS_S):
            self.num_long[i] += seconds > limit_s
        self.longest_s = max(self.longest_s, seconds)
        self._move(now)
        self._longest[1] = max(self._longest[1], seconds)

    def turn_s(self, now: float) -> float:
        """Duration of the present turn in seconds; 0 while the loop waits."""
        began = self.began
        return 0.0 if began is None else max(0.0, now - began)

    def recent_longest_s(self, now: float) -> float:
        """The longest turn of the last one to two windows, or the present one if that is longer. 0 where none was
        longer than the first of `LIMITS_S`."""
        window = int(now / WINDOW_S)
        kept = self._longest[max(0, window - self._window) :]
        return max([*kept, *(turn_s for turn_s in [self.turn_s(now)] if turn_s > LIMITS_S[0])], default=0.0)

    def _move(self, now: float) -> None:
        window = int(now / WINDOW_S)
        if window == self._window + 1:
            self._longest = [self._longest[1], 0.0]
        elif window > self._window:
            self._longest = [0.0, 0.0]
        self._window = window
