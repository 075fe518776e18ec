"""What is compared: the engine without drafts, with lookup and the number of drafts that it chooses, and with lookup
and one number of drafts in every step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from msgspec import structs
from typing_extensions import override

from disagg.engine.config import SpeculationOptions, WorkerConfig
from disagg.engine.core.engine_core import EngineCore
from disagg.engine.plan import ModelRunner
from disagg.engine.request import Sequence
from disagg.engine.speculation.lookup import Lookup
from disagg.engine.speculation.speculation import Speculation
from disagg.proto.messages import StepSample
from tests.support.drafting import draft

OFF, LOOKUP = "off", "lookup"
FIXED = (1, 2, 3, 4, 6, 8)
"""Numbers of drafts a step of the sweep."""


def fixed_name(num_drafts: int) -> str:
    """Name of the method with so many drafts a step."""
    return f"fixed {num_drafts}"


class FixedSpeculation(Speculation):
    """Lookup with the same number of drafts in every step: of each sequence that has a match as many as it proposes,
    up to `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__(Lookup(), (), max_draft=num_drafts)
        self._lookup = Lookup()
        self._num_drafts = num_drafts

    @override
    def plan(
        self, sequences: Seq[tuple[Sequence, int]], *, num_rows: int, context: int, most_rows: int, most_ms: float
    ) -> list[tuple[int, ...]]:
        num_free = most_rows - num_rows
        drafts = []
        for sequence, most in sequences:
            proposal = self._lookup.propose(sequence, min(most, self._num_drafts, num_free))
            drafts.append(proposal.token_ids)
            num_free -= len(proposal.token_ids)
        return drafts

    @override
    def observe(self, rows: int, context: int, ms: float) -> None:
        return

    @override
    def forget(self, sequence: Sequence) -> None:
        self._lookup.forget(sequence)


def make_cores(
    runner: ModelRunner, config: WorkerConfig, calibration: Seq[StepSample], fixed: Seq[int]
) -> dict[str, EngineCore]:
    """A core of its own for each method, by its name: without drafts, lookup, and the fixed numbers."""

    def core(options: SpeculationOptions) -> EngineCore:
        return EngineCore(runner, config=structs.replace(config, speculation=options), calibration=calibration)

    cores = {OFF: core(SpeculationOptions(method="off")), LOOKUP: core(SpeculationOptions(method="lookup"))}
    for num_drafts in fixed:
        cores[fixed_name(num_drafts)] = core(SpeculationOptions(method="off"))
        draft(cores[fixed_name(num_drafts)], FixedSpeculation(num_drafts))
    return cores
