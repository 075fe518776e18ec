"""A day of eight phases for two workers, whose workloads, rates and limits differ, and multiples of it.

A multiple m has m times as many requests in each phase, in the same pattern. Lengths of answers are not told. The rates
are about 0.9 times what the best static shape of two workers serves in each phase, found with `Column.best`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.elastic.workloads import requests
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.workload import OutlinedRequest
from disagg.simulator.world.users import UserRequest

DAY = "day"
"""Name of the workload that is a day."""
PHASE_S = 200.0


class Phase(NamedTuple):
    """Requests of one kind for `PHASE_S`, and their limits."""

    workload: str
    rate_per_s: float
    ttft_s: float
    tpot_s: float


PHASES = (
    Phase("512/64", 3.7, 1.0, 0.030),
    Phase("512/128", 3.7, 4.0, 0.015),
    Phase("1024/48", 2.2, 2.0, 0.050),
    Phase("256/192", 3.9, 1.0, 0.020),
    Phase("512/64", 4.0, 0.5, 0.050),
    Phase("varied", 3.2, 2.0, 0.020),
    Phase("512/128", 2.5, 4.0, 0.012),
    Phase("1024/48", 2.0, 1.0, 0.050),
)


def day_requests(multiple: float, seed: int) -> tuple[list[OutlinedRequest], list[Slo]]:
    """The requests of a multiple of the day, and their limits."""
    asked: list[OutlinedRequest] = []
    limits: list[Slo] = []
    for number, phase in enumerate(PHASES):
        rate_per_s = multiple * phase.rate_per_s
        for each in requests(phase.workload, rate_per_s, 100 * seed + number, round(rate_per_s * PHASE_S)):
            asked.append(
                OutlinedRequest(
                    index=len(asked),
                    due_s=number * PHASE_S + each.due_s,
                    parts=each.parts,
                    max_tokens=each.max_tokens,
                    group=f"phase {number}",
                )
            )
            limits.append(Slo(ttft_s=phase.ttft_s, tpot_s=phase.tpot_s))
    return asked, limits


def with_targets(asked: Sequence[OutlinedRequest], limits: Sequence[Slo], brings: str) -> list[UserRequest]:
    """The requests with what they bring of their limits: `nothing`, `ttft` or `both`."""
    if brings == "nothing":
        return [UserRequest(each) for each in asked]
    return [
        UserRequest(each, limit if brings == "both" else Slo(ttft_s=limit.ttft_s))
        for each, limit in zip(asked, limits, strict=True)
    ]
