"""`disagg load sweep`: the largest rate at which enough requests meet their limits.

Rates come from loadtests/verdict/search.py: doubling, then bisection. With a shape every rate has a fresh cluster; a
cluster that runs already gets prompts of its own at every rate, or its prefix caches would hold them from the rate
before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from disagg.loadtests.campaign.points import Log, Measurer, record, warm_up
from disagg.loadtests.campaign.shapes import ClusterShape
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict import recordings
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.verdict.recordings import Point, Recording
from disagg.loadtests.verdict.search import Probe, SearchConfig, ServedRate, next_rate, served_rate

Measure = Callable[[float], Recording]
"""Takes a rate in requests per second, and returns the recording at it."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The largest served rate, and the measurements that it follows from."""

    probes: list[Probe]
    served: ServedRate
    invalid: list[str]
    """Runs that must not be quoted, with the reasons."""


def sweep(measure: Measure, search: SearchConfig, slo: Slo, log: Log) -> SweepResult:
    """Measure until the largest served rate is found."""
    probes: list[Probe] = []
    invalid: list[str] = []
    while (rate := next_rate(search, probes)) is not None:
        recording = measure(rate)
        score = evaluate(recording.records, slo, recording.info.duration_s)
        log(f"{rate:g}/s: {score.attainment:.1%} within {slo}{score.main_reason}")
        probes.append(Probe(rate_per_s=rate, attainment=score.attainment, num_requests=score.num_due))
        invalid += [f"{rate:g}/s: {reason}" for reason in score.invalid_reasons]
    return SweepResult(probes=probes, served=served_rate(probes, search.min_attainment), invalid=invalid)


def on_shape(measurer: Measurer, shape: ClusterShape, scenario: Scenario) -> Measure:
    """Measure rates on fresh clusters of a shape."""

    def measure(rate: float) -> Recording:
        arrivals = msgspec.structs.replace(scenario.arrivals, rate_per_s=rate)
        point = Point(shape=shape.name, shape_config=shape.raw, workload=scenario.workload, arrivals=arrivals, repeat=0)
        return measurer.get(shape, point)

    return measure


def on_running(measurer: Measurer, address: str, scenario: Scenario) -> Measure:
    """Measure rates on a running cluster."""
    rates: list[float] = []
    is_warm = False

    def measure(rate: float) -> Recording:
        nonlocal is_warm
        rates.append(rate)
        seed = scenario.workload.seed + len(rates) - 1
        point = Point(
            shape="running",
            shape_config={"address": address},
            workload=msgspec.structs.replace(scenario.workload, seed=seed),
            arrivals=msgspec.structs.replace(scenario.arrivals, rate_per_s=rate),
        )
        if (found := recordings.load(measurer.directory, point)) is not None:
            return found
        if not is_warm:
            warm_up(address, measurer.options)
            is_warm = True
        return record(measurer.directory, point, address, measurer.options, measurer.command)

    return measure
