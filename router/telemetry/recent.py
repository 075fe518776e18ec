"""How often things happened in the last seconds: counts by name, kept second by second.

Owner: the router's tally.
"""

from __future__ import annotations

from collections import Counter, deque


class Recent:
    """See the module docstring.

    Args:
        span_s: how many seconds are kept, the present one included.
    """

    def __init__(self, span_s: int) -> None:
        self._span_s = span_s
        self._seconds: deque[tuple[int, Counter[str]]] = deque()
        self._second = -1
        self._counts: Counter[str] = Counter()
        """Of that second, the latest in which anything happened."""

    def add(self, now: float, name: str, times: int = 1) -> None:
        """It happened so many times just now. `now` never falls."""
        second = int(now)
        if second != self._second:
            self._forget(second)
            self._second, self._counts = second, Counter()
            self._seconds.append((second, self._counts))
        self._counts[name] += times

    def totals(self, now: float, within_s: int | None = None) -> Counter[str]:
        """How often each thing happened in the last `within_s` seconds (else in all that are kept), the present one,
        which is not over, included."""
        self._forget(int(now))
        first = int(now) - (within_s or self._span_s)
        total: Counter[str] = Counter()
        for second, counts in self._seconds:
            if second > first:
                total += counts
        return total

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._span_s:
            self._seconds.popleft()
