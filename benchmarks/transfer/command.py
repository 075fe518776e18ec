"""GB/s of the KV transports, and how long a hand-over holds up a stream in a real cluster.

python -m benchmarks.transfer --json FILE                     all of it
python -m benchmarks.transfer --only rates                    the transports alone, between two processes
python -m benchmarks.transfer --only ranks                    the same between workers of several ranks
python -m benchmarks.transfer --only handovers --streams 8    the cluster alone
python -m benchmarks.transfer --only handovers --queued 4     the same with prompts behind prompts

Rates are medians over the repeats, which go through everything in both orders (`rates.py`); the share is that
of plain copies of the same size. Ranks: `ranks.py`. What is exposed of a hand-over, and what is subtracted:
`handover.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.transfer.handover import Handover, Load, measure_handovers, quantiles, rows
from benchmarks.transfer.ranks import IN_FLIGHT, Tp, measure_ranks
from benchmarks.transfer.rates import Case, measure_rates
from disagg.engine.kv_transfer.transports.nixl_agent import MODULES as NIXL_MODULES
from tests.support.reports import positive, print_table, report, write_json

KIB = 1 << 10
SIZES_KIB = [64, 256, 1024, 4096, 16384]
TYPICAL = (4096, 2)
"""KiB and operations in flight of the shares in the summary: the default chunk, and at least two under way."""
LIMIT = "memcpy"
FIGURES = ["median", "least", "most"]
NEVER_LOCAL = {"local_prefill": "never"}


def transports(asked: Sequence[str] | None) -> list[str]:
    """The copy that is the limit, and what was asked for; without that, all that this machine can do."""
    if asked:
        return [LIMIT, *(name for name in asked if name != LIMIT)]
    import torch

    return [LIMIT, *between_processes(), "local", *(["nccl"] if torch.cuda.is_available() else [])]


def between_processes() -> list[str]:
    """The transports of one host's CPUs that are installed."""
    has_nixl = any(importlib.util.find_spec(name) for name in NIXL_MODULES)
    return ["gloo", "shm", *(["nixl"] if has_nixl else [])]


def rate_rows(rates: Mapping[Case, Sequence[float]]) -> list[dict[str, Any]]:
    """One row for each case, with its share of the limit."""
    medians = {case: statistics.median(values) for case, values in rates.items()}
    return [
        {
            "what": "rate",
            "transport": case.transport,
            "kib": case.size // KIB,
            "in_flight": case.in_flight,
            "gb_s": round(median, 3),
            "gb_s_min": round(min(rates[case]), 3),
            "gb_s_max": round(max(rates[case]), 3),
            "share": round(median / medians[Case(transport=LIMIT, size=case.size, in_flight=case.in_flight)], 4),
            "repeats": len(rates[case]),
        }
        for case, median in medians.items()
    ]


