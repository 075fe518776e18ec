"""The entries of a plan by sequence. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from disagg.engine.plan import ScheduledSequence, StepPlan
from disagg.engine.request import Sequence


class Run(NamedTuple):
    """What a step computes of one sequence."""

    last_known: ScheduledSequence
    """Entry of its last token that is known."""
    drafts: tuple[int, ...] = ()
    """Drafts that are computed behind it, each in an entry of its own."""


def runs(plan: StepPlan) -> Iterable[Run]:
    """Of each sequence, in the order of the plan."""
    found: dict[Sequence, Run] = {}
    for entry in plan.entries:
        if entry.drafts:
            found[entry.sequence] = Run(found[entry.sequence].last_known, entry.drafts)
        else:
            found[entry.sequence] = Run(entry)
    return found.values()
