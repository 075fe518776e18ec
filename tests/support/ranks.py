"""Into how many ranks a worker is divided, and how, for tests of pairs of workers that differ in it."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import override


class Ranks(NamedTuple):
    """The fields `tp` and `ep` of a worker."""

    tp: int
    ep: bool = False
    """Whether each rank has whole experts."""

    @override
    def __str__(self) -> str:
        return f"{self.tp}{'-ep' if self.ep else ''}"


ONE, TWO, FOUR = Ranks(1), Ranks(2), Ranks(4)
TWO_EP, FOUR_EP = Ranks(2, ep=True), Ranks(4, ep=True)
