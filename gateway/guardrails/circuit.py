"""When a guardrail is asked no more because it keeps failing, by whom, and when it is tried again. Pure.

closed ──failures in a row──> open ──a pause──> one trial ──good──> closed
                               ^───────failed──────┘

One tenant's texts may be what it fails at: failures in a row of one tenant's questions open the circuit for that
tenant. It is open for all, which is an outage, where questions of several failed and none was answered between; or
those of the only tenant there is. Whose trial failed then has no other one for two pauses, so that a tenant whose
questions always fail does not keep it open for all.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Literal

FAILURES: Final = 5
"""Failures in a row after which the guardrail is asked no more."""
PAUSE_S: Final = 5.0
"""Seconds until the guardrail is tried again."""

Change = Literal["opened", "closed"] | None


class Circuit:
    """Circuit breaker of one tenant, or of all. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self._num_failed = 0
        self._opened_at: float | None = None
        self._is_tried = False
        self.open_since: float | None = None
        """Time when it was opened, before any trials; `None` while it is closed."""

    @property
    def is_open(self) -> bool:
        """Whether the guardrail is asked for trials only."""
        return self._opened_at is not None

    @property
    def is_tried(self) -> bool:
        """Whether a trial is under way."""
        return self._is_tried

    def asks(self, now: float) -> bool:
        """Whether to ask now. Where it is open this is the one trial, which must be reported or withdrawn."""
        if self._opened_at is None:
            return True
        if self._is_tried or now < self._opened_at + PAUSE_S:
            return False
        self._is_tried = True
        return True

    def passed(self) -> Change:
        """Record that the guardrail gave a verdict."""
        was_open = self.is_open
        self._num_failed, self._opened_at, self._is_tried, self.open_since = 0, None, False, None
        return "closed" if was_open else None

    def failed(self, now: float) -> Change:
        """Record that the guardrail gave no verdict."""
        self._num_failed += 1
        if self.is_open:
            if self._is_tried:
                self._opened_at, self._is_tried = now, False
            return None
        if self._num_failed < FAILURES:
            return None
        self.open(now)
        return "opened"

    def open(self, now: float) -> None:
        """Stop asking the guardrail, except for trials."""
        self._opened_at = now
        self.open_since = now if self.open_since is None else self.open_since

    def withdrawn(self) -> None:
        """Record that the caller left before there was a verdict."""
        self._is_tried = False


class Circuits:
    """Circuits of one guardrail: one for all, and one for each tenant whose last question failed."""

    def __init__(self) -> None:
        self._all = Circuit()
        self._own: dict[str, Circuit] = {}
        self._row: Counter[str] = Counter()
        """Failures of each tenant's questions since it gave a verdict to anybody."""

    @property
    def is_open(self) -> bool:
        """Whether the guardrail is not asked for at least one tenant."""
        return self._all.is_open or any(own.is_open for own in self._own.values())

    @property
    def is_outage(self) -> bool:
        """Whether the guardrail is asked for no tenant, so that no tenant's texts can be the reason."""
        return self._all.is_open

    def open_since(self, tenant: str) -> float | None:
        """Time since which the guardrail is not asked for a tenant; `None` if it is asked."""
        own = self._own.get(tenant)
        return self._all.open_since if self._all.is_open or own is None else own.open_since

    def asks(self, tenant: str, now: float) -> bool:
        """Whether to ask now. As of `Circuit`."""
        own = self._own.get(tenant)
        if own is not None and not own.asks(now):
            return False
        if self._all.asks(now):
            return True
        if own is not None:
            own.withdrawn()
        return False

    def passed(self, tenant: str) -> bool:
        """It gave a verdict; whether it was not asked before."""
        self._row.clear()
        own = self._own.pop(tenant, None)
        was_open = own is not None and own.is_open
        if self._all.passed() == "closed":
            self._own.clear()
            return True
        return was_open

    def failed(self, tenant: str, now: float, is_sole: bool = False) -> Literal["all", "tenant"] | None:
        """It gave none; for whom it is asked no more from now on. `is_sole`: there is no other tenant."""
        self._row[tenant] += 1
        own = Circuit() if is_sole else self._own.setdefault(tenant, Circuit())
        change = own.failed(now)
        if self._all.is_open:
            if self._all.is_tried:
                own.open(now + PAUSE_S)
            self._all.failed(now)
            return None
        if (is_sole or len(self._row) > 1) and self._row.total() >= FAILURES:
            self._all.open(now)
            return "all"
        return "tenant" if change == "opened" else None

    def withdrawn(self, tenant: str) -> None:
        """Whoever asked left before there was a verdict, or the question was one that it does not answer."""
        if tenant in self._own:
            self._own[tenant].withdrawn()
        self._all.withdrawn()
