"""Measures points: a shape of a cluster under a scenario at one rate, once, recorded in a folder.

    measure(point) -> a fresh cluster -> a few requests to warm up -> the generator -> files -> the cluster is gone

Every point has a cluster of its own. The requests of two rates share their prompts, so that shapes and rates can be
compared request by request; in a cluster that had seen them before, its prefix caches would answer. A point that is
complete in the folder is not measured again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.system.provenance import commit, versions
from disagg.loadtests.campaign.shapes import ClusterShape
from disagg.loadtests.generator.load_generator import GeneratorOptions, play
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict import recordings
from disagg.loadtests.verdict.goodput import Score, Slo, evaluate
from disagg.loadtests.verdict.recordings import Point, Recording, RunInfo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload

WARM_UP = Scenario(
    workload=RandomWorkload(isl=64, osl=8, seed=1 << 40),
    arrivals=ArrivalConfig(kind="burst", rate_per_s=8.0, burst_size=8, num_requests=8),
)
"""Requests that are sent to a new cluster before anything is measured: for first steps, connections, pairs of
workers."""

Log = Callable[[str], None]
"""Called with the progress, one line at a time."""


@dataclass(frozen=True, kw_only=True)
class Measurer:
    """Measures points into one folder."""

    directory: Path
    options: GeneratorOptions
    log: Log
    command: str = ""
    """Command line, for the record."""
    attempts: int = 2
    """Largest number of times that a point is measured, if its generator was late."""

    def get(self, shape: ClusterShape, point: Point) -> Recording:
        """The point's recording, loaded from the folder or measured now; raises `LaunchError`."""
        found = recordings.load(self.directory, point)
        if found is not None:
            self.log(f"{_name(point)}: recorded before")
            return found
        for attempt in range(1, self.attempts + 1):
            recording = self._measure(shape, point)
            score = evaluate(recording.records, Slo(), recording.info.duration_s)
            self.log(f"{_name(point)}: {_in_short(score)}")
            if score.is_valid or attempt == self.attempts:
                break
        return recording

    def _measure(self, shape: ClusterShape, point: Point) -> Recording:
        with warm_cluster(shape, self.options) as address:
            return record(self.directory, point, address, self.options, self.command)


@contextmanager
def warm_cluster(shape: ClusterShape, options: GeneratorOptions) -> Iterator[str]:
    """Start a cluster of this shape, warm it up with a few requests, and give its address. Raises `LaunchError`."""
    with ProcessCluster(shape.config) as cluster:
        warm_up(cluster.address, options)
        yield cluster.address


def warm_up(address: str, options: GeneratorOptions) -> None:
    """Send a few requests that are not counted."""
    with tempfile.TemporaryDirectory(prefix="disagg-warm-") as folder:
        play(WARM_UP, address, Path(folder) / "warm-up.jsonl", options)


def record(directory: Path, point: Point, address: str, options: GeneratorOptions, command: str = "") -> Recording:
    """Measure a point on a running cluster; raises `LaunchError`."""
    scenario = Scenario(workload=point.workload, arrivals=point.arrivals)
    path = recordings.begin(directory, point)
    info = play(scenario, address, path, options, label=point.shape)
    recordings.finish(
        directory,
        RunInfo(
            point=point,
            duration_s=info.window_s,
            num_requests=info.num_planned,
            started_at=info.started_at,
            commit=commit(),
            command=command,
            versions=info.versions | versions("torch"),
        ),
    )
    found = recordings.load(directory, point)
    assert found is not None
    return found


def _name(point: Point) -> str:
    rate = point.arrivals.rate_per_s
    return f"{point.shape} at {'its own pace' if rate is None else f'{rate:g}/s'}, repeat {point.repeat}"


def _in_short(score: Score) -> str:
    problems = "".join(f"; NOT VALID: {reason}" for reason in score.invalid_reasons)
    ttft, tpot = score.ttft, score.tpot
    return (
        f"{score.num_ok} of {score.num_due} answered, TTFT p50 {ttft.p50 * 1e3:.0f} p90 {ttft.p90 * 1e3:.0f} ms, "
        f"TPOT p50 {tpot.p50 * 1e3:.1f} p90 {tpot.p90 * 1e3:.1f} ms{score.main_reason}{problems}"
    )
