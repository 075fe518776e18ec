"""The stages of a worker's start: which one goes on, and how long those before it took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from disagg.proto.messages import StartPhase

WORDS: Final[Mapping[str, str]] = {
    "libraries": "loads torch",
    "kernels": "gets the CPU kernels, which are compiled once",
    "weights": "loads the weights",
    "kv_memory": "allocates KV memory",
    "ranks": "waits for its other ranks",
    "warm_up": "computes its first steps",
    "calibration": "measures steps",
    "listen": "opens its port",
}
"""Stage -> what a worker does in it, for people."""

OnStage = Callable[[str], None]
"""Called with a stage of `WORDS` when it begins."""


def no_stages(stage: str) -> None:
    """The default: reports nothing."""


class StartStages:
    """One stage begins where the last one ends.

    Args:
        clock: gives seconds.
        on_stage: called with each stage that begins.
    """

    def __init__(self, clock: Callable[[], float], on_stage: OnStage = no_stages) -> None:
        self._clock = clock
        self._phases: list[StartPhase] = []
        self._stage = ""
        self._began_s = 0.0
        self.on_stage = on_stage

    @property
    def phases(self) -> tuple[StartPhase, ...]:
        """Stages that have ended."""
        return tuple(self._phases)

    def add(self, phases: Iterable[StartPhase]) -> None:
        """Of what came before the first stage."""
        self._phases.extend(phases)

    def begin(self, stage: str) -> None:
        """The present stage ends, and this one begins."""
        self.end()
        self._stage, self._began_s = stage, self._clock()
        self.on_stage(stage)

    def end(self) -> None:
        """The present stage ends, and none begins."""
        if self._stage:
            self._phases.append(StartPhase(self._stage, self._clock() - self._began_s))
        self._stage = ""
