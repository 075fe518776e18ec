"""Loads that change, made of short phases: a step, a ramp, and a day of two kinds of requests.

The day has 24 hours of 100 s. Chats follow the sun; documents, with long prompts and short answers, come most in the
evening, so that the ratio of prefill to decode work changes, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from disagg.simulator.world.phases import PlannedLoad, load_of_phases, make_phases
from disagg.simulator.world.users import UserRequest

MAX_MODEL_LEN = 4096
HOUR_S = 100.0
_PIECE_S = 20.0

Kind = dict[str, Any]
MIXED: Kind = {"workload": {"kind": "random", "isl": 1500, "osl": 200}, "slo": {"ttft_s": 3.0, "tpot_s": 0.02}}
CHAT: Kind = {
    "workload": {"kind": "random", "isl": [200, 1400], "osl": [50, 250]},
    "slo": {"ttft_s": 2.0, "tpot_s": 0.02},
}
DOCUMENT: Kind = {
    "workload": {"kind": "random", "isl": [1800, 3600], "osl": [20, 80]},
    "slo": {"ttft_s": 6.0, "tpot_s": 0.04},
}


def phases(kind: Kind, rates: Sequence[tuple[float, float]]) -> PlannedLoad:
    """Requests of one kind: (seconds, requests per second) one after the other."""
    raw = [
        {"duration_s": seconds, **kind, "arrivals": {"kind": "poisson", "rate_per_s": rate}} for seconds, rate in rates
    ]
    return load_of_phases(make_phases(raw), MAX_MODEL_LEN)


def step(seed: int) -> PlannedLoad:
    """A load that jumps from 1 to 4 requests a second, and back."""
    return phases(_seeded(MIXED, seed), [(600.0, 1.0), (900.0, 4.0), (600.0, 1.0)])


def ramp(seed: int) -> PlannedLoad:
    """A load that grows from 0.5 to 5 requests a second in 20 minutes, and falls as slowly."""
    up = [0.5 + 4.5 * (at + 0.5) / 60 for at in range(60)]
    return phases(_seeded(MIXED, seed), [(_PIECE_S, rate) for rate in up + up[::-1]])


def day(seed: int) -> PlannedLoad:
    """Chats by day, documents in the evening."""
    hours = [at + 0.5 for at in range(24)]
    chats = [0.3 + 3.0 * max(0.0, math.sin(math.pi * (hour - 6.0) / 14.0)) for hour in hours]
    documents = [0.15 + 0.7 * max(0.0, math.cos(math.pi * (hour - 20.0) / 8.0)) ** 2 for hour in hours]
    return _merged(
        phases(_seeded(CHAT, seed), [(HOUR_S, rate) for rate in chats]),
        phases(_seeded(DOCUMENT, seed + 500), [(HOUR_S, rate) for rate in documents]),
    )


LOADS: dict[str, Callable[[int], PlannedLoad]] = {"step": step, "ramp": ramp, "day": day}
RISES = {"step": 1, "ramp": 1, "day": 2}
"""How often each load grows; it falls as often."""


def _seeded(kind: Kind, seed: int) -> Kind:
    return {**kind, "workload": {**kind["workload"], "seed": 1000 * seed}}


def _merged(*loads: PlannedLoad) -> PlannedLoad:
    """Several at a time. None has turns that follow others."""
    together = sorted(
        ((request.outlined.due_s, number, request) for number, load in enumerate(loads) for request in load.requests),
        key=lambda item: item[:2],
    )
    return PlannedLoad(
        requests=[_renumbered(request, index) for index, (_, _, request) in enumerate(together)],
        window_s=max(load.window_s for load in loads),
    )


def _renumbered(request: UserRequest, index: int) -> UserRequest:
    return replace(request, outlined=replace(request.outlined, index=index))
