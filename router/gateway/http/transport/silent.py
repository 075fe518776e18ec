"""Which connection gives its place to a new one when all places are taken. Pure.

    accepted ──add──> silent ──remove──> a request is answered ──add──> silent ...

Connections that have never carried a request of a known caller go first, then known ones; in each group the one that
has been silent longest. A connection whose request is being answered is not in here and keeps its place.
"""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")


class SilentConnections(Generic[C]):
    """Connections without a request, in the order in which they fell silent. Every operation takes constant time."""

    def __init__(self) -> None:
        self._strangers: dict[C, None] = {}
        self._known: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._known)

    def add(self, connection: C, *, is_known: bool) -> None:
        """It has no request from now on. `is_known`: a request on it has passed authentication."""
        self.remove(connection)
        (self._known if is_known else self._strangers)[connection] = None

    def remove(self, connection: C) -> None:
        """It has a request, or is closed."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def take(self) -> C | None:
        """Remove and return the one to close; `None` where every connection has a request."""
        for group in (self._strangers, self._known):
            if group:
                connection = next(iter(group))
                del group[connection]
                return connection
        return None
