"""Limits per minute: the amount that may be taken now, and when there is enough again. Pure."""

from __future__ import annotations

from disagg.router.api import RateView

_PERIOD_S = 60.0


class TokenBucket:
    """A token bucket: full at first, refilled at an even rate; time is an argument.

    Args:
        per_minute: the size of the bucket, which is refilled in a minute.
        now: the time.
    """

    __slots__ = ("_level", "_updated", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._updated = now

    def missing_s(self, amount: float, now: float) -> float | None:
        """Seconds until `amount` can be taken; 0 for now, None for never."""
        if amount > self.per_minute:
            return None
        return max(0.0, (amount - self.level(now)) * _PERIOD_S / self.per_minute)

    def level(self, now: float) -> float:
        """Amount that can be taken now."""
        passed_s = max(0.0, now - self._updated)
        return min(self.per_minute, self._level + passed_s * self.per_minute / _PERIOD_S)

    def view(self, now: float) -> RateView:
        """The bucket's state for the tenant."""
        level = self.level(now)
        return RateView(self.per_minute, max(0, int(level)), (self.per_minute - level) * _PERIOD_S / self.per_minute)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the size. The fill ratio stays the same, so that neither what was taken nor a debt is forgotten."""
        self._level = self.level(now) * per_minute / self.per_minute
        self._updated = max(self._updated, now)
        self.per_minute = per_minute

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, or give it back where it is negative. Raises nothing: see `missing_s`."""
        self._level = min(self.per_minute, self.level(now) - amount)
        self._updated = max(self._updated, now)


def sized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    """The bucket of a changed or new limit; None without a limit."""
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def take(bucket: TokenBucket | None, amount: int, now: float) -> None:
    """Take `amount`, if there is a limit."""
    if bucket is not None and amount:
        bucket.take(amount, now)
