"""How many requests per second are simulated, how much of prompts policies reuse, and how far a run is from a real one.

    python -m benchmarks.simulator [--trace conversation_trace.jsonl] [--paces 1 4 8] [--requests N]
        [--exact-requests N] [--json FILE]
    python -m benchmarks.simulator --tiers [none] [fetch] [host] [all] --trace conversation_trace.jsonl [--requests N]
    python -m benchmarks.simulator --scale N [--scale-workers N]
    python -m benchmarks.simulator --recordings DIR [DIR ...] --times steps.json [--engine exact]

Speed: a Mooncake trace (its own, or one that is made here) at its own pace and at others on 8P+8D, with 20,000 blocks
of 64 tokens a worker, once for each policy with the fast engine and once with the exact one. Counted is processor time
of this process for the simulation alone, without reading the trace. Step times are those of Dynamo's mocker (see
`trace.py`). What Dynamo itself gives for the trace is an argument, because it runs in another environment:
`dynamo_replay.py`.

Tiers: the trace with KV in host memory, and fetched from other workers, by the exact engine, see `tiers.py`.

Decision: what it costs to compare twelve settings of a small cluster, see `decision.py`.

Scale: N requests with lengths like the trace's on half prefill and half decode workers, with the fast engine.

Accuracy: each point of folders of `disagg load compare` (one folder a workload) simulated again, see `accuracy.py`.
Step times are those of `disagg calibrate --recording` of other runs. Figures that were not measured are null.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulator import tiers
from benchmarks.simulator.accuracy import compare_folders, point_rows
from benchmarks.simulator.accuracy import summary as accuracy_summary
from benchmarks.simulator.decision import decide
from benchmarks.simulator.trace import MAX_MODEL_LEN, figures, read_outline, spec, write_trace
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import Outline, RandomWorkload, outline
from disagg.router.config import PolicyName
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.settings import EngineKind
from disagg.simulator.world.users import UserRequest
from tests.support.reports import percentile, positive, print_table, report, write_json

Row = dict[str, Any]
POLICIES: tuple[PolicyName, ...] = ("joint", "prefix", "least_loaded", "round_robin")
SCALE_ISL, SCALE_OSL = (64, 24_000), (1, 686)
"""Lengths of the run with many workers: in the mean those of Mooncake's conversation trace."""
SCALE_RATE_PER_PAIR = 2.0
"""Its requests per second for each prefill worker, which is then busy for half of the time."""


# ---------------------------------------------------------------- speed and reuse


def measure(engine: EngineKind, policy: PolicyName, requests: Outline, pace: float = 1.0) -> Row:
    """One run: requests per second of processor time, and what its users saw."""
    cluster = SimulatedCluster(spec(engine, policy), [UserRequest(each) for each in requests.requests])
    gc.collect()
    gc.disable()
    began = time.process_time()
    result = cluster.run()
    cpu_s = time.process_time() - began
    gc.enable()
    assert not result.problems, result.problems
    return {"engine": engine, "pace": pace, "policy": policy, "cpu_s": cpu_s, **figures(result, requests, cpu_s)}


# ---------------------------------------------------------------- many workers


def measure_scale(num_requests: int, num_workers: int) -> Row:
    """One run with the fast engine: time and memory from before its requests are made. Records are not kept."""
    began, cpu_began = time.monotonic(), time.process_time()
    num_pairs = num_workers // 2
    workload = RandomWorkload(isl=SCALE_ISL, osl=SCALE_OSL)
    arrivals = ArrivalConfig(kind="poisson", rate_per_s=num_pairs * SCALE_RATE_PER_PAIR, num_requests=num_requests)
    requests = outline(workload, arrivals, max_model_len=MAX_MODEL_LEN)
    users = [UserRequest(each) for each in requests.requests]
    gc.collect()
    gc.freeze()  # what is there for the whole run need not be looked through again and again
    ttfts, tpots = array("d"), array("d")

    def note(record: RequestRecord) -> None:
        assert record.status == "ok", record.error
        if record.ttft_s is not None:
            ttfts.append(record.ttft_s)
        if record.tpot_s is not None:
            tpots.append(record.tpot_s)

    cluster = SimulatedCluster(spec("fast", "joint", num_pairs), users, on_record=note)
    made_s, made_mib = time.process_time() - cpu_began, peak_mib()
    result = cluster.run()
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
    gc.unfreeze()
    assert not result.problems, result.problems
    return {
        "workers": 2 * num_pairs,
        "requests": num_requests,
        "simulated_s": result.end_s,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "of_it_made_s": made_s,
        "requests_per_s": num_requests / (cpu_s - made_s),
        "events": result.num_events,
        "peak_mib": peak_mib(),
        "of_it_made_mib": made_mib,
        "ttft_mean_ms": 1e3 * sum(ttfts) / len(ttfts),
        "ttft_p99_ms": 1e3 * percentile(ttfts, 99),
        "tpot_mean_ms": 1e3 * sum(tpots) / max(1, len(tpots)),
    }