def rate_summary(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`<transport>_gb_s_<KiB>k`, the best over what was in flight, and `<transport>_share` at the typical case."""
    summary: dict[str, float] = {}
    for row in measured:
        name = f"{row['transport']}_gb_s_{row['kib']}k"
        summary[name] = max(summary.get(name, 0.0), row["gb_s"])
        share = f"{row['transport']}_share_{row['kib']}k"
        summary[share] = max(summary.get(share, 0.0), row["share"])
        if (row["kib"], row["in_flight"]) == TYPICAL:
            summary[f"{row['transport']}_share"] = row["share"]
    return summary


def rank_rows(rates: Mapping[tuple[str, Tp], Sequence[float]]) -> list[dict[str, Any]]:
    """One row for each transport and pair of widths."""
    return [
        {
            "what": "ranks",
            "transport": transport,
            "prefill_tp": prefill,
            "decode_tp": decode,
            "in_flight": IN_FLIGHT,
            "gb_s": round(statistics.median(values), 3),
            "gb_s_min": round(min(values), 3),
            "gb_s_max": round(max(values), 3),
            "repeats": len(values),
        }
        for (transport, (prefill, decode)), values in rates.items()
    ]


def rank_summary(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`<transport>_gb_s_tp_<prefill>_<decode>`."""
    return {f"{row['transport']}_gb_s_tp_{row['prefill_tp']}_{row['decode_tp']}": row["gb_s"] for row in measured}


def handover_summary(handovers: Mapping[str, Sequence[Handover]]) -> dict[str, float]:
    """`exposed_p50_ms` and so on over all hand-overs of the first transport, and by transport and size; by transport
    alone for those with other prompts on P."""
    summary: dict[str, float] = {}
    for transport, measured in handovers.items():
        alone = [each for each in measured if not each.queued]
        if alone and not any(key.startswith("exposed") for key in summary):
            summary |= quantiles(alone)
        for tokens in sorted({each.prompt_tokens for each in alone}):
            summary |= exposed(f"{transport}_{tokens}", [each for each in alone if each.prompt_tokens == tokens])
        for queued in sorted({each.queued for each in measured} - {0}):
            summary |= exposed(f"{transport}_queued_{queued}", [each for each in measured if each.queued == queued])
    return {name: round(value, 3) for name, value in summary.items()}


def exposed(name: str, measured: Sequence[Handover]) -> dict[str, float]:
    """`<name>_exposed_p50_ms` and p99."""
    figures = quantiles(measured)
    return {f"{name}_exposed_p{percent}_ms": figures[f"exposed_p{percent}_ms"] for percent in (50, 99)}


def show_rates(measured: Sequence[Mapping[str, Any]]) -> None:
    """One line for each size and number in flight, one column for each transport."""
    names = list(dict.fromkeys(row["transport"] for row in measured))
    lines: dict[tuple[int, int], dict[str, str]] = {}
    for row in measured:
        share = "" if row["transport"] == LIMIT else f" ({row['share']:.0%})"
        lines.setdefault((row["kib"], row["in_flight"]), {})[row["transport"]] = f"{row['gb_s']:.2f}{share}"
    table = [[f"{kib} KiB", str(k), *(cells[name] for name in names)] for (kib, k), cells in lines.items()]
    print_table(f"GB/s, and the share of {LIMIT}", ["size", "in flight", *names], table)


def show_ranks(measured: Sequence[Mapping[str, Any]]) -> None:
    """One line for each transport and pair of widths."""
    table = [
        [row["transport"], str(row["prefill_tp"]), str(row["decode_tp"])]
        + [f"{row[figure]:.2f}" for figure in ("gb_s", "gb_s_min", "gb_s_max")]
        for row in measured
    ]
    print_table("GB/s between workers of several ranks", ["transport", "prefill tp", "decode tp", *FIGURES], table)


def show_handovers(measured: Sequence[Mapping[str, Any]]) -> None:
    """One line for each transport, size, number of streams and of prompts on P."""
    parts = ["exposed_p50_ms", "exposed_p99_ms", "moving_p50_ms", "starting_p50_ms", "wait_p50_ms"]
    table = [
        [row["transport"], *(str(row[what]) for what in ("prompt_tokens", "streams", "queued", "requests"))]
        + [f"{row[part]:.2f}" for part in parts]
        for row in measured
    ]
    columns = ["transport", "prompt tokens", "streams", "queued", "requests"]
    columns += [part.removesuffix("_ms").replace("_", " ") for part in parts]
    print_table("Exposed transfer, in milliseconds", columns, table)


def cluster_config(options: argparse.Namespace, transport: str) -> dict[str, Any]:
    """One prefill and one decode worker, and no other way than through both."""
    model = {"path": options.model} if "/" in options.model or options.model == "fake" else {"name": options.model}
    return {
        "model": model | {"dtype": options.dtype},
        "gateway": {"port": 0, "http_port": None},
        "placement": NEVER_LOCAL,
        "transfer": {"transport": transport},
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["rates", "ranks", "handovers"])
    parser.add_argument("--transports", nargs="+", help="whose rates to measure (default: all that work here)")
    parser.add_argument("--kib", type=positive, nargs="+", default=SIZES_KIB, help="sizes of one operation")
    parser.add_argument("--in-flight", type=positive, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=positive, default=6, help="of each rate")
    parser.add_argument("--tp", type=tp_pair, nargs="+", default=[(1, 1), (1, 2), (2, 1), (2, 2)], metavar="P,D")
    parser.add_argument("--rank-transports", nargs="+", default=between_processes())
    parser.add_argument("--model", default="smollm2-135m", help="a model's name, its folder, or fake")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--handover-transports", nargs="+", default=between_processes())
    parser.add_argument("--prompts", type=positive, nargs="+", default=[512, 1024, 2048], help="their lengths")
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 4], help="other sequences that decode")
    parser.add_argument("--queued", type=int, nargs="+", default=[0], help="other prompts on the prefill worker")
    parser.add_argument("--requests", type=positive, default=20, help="of each length and number of streams")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def tp_pair(text: str) -> Tp:
    """`1,2`: ranks of the prefill and of the decode worker, for argparse."""
    prefill, _, decode = text.partition(",")
    return positive(prefill), positive(decode)


def main() -> None:
    """Measure, print the tables, write the report."""
    options = parse_arguments()
    measured: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    if options.only in (None, "rates"):
        sizes = [kib * KIB for kib in options.kib]
        rated = rate_rows(measure_rates(transports(options.transports), sizes, options.in_flight, options.repeats))
        show_rates(rated)
        measured, summary = rated, rate_summary(rated)
    if options.only in (None, "ranks"):
        ranked = rank_rows(measure_ranks(options.rank_transports, options.tp, options.repeats))
        show_ranks(ranked)
        measured, summary = measured + ranked, summary | rank_summary(ranked)
    if options.only in (None, "handovers"):
        handovers: dict[str, list[Handover]] = {}
        load = Load(
            prompts=options.prompts,
            streams=options.streams,
            queued=options.queued,
            requests=options.requests,
            seed=options.seed,
        )
        for transport in options.handover_transports:
            handovers[transport] = measure_handovers(cluster_config(options, transport), load)
        handed = [row for transport, each in handovers.items() for row in rows(each, transport)]
        show_handovers(handed)
        measured, summary = measured + handed, summary | handover_summary(handovers)
    if options.json:
        write_json(options.json, report(measured, summary))
        print(f"report: {options.json}")
