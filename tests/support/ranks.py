"""Into how many ranks a worker is divided, and how, for tests of pairs of workers that differ in it."""

from __future__ import annotations

from typing import NamedTuple

from typing_extensions import override


class Ranks(NamedTuple):
    """The fields `tp`, `ep` and `pp` of a worker."""

    tp: int
    ep: bool = False
    """Whether each rank has whole experts."""
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        """Of all stages."""
        return self.tp * self.pp

    @override
    def __str__(self) -> str:
        stages = f"{self.pp}x" if self.pp > 1 else ""
        return f"{stages}{self.tp}{'-ep' if self.ep else ''}"


ONE, TWO, FOUR = Ranks(1), Ranks(2), Ranks(4)
TWO_EP, FOUR_EP = Ranks(2, ep=True), Ranks(4, ep=True)
TWO_STAGES, THREE_STAGES, TWO_BY_TWO = Ranks(1, pp=2), Ranks(1, pp=3), Ranks(2, pp=2)
TWO_BY_TWO_EP = Ranks(2, ep=True, pp=2)