def peak_mib() -> float:
    """The most memory that this process had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------- the command


def summary(
    rows: Sequence[Row],
    accuracy: Row,
    dynamo_reuse: float | None,
    dynamo_ttft_ms: float | None,
    decision_cpu_s: float | None = None,
) -> Row:
    """The figures that matter; null where nothing was measured."""
    fast = next((row for row in rows if row.get("engine") == "fast" and row["policy"] == "joint"), None)
    exact = next((row for row in rows if row.get("engine") == "exact"), None)
    ratio = None if fast is None or not dynamo_ttft_ms else fast["ttft_mean_ms"] / dynamo_ttft_ms
    return {
        "tpot_error": accuracy.get("tpot_p50_error"),
        "ttft_p50_error": accuracy.get("ttft_p50_error"),
        "ttft_p90_error": accuracy.get("ttft_p90_error"),
        "goodput_error": accuracy.get("goodput_error"),
        "difference_error_mean": accuracy.get("difference_error_mean"),
        "order_kept": accuracy.get("order_kept"),
        "exact_requests_per_s": None if exact is None else exact["requests_per_s"],
        "fast_requests_per_s": None if fast is None else fast["requests_per_s"],
        "prefix_reuse": None if fast is None else fast["reuse"],
        "prefix_reuse_dynamo": dynamo_reuse,
        "ttft_mean_over_dynamo": ratio,
        "decision_cpu_s": decision_cpu_s,
        **tiers.summary(rows),
    }


def trace_of(options: argparse.Namespace, num_requests: int | None, pace: float = 1.0) -> Outline:
    """The first requests of the trace that was given, or of one that is made here."""
    if options.trace is not None:
        return read_outline(options.trace, num_requests, pace)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        write_trace(path, options.requests or 2000)
        return read_outline(path, num_requests, pace)


def speed_rows(options: argparse.Namespace) -> list[Row]:
    """One row for each pace and policy with the fast engine, and one with the exact one."""
    paced = [(pace, trace_of(options, options.requests, pace)) for pace in options.paces]
    few = trace_of(options, options.exact_requests)
    rows = [measure("fast", policy, requests, pace) for pace, requests in paced for policy in options.policies]
    return [*rows, measure("exact", "joint", few)] if options.exact_requests else rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="in Mooncake's format; one is made without it")
    parser.add_argument("--requests", type=positive, help="of the trace; all of it by default, 2,000 of one made here")
    parser.add_argument("--paces", type=float, nargs="+", default=[1.0], help="times the pace of the trace")
    parser.add_argument("--exact-requests", type=int, default=200, help="with the exact engine; 0 for none")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--dynamo-reuse", type=float, help="share of prompt tokens that Dynamo's router reuses")
    parser.add_argument("--dynamo-ttft-ms", type=float, help="its mean TTFT")
    parser.add_argument(
        "--tiers",
        nargs="*",
        choices=tiers.VARIANTS,
        help="instead: KV in tiers and fetched; all of these by default",
    )
    parser.add_argument("--scale", type=positive, help="instead: so many requests on --scale-workers workers")
    parser.add_argument("--scale-workers", type=positive, default=1000)
    parser.add_argument(
        "--recordings", type=Path, nargs="+", help="folders of `disagg load compare`, to simulate again"
    )
    parser.add_argument("--times", type=Path, help="a file of step times")
    parser.add_argument("--engine", choices=("exact", "fast"), default="exact", help="for --recordings")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    accuracy: Row = {}
    rows: list[Row] = []
    decision_cpu_s = None
    if options.recordings is not None:
        if options.times is None:
            parser.error("--recordings needs --times")
        compared = compare_folders(options.recordings, options.times, options.engine)
        rows = point_rows(compared)
        accuracy = accuracy_summary(rows, compared)
    elif options.scale is not None:
        rows = [measure_scale(options.scale, options.scale_workers)]
    elif options.tiers is not None:
        rows = tiers.reuse(trace_of(options, options.requests), options.tiers or tiers.VARIANTS)
    else:
        rows = speed_rows(options)
        decision = decide()
        decision_cpu_s = decision["cpu_s"]
        print(json.dumps({"decision": decision}, indent=2))
    columns = list(rows[0]) if rows else []
    shown = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    print_table("simulated", columns, shown)
    if accuracy:
        print(json.dumps(accuracy, indent=2))
    flat = summary(rows, accuracy, options.dynamo_reuse, options.dynamo_ttft_ms, decision_cpu_s)
    print(json.dumps(flat, indent=2))
    if options.json is not None:
        write_json(options.json, report(rows, flat))
