"""One shape of a cluster under one load, in virtual time; what its requests saw, kept in a file.

A static shape does not depend on the limits (without targets the router minimises the time of all), so one run is
scored for all of them; with hopeless prompts last it depends on the TTFT limit alone. What static shapes did is kept by
the parameters of the run and the step times, not by commit: remove the file after a change of scheduler or router.
"""

from __future__ import annotations

import gc
import hashlib
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from benchmarks.elastic.day import DAY, day_requests, with_targets
from benchmarks.elastic.workloads import MAX_MODEL_LEN, UNTOLD, habits, requests
from disagg.cli.planning.simulate import cluster_spec
from disagg.cluster.config.cluster_config import ClusterConfig, override
from disagg.loadtests.campaign.shapes import parse_shape
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Slo
from disagg.proto.messages import KvLayout, StepCoefficients
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.twin.simulated import watch
from disagg.simulator.twin.twin import Twin
from disagg.simulator.world.settings import DEFAULT_LINK, ClusterSpec, EngineKind
from disagg.simulator.world.timing import LinearSteps, Timing
from disagg.simulator.world.users import Habits, UserRequest

TIMING = Timing(
    LinearSteps(base_ms=5.0, prefill_token_ms=0.4, attended_ms=1e-4, decode_ms=0.5, context_ms=1e-3),
    {},
    KvLayout.sized(23_040),
    DEFAULT_LINK,
    Overheads(message_s=0.001, step_s=0.00025),
    0.0,
)
"""About a model of 135 million parameters on one core a worker; workers do not disturb each other."""
BUDGETS = (16, 32, 64, 128, 256, 512)
LAST = " last"
"""At the end of the name of a shape: prompts that cannot meet their TTFT target go last."""
TWIN = " twin"
"""At its end as well: a twin watches the cluster, and changes where answers decode."""
VERSION = 1
"""Of the file: to be raised when workloads or what is kept of a run change."""


# ---------------------------------------------------------------- shapes


def first_come(workers: int) -> list[str]:
    """The static shapes of so many workers of one thread."""
    chunked = [f"{workers}x1-chunked:{budget}" for budget in BUDGETS]
    splits = [f"{number}p{workers - number}d" for number in range(1, workers)]
    return [*chunked, f"{workers}x1-prefill-first", f"{workers}x1-static", *splits]


def hopeless_last(workers: int) -> list[str]:
    """Those that can have hopeless prompts last: not prompts first and static batching, for which the scheduler has no
    such order."""
    return [f"{name}{LAST}" for name in first_come(workers) if "chunked" in name or "p" in name.partition("x")[0]]


def spec_of(shape: str, timing: Timing) -> ClusterSpec:
    """The cluster of a shape as `disagg simulate` has it, with the fast engine; elastic workers with the exact one,
    because the fast one puts `gather` behind `spread` where TPOT is tight. P:D splits compute no prompt on decode
    workers. Raises `ConfigError` for a name that is none."""
    is_last = shape.endswith(LAST)
    name = shape.removesuffix(LAST).removesuffix(TWIN)
    if is_last:
        name = name.replace("chunked", "slack")
    config = parse_shape(name, ClusterConfig()).config
    if config.mode == "disaggregated":
        config = override(config, {"placement.local_prefill": "never"})
        if is_last:
            config = override(config, {"pools.prefill.scheduling": "slack"})
    engine: EngineKind = "exact" if config.mode == "elastic" else "fast"
    return cluster_spec(config, timing, engine, sample_s=60.0)


# ---------------------------------------------------------------- runs


Brings = Literal["nothing", "ttft", "both"]


class Point(NamedTuple):
    """One run."""

    shape: str
    workload: str
    rate_per_s: float
    seed: int
    number: int
    """Of requests, of which the first tenth is not counted; 0 for a day, all of which counts."""
    brings: Brings
    """What requests bring of their limits as targets."""
    slo: Slo
    """Of all requests, as far as they bring it; no limit where they do not, and for a day, which has its own."""


