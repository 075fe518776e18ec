"""Load that changes: scenarios one after the other, each for a time, as over a day.

    phases:
      - {name: morning, duration_s: 600, workload: {...}, arrivals: {kind: poisson, rate_per_s: 2}, slo: {ttft_s: 1}}
      - ...

A phase's requests are those of its scenario within its time, later turns included; they bring the phase's limits, and
its name is their group. Phases of one workload draw different requests: the phase's number is added to their seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from disagg.loadtests.scenario import Scenario, make_scenario
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.workload import OutlinedRequest, outline
from disagg.simulator.world.users import UserRequest

MAX_PHASES = 1000


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, for a duration."""

    name: str
    duration_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)]
    scenario: Scenario


@dataclass(frozen=True, kw_only=True)
class PlannedLoad:
    """The requests of the users, and the time that they take."""

    requests: list[UserRequest]
    window_s: float
    """Duration in seconds by which goodput is divided."""


def make_phases(raw: object) -> list[Phase]:
    """Phases from plain values; raises `ValueError` naming phase and field."""
    if not isinstance(raw, list) or not 0 < len(raw) <= MAX_PHASES:
        raise ValueError(f"phases: expected a list of 1 to {MAX_PHASES} phases")
    phases = []
    for number, given in enumerate(raw):
        if not isinstance(given, dict):
            raise ValueError(f"phases[{number}]: expected the keys duration_s, workload and arrivals")
        sections: dict[str, Any] = dict(given)
        name, duration_s = sections.pop("name", f"phase {number}"), sections.pop("duration_s", None)
        if not isinstance(duration_s, int | float):
            raise ValueError(f"phases[{number}].duration_s: expected a time above 0; got {duration_s!r}")
        for section in ("workload", "arrivals"):
            if isinstance(values := sections.get(section), dict):
                own = values.get("seed", 0)
                sections[section] = {**values, "seed": (own if isinstance(own, int) else 0) + number}
        arrivals = sections.get("arrivals")
        if isinstance(arrivals, dict) and "num_requests" not in arrivals:
            sections["arrivals"] = {**arrivals, "duration_s": duration_s}
        try:
            phases.append(
                msgspec.convert({"name": name, "duration_s": duration_s, "scenario": make_scenario(sections)}, Phase)
            )
        except ValueError as error:
            raise ValueError(f"phases[{number}]: {error}") from None
    return phases


def load_of_scenario(scenario: Scenario, targets: Slo, max_model_len: int) -> PlannedLoad:
    """The requests of one scenario, which bring these limits; raises `ValueError` as `outline` does."""
    found = outline(scenario.workload, scenario.arrivals, max_model_len=max_model_len)
    return PlannedLoad(requests=[UserRequest(each, targets) for each in found.requests], window_s=found.window_s)


def load_of_phases(phases: Sequence[Phase], max_model_len: int) -> PlannedLoad:
    """The requests of all phases; raises `ValueError` as `outline` does, naming the phase."""
    placed: list[tuple[float, int, int, OutlinedRequest, Slo]] = []
    start_s = 0.0
    for number, phase in enumerate(phases):
        scenario = phase.scenario
        try:
            found = outline(scenario.workload, scenario.arrivals, max_model_len=max_model_len)
        except ValueError as error:
            raise ValueError(f"phases[{number}]: {error}") from None
        placed += [
            (start_s + each.due_s, number, each.index, each, scenario.slo)
            for each in found.requests
            if each.due_s < phase.duration_s
        ]
        start_s += phase.duration_s
    placed.sort(key=lambda item: item[:3])
    index_of = {(number, own): index for index, (_, number, own, _, _) in enumerate(placed)}
    requests = [
        UserRequest(
            OutlinedRequest(
                index=index,
                due_s=due_s,
                parts=each.parts,
                max_tokens=each.max_tokens,
                after=None if each.after is None else index_of[number, each.after],
                group=phases[number].name,
            ),
            slo,
        )
        for index, (due_s, number, _, each, slo) in enumerate(placed)
    ]
    return PlannedLoad(requests=requests, window_s=start_s)
