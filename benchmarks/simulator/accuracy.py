"""How far simulations are from real runs: folders of `disagg load compare`, each point of them simulated again.

A folder holds runs of one workload: some shapes at some rates. Errors are simulated over measured, minus one. The error
that matters to a policy is that of differences: by how much two shapes differ in attainment under the same requests,
simulated and measured. What a machine's own noise makes of the same figures shows where a folder has repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from disagg.cli.planning.simulate import cluster_spec, read_times
from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict.comparison import curves
from disagg.loadtests.verdict.goodput import Outcomes, Slo, evaluate
from disagg.loadtests.verdict.recordings import Recording, load_all
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.phases import load_of_scenario
from disagg.simulator.world.settings import EngineKind
from disagg.simulator.world.timing import Timing

Row = dict[str, Any]
TTFTS_S = (0.3, 0.5, 1.0, 2.0, 4.0)
TPOTS_S = (0.010, 0.012, 0.015, 0.020, 0.030)
"""The grid of limits for which attainments are compared."""
MIN_ATTAINMENT = 0.9
CLOSE = 0.05
"""Shapes whose attainments differ by less have no order."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One workload: the same points measured and simulated."""

    name: str
    measured: Sequence[Recording]
    simulated: Sequence[Recording]


def read_folder(folder: Path) -> list[Recording]:
    """All complete points of a folder of `disagg load compare`."""
    return sorted(load_all(folder), key=lambda each: (each.rate_per_s, each.info.point.shape, each.info.point.repeat))


def simulate(recording: Recording, timing: Timing, engine: EngineKind) -> Recording:
    """The same cluster under the same requests, simulated."""
    point = recording.info.point
    spec = cluster_spec(msgspec.convert(point.shape_config, ClusterConfig), timing, engine)
    scenario = Scenario(workload=point.workload, arrivals=point.arrivals)
    result = SimulatedCluster(spec, load_of_scenario(scenario, Slo(), spec.max_model_len).requests).run()
    assert not result.problems, result.problems
    return replace(recording, records=result.records)


def compare_folders(folders: Sequence[Path], times: Path, engine: EngineKind) -> list[Compared]:
    """Every folder simulated."""
    timing, found = read_times(times), []
    for folder in folders:
        measured = read_folder(folder)
        simulated = [simulate(each, timing, engine) for each in measured]
        found.append(Compared(name=folder.name, measured=measured, simulated=simulated))
    return found


# ---------------------------------------------------------------- figures


def point_rows(compared: Sequence[Compared]) -> list[Row]:
    """One row a point: measured figures in ms, and the error of the simulated ones."""
    return [
        {"workload": each.name, **_point_row(real, made)}
        for each in compared
        for real, made in zip(each.measured, each.simulated, strict=True)
    ]


def _point_row(real: Recording, made: Recording) -> Row:
    true = evaluate(real.records, Slo(), real.info.duration_s)
    found = evaluate(made.records, Slo(), real.info.duration_s)
    row: Row = {"shape": real.info.point.shape, "rate": real.rate_per_s, "repeat": real.info.point.repeat}
    for name in ("ttft", "tpot"):
        for quantile in ("p50", "p90"):
            value, other = getattr(getattr(true, name), quantile), getattr(getattr(found, name), quantile)
            row[f"{name}_{quantile}_ms"] = value * 1e3
            row[f"{name}_{quantile}_error"] = other / value - 1.0
    return row


def _slos() -> Iterator[Slo]:
    return (Slo(ttft_s=ttft_s, tpot_s=tpot_s) for ttft_s in TTFTS_S for tpot_s in TPOTS_S)


def goodput_errors(compared: Compared) -> list[float]:
    """Simulated over measured largest rates with 90 % attainment, minus one: of each shape and pair of limits for which
    the measured rates determine both."""
    real, made = curves(compared.measured), curves(compared.simulated)
    found = []
    for shape, curve in real.items():
        for slo in _slos():
            true, simulated = curve.served(slo, MIN_ATTAINMENT), made[shape].served(slo, MIN_ATTAINMENT)
            if true.bound == simulated.bound == "between":
                found.append(simulated.rate_per_s / true.rate_per_s - 1.0)
    return found


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Of two runs under the same requests, over the grid of limits; shares of the requests."""

    errors: Sequence[float]
    """Simulated less measured difference of attainment, absolute."""
    num_ordered: int
    """Pairs of shapes that differ by more than `CLOSE`, as measured."""
    num_kept: int
    """Number of these that the simulation has in the same order."""


def differences(first: Sequence[Recording], second: Sequence[Recording]) -> Differences:
    """Compare what two sets of the same points say of the shapes in them."""
    errors, num_ordered, num_kept = [], 0, 0
    real, made = ([Outcomes(each.records, each.info.duration_s) for each in runs] for runs in (first, second))
    for one, two in combinations(range(len(first)), 2):
        if _requests(first[one]) != _requests(first[two]):
            continue
        for slo in _slos():
            true = real[one].attainment(slo) - real[two].attainment(slo)
            other = made[one].attainment(slo) - made[two].attainment(slo)
            errors.append(abs(other - true))
            if abs(true) > CLOSE:
                num_ordered += 1
                num_kept += true * other > 0
    return Differences(errors=errors, num_ordered=num_ordered, num_kept=num_kept)


def _requests(recording: Recording) -> Any:
    return recording.info.point.arrivals, recording.info.point.repeat


def summary(rows: Sequence[Row], compared: Sequence[Compared]) -> Row:
    """The largest errors of all points, whose `point_rows` are `rows`, and errors of differences in points of
    attainment."""
    goodput = [error for each in compared for error in goodput_errors(each)]
    found = [differences(each.measured, each.simulated) for each in compared]
    errors = [error for each in found for error in each.errors]
    ordered = sum(each.num_ordered for each in found)

    def worst(values: Sequence[float]) -> float | None:
        return max(map(abs, values), default=None)

    def median(values: Sequence[float]) -> float | None:
        ranked = sorted(map(abs, values))
        return ranked[len(ranked) // 2] if ranked else None

    flat: Row = {}
    for name in ("tpot_p50", "tpot_p90", "ttft_p50", "ttft_p90"):
        values = [row[f"{name}_error"] for row in rows]
        flat |= {f"{name}_error": worst(values), f"{name}_error_median": median(values)}
    return flat | {
        "goodput_error": worst(goodput),
        "goodput_error_median": median(goodput),
        "goodput_limits_compared": len(goodput),
        "difference_error_mean": sum(errors) / len(errors) if errors else None,
        "difference_error_worst": worst(errors),
        "order_kept": sum(each.num_kept for each in found) / ordered if ordered else None,
        "orders_compared": ordered,
    }
