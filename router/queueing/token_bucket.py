"""A bucket of what may be taken in a minute. It is full at first and fills at an even rate; time is an argument."""

from __future__ import annotations

_PERIOD_S = 60.0


class TokenBucket:
    """See the module docstring.

    Args:
        per_minute: what fits in, and what flows in in a minute.
        now: the time.
    """

    __slots__ = ("_level", "_updated", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated = now

    def missing_s(self, amount: float, now: float) -> float | None:
        """How long until so much can be taken: 0 for now; None for never."""
        if amount > self.per_minute:
            return None
        return max(0.0, (amount - self.level(now)) * _PERIOD_S / self.per_minute)

    def level(self, now: float) -> float:
        """What is in it."""
        if now > self._updated:
            self._level = min(self.per_minute, self._level + (now - self._updated) * self.per_minute / _PERIOD_S)
            self._updated = now
        return self._level

    def resize(self, per_minute: int, now: float) -> None:
        """Another size from now on. It stays as full as it is, so that neither what was taken nor what is owed is
        forgotten."""
        self._level = self.level(now) * per_minute / self.per_minute
        self.per_minute = per_minute

    def take(self, amount: float, now: float) -> None:
        """Take so much, or give it back where it is negative. Raises nothing: see `missing_s`."""
        self._level = min(self.per_minute, self.level(now) - amount)
