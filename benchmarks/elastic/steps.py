"""Steps by slack beside fixed chunks and prompts first, on one worker with both roles. The router core and the engine
core that serve, in virtual time: figures repeat exactly.

    python -m benchmarks.elastic.steps [--requests 300] [--seeds 2] [--json FILE]

Steps take 5 ms, 0.4 for each prompt token, 0.5 for each decode, and a little for what attention reads: about a model of
135 million parameters on one core. Poisson arrivals of two workloads:

    fixed     prompts of 512 tokens, answers of 64
    varied    prompts of 64 to 960 tokens, answers of 8 to 120 that router and worker do not know (limit 256)

Cells: for each pair of limits the goodput, the highest rate at which 90 % of the requests meet both, of scheduling
`slack` and of each fixed setting; those with `last` put prompts behind that cannot meet their TTFT any more. Fixed
settings are scored for all limits from the same runs, `slack` is given the limits of the cell.

Streams: eight answers of 500 tokens at a time, whose TPOT target is 1.5 times their step when nothing else runs, while
prompts of 2,000 tokens arrive; one a second is more than a worker can compute beside them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from disagg.engine.config import Scheduling, WorkerConfig
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Outcomes, Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart, RandomWorkload, outline
from disagg.proto.messages import KvLayout
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.world.settings import ClusterSpec, PoolSpec
from disagg.simulator.world.timing import LinearSteps
from disagg.simulator.world.users import LOAD_TEST, Habits, UserRequest
from tests.support.reports import percentile, positive, print_table, report, write_json

STEP = LinearSteps(base_ms=5.0, prefill_token_ms=0.4, attended_ms=1e-4, decode_ms=0.5, context_ms=1e-3)
MAX_MODEL_LEN = 4096
SLACK_BUDGET = 1024
"""Only an upper bound."""
TTFT_S = (0.5, 1.0, 2.0, 4.0)
TPOT_S = (0.012, 0.015, 0.020, 0.030, 0.050)
ATTAINMENT = 0.9
RATES = tuple(0.5 * 1.06**k for k in range(34))
WORKLOADS: dict[str, tuple[tuple[int, int], tuple[int, int], Habits]] = {
    "fixed": ((512, 512), (64, 64), LOAD_TEST),
    "varied": ((64, 960), (8, 120), Habits(max_tokens=256)),
}
FIXED: dict[str, tuple[Scheduling, int]] = {
    **{f"chunked:{budget}": ("decode_first", budget) for budget in (16, 32, 64, 128, 256, 512, 1024)},
    "prompts first": ("prefill_first", 1024),
}
LAST = ("chunked:32", "chunked:128", "chunked:512")
"""Settings that are also measured with hopeless prompts last: scheduling `slack` without a TPOT target is that."""
STREAMS, STREAM_TOKENS, STREAM_PROMPT, WAVE_S, LONG_PROMPT, LONG_TOKENS = 8, 500, 128, 15.0, 2000, 8

Row = dict[str, Any]


def cluster(scheduling: Scheduling, token_budget: int, max_itl_ms: float | None = None) -> ClusterSpec:
    """One worker with both roles, and a router that refuses nothing."""
    worker = WorkerConfig(
        worker_id="",
        roles=("prefill", "decode"),
        model_path="fake",
        scheduling=scheduling,
        token_budget=token_budget,
        max_itl_ms=max_itl_ms,
    )
    return ClusterSpec(
        pools=[PoolSpec(name="colocated", size=1, worker=worker, num_blocks=20_000, times=STEP)],
        kv_layout=KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=1),
        max_model_len=MAX_MODEL_LEN,
        router=RouterConfig(max_queued=1 << 20, admission=False),
        sample_s=60.0,
    )


def simulated(spec: ClusterSpec, requests: Sequence[UserRequest], habits: Habits = LOAD_TEST) -> list[RequestRecord]:
    """The observations of the simulated requests."""
    result = SimulatedCluster(spec, requests, habits).run()
    assert not result.problems, result.problems
    return result.records


# ---------------------------------------------------------------- cells


class Cells:
    """Runs of one workload, `num_requests` for each of `num_seeds` seeds; the first tenth is not counted."""

    def __init__(self, workload: str, num_requests: int, num_seeds: int) -> None:
        self._isl, self._osl, self._habits = WORKLOADS[workload]
        self._num_requests, self._num_seeds = num_requests, num_seeds
        self.fixed = functools.lru_cache(maxsize=None)(self._fixed)

    def run(self, spec: ClusterSpec, rate_per_s: float, targets: Slo) -> Outcomes:
        """The outcome of requests at one rate."""
        records: list[RequestRecord] = []
        for seed in range(1, self._num_seeds + 1):
            arrivals = ArrivalConfig(rate_per_s=rate_per_s, num_requests=self._num_requests, seed=seed)
            workload = RandomWorkload(isl=self._isl, osl=self._osl, seed=seed)
            requests = outline(workload, arrivals, max_model_len=MAX_MODEL_LEN).requests
            found = simulated(spec, [UserRequest(each, targets) for each in requests], self._habits)
            records += found[self._num_requests // 10 :]
        return Outcomes(records, 1.0)

    def _fixed(self, name: str, last_ttft_s: float | None, rate_per_s: float) -> Outcomes:
        scheduling, budget = FIXED[name]
        if last_ttft_s is not None:
            scheduling = "slack"
        return self.run(cluster(scheduling, budget), rate_per_s, Slo(ttft_s=last_ttft_s))

    def row(self, slo: Slo) -> Row:
        """Goodput of all settings within one pair of limits."""
        assert slo.ttft_s is not None
        spec = cluster("slack", SLACK_BUDGET)
        rates = {"slack": goodput(lambda rate: self.run(spec, rate, slo), slo)}
        for name in FIXED:
            rates[name] = goodput(functools.partial(self.fixed, name, None), slo)
        for name in LAST:
            rates[f"{name} last"] = goodput(functools.partial(self.fixed, name, slo.ttft_s), slo)
        best = max(FIXED, key=lambda name: rates[name])
        last = max(rates[best], *(rate for name, rate in rates.items() if name.endswith(" last")))
        return {
            "ttft_s": slo.ttft_s,
            "tpot_s": slo.tpot_s,
            "best_fixed": best,
            "over_fixed": rates["slack"] / rates[best] if rates[best] else None,
            "over_last": rates["slack"] / last if last else None,
            **{name: round(rate, 4) for name, rate in rates.items()},
        }


def goodput(run: Callable[[float], Outcomes], slo: Slo) -> float:
    """The highest rate at which `ATTAINMENT` of the requests are within the limits, between two of `RATES`; 0 below the
    first, and the last one where it is not reached."""

    @functools.cache
    def attainment(index: int) -> float:
        return run(RATES[index]).attainment(slo)

    low, high = -1, len(RATES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attainment(middle) >= ATTAINMENT else (low, middle)
    if low < 0 or high == len(RATES):
        return RATES[-1] if high == len(RATES) else 0.0
    share = (attainment(low) - ATTAINMENT) / (attainment(low) - attainment(high))
    return float(RATES[low] + share * (RATES[high] - RATES[low]))


# ---------------------------------------------------------------- streams


def streams_row(
    setting: str,
    scheduling: Scheduling,
    budget: int,
    *,
    every_s: float,
    max_itl_ms: float | None = None,
    num_waves: int = 6,
) -> Row:
    """Streams beside long prompts that come every `every_s`."""
    context = STREAM_PROMPT + STREAM_TOKENS / 2
    target_s = 1.5e-3 * (STEP.base_ms + STREAMS * (STEP.decode_ms + context * STEP.context_ms))
    asked = [(wave * WAVE_S, STREAM_PROMPT, STREAM_TOKENS) for wave in range(num_waves) for _ in range(STREAMS)]
    asked += [(0.5 + n * every_s, LONG_PROMPT, LONG_TOKENS) for n in range(int(num_waves * WAVE_S / every_s))]
    requests = [
        UserRequest(
            OutlinedRequest(
                index=index, due_s=due_s, parts=(PromptPart(num_tokens, ("prompt", index)),), max_tokens=max_tokens
            ),
            Slo(tpot_s=target_s),
        )
        for index, (due_s, num_tokens, max_tokens) in enumerate(sorted(asked))
    ]
    records = simulated(cluster(scheduling, budget, max_itl_ms), requests)
    streams = [record for record in records if record.max_tokens == STREAM_TOKENS]
    prompts = [record.ttft_s for record in records if record.max_tokens == LONG_TOKENS and record.ttft_s is not None]
    times = [record.token_times_s for record in streams]
    gaps = [after - before for each in times for before, after in pairwise(each)]
    kept = [record.tpot_s is not None and record.tpot_s <= target_s for record in streams]
    return {
        "setting": setting,
        "every_s": every_s,
        "target_ms": round(target_s * 1e3, 2),
        "kept": sum(kept) / len(kept),
        "itl_p99_ms": round(percentile(gaps, 99) * 1e3, 2),
        "longest_ms": round(max(gaps) * 1e3, 2),
        "prompt_ttft_p50_s": round(percentile(prompts, 50), 2),
    }


STREAM_SETTINGS: dict[str, tuple[Scheduling, int, float | None]] = {
    "chunked:512": ("decode_first", 512, None),
    "chunked:32": ("decode_first", 32, None),
    "slack": ("slack", SLACK_BUDGET, None),
    "slack, max_itl_ms 18": ("slack", SLACK_BUDGET, 18.0),
}


# ---------------------------------------------------------------- all


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """The least and the median of what slack gets over the best fixed setting of each cell, and streams kept."""
    figures: dict[str, float | None] = {}
    for workload in WORKLOADS:
        for name in ("over_fixed", "over_last"):
            ratios = [row[name] for row in rows if row.get("workload") == workload and row[name] is not None]
            if ratios:
                figures[f"{workload}_{name}_min"] = round(min(ratios), 3)
                figures[f"{workload}_{name}_median"] = round(median(ratios), 3)
    kept = [row["kept"] for row in rows if str(row.get("setting", "")).startswith("slack")]
    return {**figures, "streams_kept_min": min(kept, default=None)}


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=positive, default=300, help="of each run")
    parser.add_argument("--seeds", type=positive, default=2, help="runs of each point")
    parser.add_argument("--workloads", nargs="*", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    rows: list[Row] = []
    for name, (scheduling, budget, max_itl_ms) in STREAM_SETTINGS.items():
        rows += [streams_row(name, scheduling, budget, every_s=s, max_itl_ms=max_itl_ms) for s in (1.0, 4.0)]
    columns = tuple(rows[0])
    print_table("Streams beside long prompts", columns, [[str(row[name]) for name in columns] for row in rows])
    for workload in options.workloads:
        cells = Cells(workload, options.requests, options.seeds)
        found: list[Row] = []
        for tpot_s in TPOT_S:
            for ttft_s in TTFT_S:
                found.append({"workload": workload, **cells.row(Slo(ttft_s=ttft_s, tpot_s=tpot_s))})
                print({name: _shown(value) for name, value in found[-1].items()}, file=sys.stderr, flush=True)
        shown = [name for name in found[0] if name != "workload"]
        print_table(workload, shown, [[_shown(row[name]) for name in shown] for row in found])
        rows += found
    print(summary(rows))
    if options.json is not None:
        write_json(options.json, report(rows, summary(rows)))


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
