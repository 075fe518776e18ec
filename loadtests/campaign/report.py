"""Output of the `disagg load` commands: tables on the terminal, one HTML file, one JSON file.

The JSON is `{machine, commit, command, rows, summary}`: rows have every figure, the summary is a flat object.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from disagg.cluster.system.provenance import commit, machine
from disagg.loadtests.campaign.compare import Comparison, elastic_summary, json_rows, point_rows, summary
from disagg.loadtests.campaign.sweep import SweepResult
from disagg.loadtests.generator.recorder import GeneratorInfo
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict import report, report_html
from disagg.loadtests.verdict.comparison import rows
from disagg.loadtests.verdict.goodput import Quantiles, Score, Slo

PACKAGES = ("torch", "grpcio", "locust")
"""Packages whose versions a report names."""


def command_line() -> str:
    """Command line as it was typed, without this machine's paths to the program."""
    return shlex.join(["disagg", *sys.argv[1:]])


def write_json(path: Path, rows_: Sequence[Mapping[str, Any]], summary_: Mapping[str, float]) -> None:
    """Write one report. NaN, which JSON does not have, is an error."""
    content = {
        "machine": machine(*PACKAGES),
        "commit": commit(),
        "command": command_line(),
        "rows": [dict(row) for row in rows_],
        "summary": dict(summary_),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def write_html(path: Path, html: str) -> None:
    """Write one page, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")


# ---------------------------------------------------------------- one run


def print_run(console: Console, name: str, score: Score, min_attainment: float) -> None:
    """Print the tables and the verdict of one run."""
    report.print_table(console, report.score_table({name: score}))
    report.print_table(console, report.latency_table(score))
    if score.reasons:
        report.print_table(console, report.reasons_table(score))
    console.print(report.verdict(score, min_attainment), markup=False, highlight=False)


def run_html(name: str, records: Sequence[RequestRecord], slo: Slo, info: GeneratorInfo, min_attainment: float) -> str:
    """HTML page of one run."""
    facts = {
        "gateway": info.target,
        "model": info.model,
        "started": info.started_at,
        "commit": commit(),
        "command": command_line(),
        "generator": f"cores {info.cores}, niceness {info.niceness}",
        "versions": ", ".join(f"{name} {number}" for name, number in info.versions.items()),
    }
    return report_html.run_page(name, records, slo, info.window_s, min_attainment=min_attainment, facts=facts)


def run_summary(score: Score) -> dict[str, float]:
    """Flat figures of one run, for the JSON summary."""
    latencies = {"ttft": score.ttft, "tpot": score.tpot, "itl": score.itl, "e2e": score.e2e}
    flat = {
        "goodput_per_s": score.goodput_per_s,
        "attainment": score.attainment,
        "ttft_attainment": score.ttft_attainment,
        "tpot_attainment": score.tpot_attainment,
        "output_tokens_per_s": score.output_tokens_per_s,
        "sent": score.num_due,
        "ok": score.num_ok,
        "refused": score.num_refused,
        "failed": score.num_failed,
        "dropped": score.num_dropped,
        "is_valid": float(score.is_valid),
    }
    for name, found in (*latencies.items(), ("lateness", score.lateness)):
        flat |= _milliseconds(name, found)
    return {name: round(value, 4) for name, value in flat.items()}


def _milliseconds(name: str, found: Quantiles) -> dict[str, float]:
    values = {"p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.max}
    return {f"{name}_{key}_ms": value * 1e3 for key, value in values.items()}


# ---------------------------------------------------------------- many runs


def print_sweep(console: Console, result: SweepResult, slo: Slo, min_attainment: float) -> None:
    """Print the attainment over the rate, and the runs that are not valid."""
    report.print_table(console, report.sweep_table(result.probes, result.served, slo, min_attainment))
    _print_invalid(console, result.invalid)


def sweep_rows(result: SweepResult) -> list[dict[str, Any]]:
    """JSON rows, one for each rate."""
    return [
        {"rate_per_s": probe.rate_per_s, "attainment": probe.attainment, "num_requests": probe.num_requests}
        for probe in result.probes
    ]


def sweep_summary(result: SweepResult) -> dict[str, float]:
    """The largest served rate: `served_per_s`, with `_below` or `_at_least` behind it where it is only a bound."""
    bound = {"between": "", "none": "_below", "all": "_at_least"}[result.served.bound]
    return {f"served_per_s{bound}": round(result.served.rate_per_s, 4), "invalid_runs": len(result.invalid)}


def print_comparison(console: Console, comparison: Comparison, subject: str, min_attainment: float) -> None:
    """Print the served rates of all shapes for all limits, and the runs that are not valid."""
    found = rows(comparison.curves, comparison.slos, min_attainment)
    report.print_table(console, report.comparison_table(found, min_attainment, subject))
    difference = comparison.difference
    console.print(
        f"{difference.num_different} of {difference.num_compared} answers differ from the first to the same request",
        highlight=False,
    )
    _print_invalid(console, comparison.invalid)


def comparison_html(comparison: Comparison, title: str, subject: str, min_attainment: float) -> str:
    """HTML page of a comparison."""
    facts = {**machine(*PACKAGES), "commit": commit(), "command": command_line()}
    return report_html.comparison_page(
        title, comparison.curves, comparison.slos, min_attainment=min_attainment, subject=subject, facts=facts
    )


def write_comparison_json(path: Path, comparisons: Sequence[Comparison], workload: str, min_attainment: float) -> None:
    """Write rows of two kinds, named by their key `kind`: recordings, and shapes with limits."""
    recorded: list[dict[str, Any]] = []
    for each in comparisons:
        recorded += [row for row in point_rows(each) if row not in recorded]
    recorded = [{"kind": "recording", **row} for row in recorded]
    scored = [{"kind": "score", **row} for each in comparisons for row in json_rows(each, min_attainment)]
    figures = {name: value for each in reversed(comparisons) for name, value in summary(each, workload).items()}
    figures["invalid_runs"] = sum(len(each.invalid) for each in comparisons)
    write_json(path, [*recorded, *scored], figures | elastic_summary(comparisons))


def _print_invalid(console: Console, invalid: Sequence[str]) -> None:
    for line in invalid:
        console.print(f"NOT VALID: {line}", style="red", markup=False, highlight=False)
