"""How the ranks of a worker divide a model."""

from __future__ import annotations

from typing import NamedTuple


class Parallelism(NamedTuple):
    """The stages and ranks of one worker, as `pp`, `tp` and `ep` of a pool."""

    tp: int = 1
    """Ranks of each stage."""
    pp: int = 1
    """Stages."""
    ep: bool = False
    """Whether each rank has whole experts."""

    @property
    def num_devices(self) -> int:
        """Number of devices of a worker."""
        return self.tp * self.pp

    def __str__(self) -> str:
        widths = f"tp {self.tp}"
        if self.pp > 1:
            widths = f"pp {self.pp}" if self.tp == 1 else f"pp {self.pp} x {widths}"
        return f"{widths} with ep" if self.ep else widths
