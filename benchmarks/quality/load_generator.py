"""How exactly the load generator measures: against a server with known latencies, request by request.

python -m benchmarks.quality.load_generator --json FILE

The fake server (loadtests/generator/fake_server.py) runs on the last core, the generator, which is Locust with our
locustfile, on the first. Each request has a TTFT and a TPOT of its own; the error is what was measured minus what was
planned. The server's lag, how late it handed its messages to gRPC, is part of the error and shown beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from disagg.cluster.system.cores import available_cores
from disagg.loadtests.generator.fake_server import FAKE_VOCAB_SIZE, FakeTiming
from disagg.loadtests.generator.load_generator import GENERATOR_NICE, GeneratorOptions, play
from disagg.loadtests.records import RequestRecord, read_file
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload, plan_requests
from tests.support.fake_server import fake_server
from tests.support.reports import percentiles, positive, print_table, report, write_json

STALL_AT_S = 2.0
STALL_S = 0.5
MAX_MODEL_LEN = 1 << 20


def scenario_of(rate_per_s: float, duration_s: float, isl: int, osl: int, seed: int) -> Scenario:
    """Poisson arrivals of random prompts."""
    return Scenario(
        workload=RandomWorkload(isl=isl, osl=osl, seed=seed),
        arrivals=ArrivalConfig(kind="poisson", rate_per_s=rate_per_s, duration_s=duration_s, seed=seed),
    )


def errors_ms(
    scenario: Scenario, timing: FakeTiming, records: Sequence[RequestRecord]
) -> tuple[list[float], list[float]]:
    """Measured minus planned TTFT and TPOT, in milliseconds, of every whole answer."""
    planned = plan_requests(
        scenario.workload, scenario.arrivals, vocab_size=FAKE_VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
    )
    ttfts, tpots = [], []
    for record in records:
        ttft_s, tpot_s = timing.of(planned[record.index].prompt_token_ids)
        if record.status == "ok" and record.ttft_s is not None and record.tpot_s is not None:
            ttfts.append((record.ttft_s - ttft_s) * 1e3)
            tpots.append((record.tpot_s - tpot_s) * 1e3)
    return ttfts, tpots


def measure(options: argparse.Namespace, output_tokens: int, repeat: int, stall_s: float = 0.0) -> dict[str, Any]:
    """One run as a row."""
    timing = FakeTiming(
        ttft_s=options.ttft_ms / 1e3,
        tpot_s=options.tpot_ms / 1e3,
        spread=options.spread,
        stall_at_s=STALL_AT_S,
        stall_s=stall_s,
    )
    scenario = scenario_of(options.rate, options.duration, options.input_tokens, output_tokens, repeat)
    generator = GeneratorOptions(cores=available_cores()[:1], nice=options.nice)
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as folder, fake_server(timing, options.nice) as server:
        path = Path(folder) / "run.jsonl"
        info = play(scenario, server.address, path, generator)
        records = read_file(path)
    ttfts, tpots = errors_ms(scenario, timing, records)
    slack = 1 + options.spread
    slo = Slo(ttft_s=timing.ttft_s * slack + 0.02, tpot_s=timing.tpot_s * slack + 0.002)
    score = evaluate(records, slo, info.window_s)
    lateness = percentiles([record.lateness_s * 1e3 for record in records])
    return {
        "output_tokens": output_tokens,
        "repeat": repeat,
        "stall_s": stall_s,
        "requests": len(records),
        "errors": len(records) - score.num_ok,
        **{f"ttft_error_{name}_ms": round(value, 3) for name, value in percentiles(ttfts).items()},
        **{f"tpot_error_{name}_ms": round(value, 4) for name, value in percentiles([*map(abs, tpots)]).items()},
        **{f"lateness_{name}_ms": round(value, 3) for name, value in lateness.items()},
        "max_itl_ms": round(score.itl.max * 1e3, 1),
        "attainment": round(score.attainment, 4),
        "server_lag_p99_ms": server.lag["lag_p99_ms"],
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median run of those without a stall, and the run with one."""
    steady = [row for row in rows if not row["stall_s"]]
    flat: dict[str, float] = {}
    for key in ("ttft_error_p99_ms", "tpot_error_p99_ms", "lateness_p99_ms", "server_lag_p99_ms"):
        flat[key] = percentiles([row[key] for row in steady], (50,))["p50"]
        flat[f"{key}_worst"] = max(row[key] for row in steady)
    flat["errors"] = sum(row["errors"] for row in steady)
    flat["attainment"] = min(row["attainment"] for row in steady)
    for row in rows:
        if row["stall_s"]:
            flat["stall_s"] = row["stall_s"]
            flat["max_itl_with_stall_ms"] = row["max_itl_ms"]
            flat["attainment_with_stall"] = row["attainment"]
    return flat


COLUMNS = (
    "output tokens",
    "stall s",
    "requests",
    "errors",
    "TTFT error ms p50",
    "p99",
    "|TPOT error| ms p99",
    "lateness ms p99",
    "server lag ms p99",
    "max ITL ms",
    "attainment",
)


def line(row: dict[str, Any]) -> list[str]:
    """A row for the terminal. A stall is no error of the generator: then there are none."""
    found = (row["ttft_error_p50_ms"], row["ttft_error_p99_ms"], row["tpot_error_p99_ms"])
    return [
        str(row["output_tokens"]),
        f"{row['stall_s']:g}",
        str(row["requests"]),
        str(row["errors"]),
        *("-" if row["stall_s"] else f"{value:.3f}" for value in found),
        f"{row['lateness_p99_ms']:.2f}",
        f"{row['server_lag_p99_ms']:.2f}",
        f"{row['max_itl_ms']:.0f}",
        f"{row['attainment']:.3f}",
    ]


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=120.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of arrivals")
    parser.add_argument("--input-tokens", type=positive, default=128)
    parser.add_argument("--output-tokens", type=positive, nargs="+", default=[16, 32, 64])
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--tpot-ms", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=0.3, help="each request's own factor is 1 +- this")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--nice", type=int, default=GENERATOR_NICE, help="niceness of generator and server, if allowed")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print the table, write the report."""
    options = parse_arguments()
    rows = [
        measure(options, output_tokens, repeat)
        for repeat in range(options.repeats)
        for output_tokens in options.output_tokens
    ]
    rows.append(measure(options, options.output_tokens[0], options.repeats, STALL_S))
    print_table(f"load generator at {options.rate:g} requests/s", COLUMNS, [line(row) for row in rows])
    if options.json:
        write_json(options.json, report(rows, summary(rows)))
        print(f"report: {options.json}")


if __name__ == "__main__":
    main()
