"""`random`: any worker that has room, each equally likely."""

from __future__ import annotations

from disagg.router.placement.draw import Draw
from disagg.router.placement.policies.base import Simple


class Random(Simple):
    """Looks at a few neighbours from a drawn position on; one of those that have room is drawn."""

    name = "random"

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def start(self, turn: int, count: int) -> int:
        """Anywhere. Not the draw that settles ties, which is `turn`'s own."""
        return self._draw(~turn, count)
