"""Which connection is closed for a new one when there are too many. Pure.

    accepted ──add──> silent ──remove──> a request is answered ──add──> silent ...

Connections that never had a request of an authenticated caller are closed first, then others; in each group the one
that has been silent longest. A connection whose request is being answered is not in here and keeps its place.
"""

from __future__ import annotations

from typing import Generic, TypeVar

C = TypeVar("C")


class SilentConnections(Generic[C]):
    """Connections without a request, in the order in which they fell silent. Every operation takes constant time."""

    def __init__(self) -> None:
        self._unauthenticated: dict[C, None] = {}
        self._known: dict[C, None] = {}

    def __len__(self) -> int:
        return len(self._unauthenticated) + len(self._known)

    def add(self, connection: C, *, is_known: bool) -> None:
        """Add a connection that has no request any more. `is_known`: a request on it has passed authentication."""
        self.remove(connection)
        (self._known if is_known else self._unauthenticated)[connection] = None

    def remove(self, connection: C) -> None:
        """Remove a connection that has a request or is closed."""
        self._unauthenticated.pop(connection, None)
        self._known.pop(connection, None)

    def take(self) -> C | None:
        """Remove and return the one to close; `None` where every connection has a request."""
        for group in (self._unauthenticated, self._known):
            if group:
                connection = next(iter(group))
                del group[connection]
                return connection
        return None