@dataclass(frozen=True)
class Seen:
    """What the counted requests of a run saw, in their order; infinite where no whole answer came."""

    ttfts_s: array[float]
    tpots_s: array[float]
    """0 for answers of one token."""
    pauses_s: array[float]
    """The longest one between two tokens."""

    def good(self, ttft_s: float, tpot_s: float) -> list[bool]:
        """Which of them are within both limits."""
        return [ttft <= ttft_s and tpot <= tpot_s for ttft, tpot in zip(self.ttfts_s, self.tpots_s, strict=True)]


_INFINITE = float("inf")


def seen_of(records: Sequence[RequestRecord]) -> Seen:
    """The observations of the counted requests, from their records."""
    seen = Seen(array("f"), array("f"), array("f"))
    for record in records:
        is_whole = record.status == "ok" and record.ttft_s is not None
        seen.ttfts_s.append(record.ttft_s if is_whole and record.ttft_s is not None else _INFINITE)
        seen.tpots_s.append((record.tpot_s or 0.0) if is_whole else _INFINITE)
        seen.pauses_s.append((record.max_itl_s or 0.0) if is_whole else _INFINITE)
    return seen


def simulate(
    spec: ClusterSpec, asked: list[UserRequest], how: Habits, *, has_twin: bool = False
) -> list[RequestRecord]:
    """Records of a run of which nothing may be left."""
    cluster = SimulatedCluster(spec, asked, how)
    if has_twin:
        watch(cluster, Twin())
    if not has_twin:  # whose replays leave clusters behind
        gc.disable()
    try:
        result = cluster.run()
    finally:
        gc.enable()
    assert not result.problems, result.problems
    return result.records


class Runs:
    """Runs points, and keeps what static shapes did. One process, one connection."""

    def __init__(self, timing: Timing, path: Path | None) -> None:
        self._timing = timing
        self._timing_key = hashlib.blake2b(repr(timing).encode(), digest_size=8).hexdigest()
        self._specs: dict[str, ClusterSpec] = {}
        self._seen: dict[Point, Seen] = {}
        self.num_requests = 0
        """Simulated, not found in the file."""
        self._file: sqlite3.Connection | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = sqlite3.connect(path, timeout=60.0, isolation_level=None)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("CREATE TABLE IF NOT EXISTS runs (point TEXT PRIMARY KEY, seen BLOB)")

    @property
    def steps(self) -> StepCoefficients:
        """Step times of all workers."""
        steps = self._timing.step
        assert isinstance(steps, LinearSteps)
        return StepCoefficients(*msgspec.structs.astuple(steps))

    def run(self, point: Point, *, is_static: bool) -> Seen:
        """The outcome of a point."""
        if (known := self._seen.get(point)) is not None:
            return known
        key = repr((VERSION, self._timing_key, *point))
        found = self._find(key) if is_static else None
        if found is None:
            found = self._simulated(point)
            if is_static and self._file is not None:
                blob = found.ttfts_s.tobytes() + found.tpots_s.tobytes() + found.pauses_s.tobytes()
                self._file.execute("INSERT OR REPLACE INTO runs VALUES (?, ?)", (key, blob))
        self._seen[point] = found
        return found

    def _find(self, key: str) -> Seen | None:
        if self._file is None:
            return None
        row = self._file.execute("SELECT seen FROM runs WHERE point = ?", (key,)).fetchone()
        if row is None:
            return None
        values = array("f")
        values.frombytes(row[0])
        third = len(values) // 3
        return Seen(values[:third], values[third : 2 * third], values[2 * third :])

    def _simulated(self, point: Point) -> Seen:
        if point.shape not in self._specs:
            self._specs[point.shape] = spec_of(point.shape, self._timing)
        spec = self._specs[point.shape]
        assert spec.max_model_len >= MAX_MODEL_LEN
        if point.workload == DAY:
            asked, limits = day_requests(point.rate_per_s, point.seed)
        else:
            asked = requests(point.workload, point.rate_per_s, point.seed, point.number)
            limits = [point.slo] * len(asked)
        self.num_requests += len(asked)
        how = UNTOLD if point.workload == DAY else habits(point.workload)
        records = simulate(spec, with_targets(asked, limits, point.brings), how, has_twin=point.shape.endswith(TWIN))
        return seen_of(records[point.number // 10 :])
