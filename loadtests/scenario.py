"""A scenario file: the requests, their times, and the limits to meet.

    workload: {kind: random, isl: 512, osl: 64}
    arrivals: {kind: poisson, rate_per_s: 2.0, num_requests: 300}
    slo: {ttft_s: 4.0, tpot_s: 0.012}                                  may be left out

The command line can set rate, length and seed on top (`Overrides`), so that one file serves a whole sweep.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import WorkloadConfig

SCENARIOS = Path(__file__).parent / "scenarios"
"""The scenarios that come with the package; a name without a folder or suffix means one of them."""


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """Values that replace those of a scenario; None keeps the scenario's."""

    rate_per_s: float | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    seed: int | None = None
    """Seed of the arrivals and of the workload."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A load test without the cluster that it is for."""

    workload: WorkloadConfig
    arrivals: ArrivalConfig
    slo: Slo = Slo()
    description: str = ""


def load_scenario(name: str, overrides: Overrides | None = None) -> Scenario:
    """Load a scenario from a file, or the built-in one of the given name.

    Raises:
        ValueError: naming the file and the field, if it cannot be read or has a value that is not allowed.
    """
    path = scenario_path(name)
    if not path.exists():
        raise ValueError(f"scenario: there is no {path}; give a file or one of {', '.join(built_in_names())}")
    try:
        raw = msgspec.yaml.decode(path.read_bytes())
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected the keys workload and arrivals")
    try:
        return make_scenario(raw, overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def built_in_names() -> list[str]:
    """Names of the scenarios that come with the package."""
    return sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


def scenario_path(name: str) -> Path:
    """Path of the file that a name stands for."""
    is_plain = Path(name).name == name and not Path(name).suffix
    return SCENARIOS / f"{name}.yaml" if is_plain else Path(name)


def make_scenario(raw: dict[str, Any], overrides: Overrides | None = None) -> Scenario:
    """Make a scenario from plain values; raises `ValueError` naming the field."""
    sections = {name: dict(value) if isinstance(value, dict) else value for name, value in raw.items()}
    workload, arrivals = sections.get("workload"), sections.get("arrivals")
    if overrides is not None and isinstance(workload, dict) and isinstance(arrivals, dict):
        values = msgspec.structs.asdict(overrides)
        arrivals.update({name: value for name, value in values.items() if value is not None})
        if overrides.seed is not None:
            workload["seed"] = overrides.seed
        if overrides.num_requests is not None and overrides.duration_s is None:
            arrivals.pop("duration_s", None)
        if overrides.duration_s is not None and overrides.num_requests is None:
            arrivals.pop("num_requests", None)
    try:
        return msgspec.convert(sections, Scenario)
    except msgspec.ValidationError as error:
        raise ValueError(_with_field_first(str(error))) from None


def _with_field_first(text: str) -> str:
    """Convert ``problem - at `$.workload.isl` `` to `workload.isl: problem`."""
    match = re.fullmatch(r"(.*) - at `\$\.(.*)`", text, re.DOTALL)
    if match is None:
        return text
    problem, field = match.groups()
    names_a_field = re.match(r"[a-z_]+: ", problem)
    return f"{field}.{problem}" if names_a_field else f"{field}: {problem}"


def to_raw(scenario: Scenario) -> dict[str, Any]:
    """The plain values of a scenario, as `make_scenario` takes them."""
    raw: dict[str, Any] = msgspec.to_builtins(scenario)
    return raw
