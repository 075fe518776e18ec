"""What do policies that resize pools spend, and how many requests meet their targets, beside the cheapest static size?
The router that serves and the fast engine, in virtual time: figures repeat exactly.

    python -m benchmarks.autoscaler [--loads step,ramp,day] [--modes disaggregated,colocated] [--seed 1] [--json FILE]

Workers take 5 ms a step, 0.4 for each prompt token, 0.5 for each decode, and a little for what attention reads: a model
of 135 million parameters on one core. A worker that is added serves after 30 s.

Worker-seconds count each worker from its start until it is gone, over the time in which requests come. The cheapest
static size is searched exactly, given that more workers never attain less. A reversal is a change of a pool against the
direction of its last one, beyond those of the load itself (down again once after each rise). `threshold` is run with
several targets; the row named `threshold` has the one that reaches 90 % with the fewest worker-seconds, or else attains
most.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from benchmarks.autoscaler.loads import LOADS, MAX_MODEL_LEN, RISES
from benchmarks.autoscaler.scaling import Resize, Scaler
from disagg.autoscaler.config import AutoscalerOptions, ThresholdOptions
from disagg.autoscaler.policies import make_policy
from disagg.autoscaler.policy import PoolLimits
from disagg.engine.config import WorkerConfig
from disagg.loadtests.verdict.goodput import meets
from disagg.proto.messages import KvLayout, RoleName
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.phases import PlannedLoad
from disagg.simulator.world.settings import ClusterSpec, PoolSpec
from disagg.simulator.world.timing import LinearSteps
from tests.support.reports import print_table, report, write_json

STEP = LinearSteps(base_ms=5.0, prefill_token_ms=0.4, attended_ms=1e-4, decode_ms=0.5, context_ms=1e-3)
COLD_START_S = 30.0
MAX_SIZE = 10
ATTAINMENT = 0.9
MOST_OVER_BEST = 1.25
WAITING = (1, 2, 4)
"""Targets of the threshold scaler."""
MODES: dict[str, dict[str, tuple[RoleName, ...]]] = {
    "disaggregated": {"prefill": ("prefill",), "decode": ("decode",)},
    "colocated": {"colocated": get_args(RoleName)},
}
BEGIN = {"prefill": 2, "decode": 1, "colocated": 3}

Row = dict[str, Any]


def cluster(mode: str, sizes: Mapping[str, int]) -> ClusterSpec:
    """Pools of these sizes."""
    return ClusterSpec(
        pools=[
            PoolSpec(
                name=name,
                size=sizes[name],
                worker=WorkerConfig(worker_id="", roles=roles, model_path="fake", token_budget=512),
                num_blocks=4000,
                times=STEP,
                cold_start_s=COLD_START_S,
            )
            for name, roles in MODES[mode].items()
        ],
        kv_layout=KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=23_040),
        max_model_len=MAX_MODEL_LEN,
        router=RouterConfig(),
        engine="fast",
        sample_s=60.0,
    )


@dataclass(frozen=True)
class Run:
    """The outcome of one run."""

    attainment: float
    worker_seconds: float
    resizes: Sequence[Resize] = ()


def simulate(mode: str, load: PlannedLoad, sizes: Mapping[str, int], options: AutoscalerOptions | None = None) -> Run:
    """A static cluster, or one with an autoscaler."""
    gc.disable()
    try:
        run = SimulatedCluster(cluster(mode, sizes), load.requests)
        scaler = None
        if options is not None:
            limits = {pool: PoolLimits(min_size=1, max_size=MAX_SIZE) for pool in sizes}
            scaler = Scaler(run, make_policy(options, limits), options.interval_s)
        run.advance(load.window_s)
        worker_seconds = run.worker_seconds
        result = run.run()
    finally:
        gc.enable()
    assert not result.problems, result.problems
    targets = {request.outlined.index: request.targets for request in load.requests}
    met = sum(meets(record, targets[record.index]) for record in result.records)
    return Run(met / len(result.records), worker_seconds, scaler.resizes if scaler is not None else ())


def cheapest(mode: str, load: PlannedLoad) -> tuple[dict[str, int], Run]:
    """The static size of fewest workers that reaches `ATTAINMENT`. Along the staircase between what does and what does
    not: with one worker less in the first pool, the others need at least as many as before.

    Raises:
        ValueError: where `MAX_SIZE` workers a pool are not enough.
    """
    pools = list(MODES[mode])
    best: tuple[dict[str, int], Run] | None = None
    last = 1
    first = MAX_SIZE if len(pools) > 1 else 1
    while first >= 1 and last <= MAX_SIZE:
        sizes = dict(zip(pools, (first, last) if len(pools) > 1 else (last,), strict=True))
        if best is not None and sum(sizes.values()) > sum(best[0].values()) and len(pools) > 1 and last >= MAX_SIZE:
            break
        found = simulate(mode, load, sizes)
        if found.attainment < ATTAINMENT:
            last += 1
            continue
        if best is None or sum(sizes.values()) < sum(best[0].values()):
            best = (sizes, found)
        if len(pools) == 1:
            break
        first -= 1
    if best is None:
        raise ValueError(f"{MAX_SIZE} workers a pool do not reach {ATTAINMENT:.0%}")
    return best


def reversals(resizes: Sequence[Resize], rises: int) -> int:
    """Of all pools, beyond those of the load."""
    total = 0
    for pool in {resize.pool for resize in resizes}:
        directions = [resize.after > resize.before for resize in resizes if resize.pool == pool]
        turns = sum(before != after for before, after in pairwise(directions))
        total += max(0, turns - (2 * rises - 1))
    return total


def rows_of(name: str, mode: str, seed: int) -> list[Row]:
    """The static size and the policies under one load."""
    load = LOADS[name](seed)
    begin = {pool: BEGIN[pool] for pool in MODES[mode]}
    sizes, static = cheapest(mode, load)
    size = "+".join(str(size) for size in sizes.values())
    runs = {f"static {size}": static, "attainment": simulate(mode, load, begin, AutoscalerOptions())}
    tried = [
        (waiting, simulate(mode, load, begin, AutoscalerOptions(policy="threshold", threshold=options)))
        for waiting in WAITING
        for options in [ThresholdOptions(waiting=waiting)]
    ]
    _, runs["threshold"] = max(
        tried,
        key=lambda item: (
            item[1].attainment >= ATTAINMENT,
            -item[1].worker_seconds if item[1].attainment >= ATTAINMENT else item[1].attainment,
        ),
    )
    runs |= {f"threshold, {waiting} wait": run for waiting, run in tried}
    return [
        {
            "load": name,
            "mode": mode,
            "scaler": scaler,
            "requests": len(load.requests),
            "attainment": round(run.attainment, 4),
            "worker_seconds": round(run.worker_seconds),
            "over_best": round(run.worker_seconds / static.worker_seconds, 3),
            "changes": len(run.resizes),
            "reversals": reversals(run.resizes, RISES[name]),
        }
        for scaler, run in runs.items()
    ]


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """The worst of each figure over all loads."""
    figures: dict[str, float | None] = {}
    for scaler, prefix in (("attainment", ""), ("threshold", "threshold_")):
        own = [row for row in rows if row["scaler"] == scaler]
        figures[f"{prefix}attainment_min"] = min(row["attainment"] for row in own)
        figures[f"{prefix}worker_seconds_over_best"] = max(row["over_best"] for row in own)
        figures[f"{prefix}reversals"] = sum(row["reversals"] for row in own)
        figures[f"{prefix}changes"] = sum(row["changes"] for row in own)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    for flag, known in (("loads", LOADS), ("modes", MODES)):
        if unknown := set(getattr(args, flag).split(",")) - set(known):
            parser.error(f"--{flag}: there is no {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    rows: list[Row] = []
    for mode in args.modes.split(","):
        for name in args.loads.split(","):
            rows += rows_of(name, mode, args.seed)
    columns = ("load", "mode", "scaler", "attainment", "worker_seconds", "over_best", "changes", "reversals")
    print_table("Autoscaler", columns, [[str(row[column]) for column in columns] for row in rows])
    figures = summary(rows)
    for figure, value in figures.items():
        print(f"{figure}: {value}")
    if args.json is not None:
        write_json(args.json, report(rows, figures))
    low, over = figures["attainment_min"], figures["worker_seconds_over_best"]
    return 0 if low is not None and over is not None and low >= ATTAINMENT and over <= MOST_OVER_BEST else 1
