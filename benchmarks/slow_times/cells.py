"""One cluster with a slow time in virtual time, beside the same cluster without it.

The router core and the engine core that serve. Prompts of 512 tokens and answers of 64, Poisson arrivals; steps as of a
model of 135 million parameters on one core. Requests bring a TTFT target of a second, or none; in time is what had its
first token within a second either way.

A run goes on for `AFTER_S` after the slow time. It must have recovered after `GRACE_REQUESTS` requests or `GRACE_S`,
whichever is later; where nothing is refused, a queue is left, and it is the first time after that at which nobody waits
for a first token. From then on its share of requests in time, and each worker's share of the prompts, are compared with
those of the undisturbed run at the same times.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from benchmarks.elastic.runs import TIMING
from benchmarks.elastic.workloads import requests
from disagg.cli.planning.simulate import cluster_spec
from disagg.cluster.config.cluster_config import ClusterConfig, override
from disagg.loadtests.campaign.shapes import parse_shape
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Slo
from disagg.proto.ids import RequestId, WorkerId
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.settings import ClusterSpec
from disagg.simulator.world.slow_times import SlowTime
from disagg.simulator.world.users import Habits, UserRequest
from disagg.step_times.interface import LinkTimes

WORKLOAD = "512/64"
TARGET_S = 1.0
BEFORE_S, AFTER_S = 30.0, 90.0
GRACE_REQUESTS, GRACE_S = 20, 10.0
PATIENCE_S = 10.0
"""Without targets: a client that has no token by then leaves."""

LINK = LinkTimes(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
"""About gloo on one machine: a prompt takes 12 ms."""

Who = Literal["all", "one", "link", "calibration"]
FIRST = {"1p1d": "prefill-0", "2p2d": "prefill-0", "2x1-elastic": "workers-0", "2x1-chunked:512": "colocated-0"}
"""Shapes, and the worker that is slow where one is."""


class Cell(NamedTuple):
    """One run."""

    shape: str
    who: Who
    factor: float
    slow_s: float
    """0 for a calibration."""
    rate_per_s: float
    has_targets: bool = True
    local_prefill: str = "auto"
    policy: str = "auto"

    def undisturbed(self) -> Cell:
        """The same load without a slow time, for as long."""
        return self._replace(factor=1.0)


class Asked(NamedTuple):
    """The outcome of one request."""

    due_s: float
    answered_s: float
    """When its first token came, or it was over without one."""
    in_time: bool
    refused: bool
    computed_by: str
    """The worker that computed its prompt; empty where none did."""


class Outcome(NamedTuple):
    """A run, from the time on from which it counts."""

    from_s: float
    share: float
    """Share of the requests that were in time."""
    refused: float
    """Share of the requests that were refused."""
    prompts: dict[str, float]
    """Worker -> its share of the prompts that its pool computed."""
    pools: dict[str, float]
    """Pool -> its share of all prompts."""


def spec_of(cell: Cell) -> ClusterSpec:
    """The cluster of a cell."""
    config = parse_shape(cell.shape, ClusterConfig()).config
    settings = {"placement.admission": True, "placement.local_prefill": cell.local_prefill}
    config = override(config, {**settings, "placement.policy": cell.policy})
    spec = cluster_spec(config, TIMING._replace(link=LINK), "exact", sample_s=60.0)
    return replace(spec, slow_times=slow_times_of(cell))


def slow_times_of(cell: Cell) -> list[SlowTime]:
    """The slow times of a cell."""
    if cell.factor == 1.0:
        return []
    if cell.who == "calibration":
        return [SlowTime(begins_s=-60.0, ends_s=0.0, factor=cell.factor)]
    return [
        SlowTime(
            begins_s=BEFORE_S,
            ends_s=BEFORE_S + cell.slow_s,
            factor=cell.factor,
            worker_id=WorkerId(FIRST[cell.shape]) if cell.who == "one" else None,
            what="links" if cell.who == "link" else "steps",
        )
    ]


def slow_until(cell: Cell) -> float:
    """When everything is as fast as ever."""
    return 0.0 if cell.who == "calibration" else BEFORE_S + cell.slow_s


@functools.lru_cache(maxsize=256)
def run(cell: Cell) -> list[Asked]:
    """All requests of a cell, in the order in which they came."""
    last_s = slow_until(cell) + AFTER_S
    number = math.ceil(cell.rate_per_s * last_s)
    targets = Slo(ttft_s=TARGET_S) if cell.has_targets else Slo()
    asked = [UserRequest(each, targets) for each in requests(WORKLOAD, cell.rate_per_s, 1, number)]
    found: dict[int, Asked] = {}

    def note(record: RequestRecord) -> None:
        trace = cluster.gateway.core.trace(RequestId(record.request_id))
        worker = "" if trace is None else trace.prefill_worker or trace.decode_worker or ""
        in_time = record.ttft_s is not None and record.ttft_s <= TARGET_S
        answered_s = record.token_times_s[0] if record.token_times_s else cluster.loop.now
        found[record.index] = Asked(record.due_s, answered_s, in_time, record.status == "refused", worker)

    habits = Habits(patience_s=None if cell.has_targets else PATIENCE_S)
    cluster = SimulatedCluster(spec_of(cell), asked, habits, note)
    result = cluster.run()
    assert not result.problems, result.problems
    return [found[index] for index in range(number)]


def counts_from(cell: Cell, asked: Sequence[Asked]) -> float:
    """The time from which on the cluster must be as before."""
    end_s = slow_until(cell)
    after = [each.due_s for each in asked if each.due_s > end_s]
    grace_s = max(end_s + GRACE_S, after[GRACE_REQUESTS])
    answered_s = 0.0
    for each in asked:
        if each.due_s >= max(grace_s, answered_s):
            return each.due_s
        answered_s = max(answered_s, each.answered_s)
    return math.inf


def outcome(asked: Sequence[Asked], from_s: float) -> Outcome:
    """The outcome of the requests that came from then on."""
    counted = [each for each in asked if each.due_s >= from_s]
    num, prompts = max(1, len(counted)), Counter(each.computed_by for each in counted if each.computed_by)
    pools = Counter(pool_of(each.computed_by) for each in counted if each.computed_by)
    return Outcome(
        from_s,
        sum(each.in_time for each in counted) / num,
        sum(each.refused for each in counted) / num,
        {worker: count / pools[pool_of(worker)] for worker, count in sorted(prompts.items())},
        {pool: count / prompts.total() for pool, count in sorted(pools.items())},
    )


def pool_of(worker: str) -> str:
    """The name of a worker's pool."""
    return worker.partition("-")[0]


def compare(cell: Cell) -> tuple[Outcome, Outcome]:
    """(with the slow time, without it), from the same time on."""
    asked = run(cell)
    from_s = counts_from(cell, asked)
    return outcome(asked, from_s), outcome(run(cell.undisturbed()), from_s)
