"""Which questions run, which wait, and which are refused: no tenant fills a guardrail's places. Pure.

    enter ──> running ──leave──> (gone)
      ├────> waiting ──> running, in place of one that left: of the tenant with the fewest running
      └─ PlacesError

The last quarter of the places, and of those that wait, is never one tenant's: one place at least, where there are two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

_RESERVED = 4
"""One in this number of places is for other tenants."""


class PlacesError(Exception):
    """There is no place, not to wait either; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A question, known by its identity."""

    tenant: str
    is_sole: bool
    """Whether there is no other tenant: it may have all places."""


class Places:
    """Of one guardrail.

    Args:
        max_running: questions at a time.
        max_waiting: further ones.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        """Questions that run, by tenant; without zeros."""
        self._waiting: dict[Ticket, None] = {}
        """The first that came is the first."""

    def enter(self, ticket: Ticket) -> bool:
        """Whether it runs now; else it waits. Raises `PlacesError`."""
        if self._may_run(ticket):
            self._running[ticket.tenant] += 1
            return True
        own = sum(one.tenant == ticket.tenant for one in self._waiting)
        if len(self._waiting) >= self._max_waiting:
            raise PlacesError(f"{self._running.total() + len(self._waiting)} questions run or wait")
        if own >= _share(self._max_waiting, ticket):
            raise PlacesError(f"{self._running[ticket.tenant] + own} questions of this tenant run or wait")
        self._waiting[ticket] = None
        return False

    def leave(self, ticket: Ticket) -> Ticket | None:
        """It has ended, or waits no longer. The one that runs now in its place, if any."""
        if ticket in self._waiting:
            del self._waiting[ticket]
            return None
        self._running[ticket.tenant] -= 1
        if not self._running[ticket.tenant]:
            del self._running[ticket.tenant]
        able = [one for one in self._waiting if self._may_run(one)]
        if not able:
            return None
        found = min(able, key=lambda one: self._running[one.tenant])
        del self._waiting[found]
        self._running[found.tenant] += 1
        return found

    def _may_run(self, ticket: Ticket) -> bool:
        has_room = self._running.total() < self._max_running
        return has_room and self._running[ticket.tenant] < _share(self._max_running, ticket)


def _share(num_places: int, ticket: Ticket) -> int:
    if ticket.is_sole:
        return num_places
    return max(1, num_places - -(-num_places // _RESERVED))
