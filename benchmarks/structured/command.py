"""Does structured output follow its schema, through both pools, and what does it cost?

    python -m benchmarks.structured [--suite FOLDER] [--per-feature 3] --json FILE

valid_share           features of JSON-Schema-Test-Suite (draft 2020-12) that are supported, and whose every answer that
                      ended with `stop` is valid, over those that are supported: greedy and sampled, one at a time and
                      eight; a feature is supported where a schema of it is taken
step_cost_b32         what a decode step of 32 sequences takes with a grammar in each, over one without, less 1; the
                      worst of greedy and drawn
first_token_delay_ms  by what the first token comes later with a new schema of 2 KiB, through a prefill worker; median
hostile_refused_ms    the slowest answer to a schema that is made to take long
forced_steps          steps of whole answers of the engine alone, over those without skipping the steps of forced tokens
forced_speedup        their output tokens a second, likewise: the least of the medians over batches of 1, 8 and 32,
                      greedy and drawn, with white space left to the model (`free`) and in one form (`one_form`)
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.structured import forced, requests, steps
from benchmarks.structured.suite import Case, fetched, read_cases
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.loadtests.verdict.goodput import quantile
from tests.support.reports import REPOSITORY, print_table, report, write_json

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
PARTS = ("valid", "steps", "forced", "delays", "hostile")


async def on_cluster(address: str, cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    """What needs a cluster."""
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120.0) as client:
        await requests.first_token_ms(client, requests.new_schema(-1))  # loads the vocabulary, once for each process
        if "delays" in options.parts:
            found["delays"] = await requests.delays(client, options.pairs)
        if "hostile" in options.parts:
            found["hostile"] = await requests.hostile(client, options.repeats)
        if "valid" in options.parts:
            found["valid"] = [
                row
                for width, chosen in ((8, cases), (1, cases[:: options.alone_every]))
                for sampling in (GREEDY, SAMPLED)
                for row in await requests.answers(client, chosen, width, sampling, options.max_tokens)
            ]
    return found


def valid_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Of features and of answers; prints what was found for each feature."""
    outcomes: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        outcomes[row["feature"]][row["outcome"]] += 1
    names = ("valid", "invalid", "length", "refused", "error")
    print_table("Answers", ["feature", *names], [[f, *(str(c[n]) for n in names)] for f, c in sorted(outcomes.items())])
    supported = [c for c in outcomes.values() if c["valid"] + c["invalid"] + c["length"] + c["error"]]
    ended = sum(c["valid"] + c["invalid"] for c in supported)
    return {
        "features": float(len(outcomes)),
        "supported_features": float(len(supported)),
        "valid_share": sum(not c["invalid"] and not c["error"] for c in supported) / len(supported),
        "valid_answers": sum(c["valid"] for c in supported) / ended,
        "ended_with_stop": float(ended),
    }


def forced_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Of each form of the schema; prints the median speed of each batch."""
    summary: dict[str, float | None] = {}
    table = []
    for form in dict.fromkeys(row["form"] for row in rows):
        of_form = [row for row in rows if row["form"] == form]
        speedups = []
        for kind, batch in dict.fromkeys((row["kind"], row["batch"]) for row in of_form):
            pairs = [row for row in of_form if (row["kind"], row["batch"]) == (kind, batch)]
            speeds = [statistics.median(row[name] for row in pairs) for name in ("tok_s", "tok_s_skipping")]
            speedups.append(statistics.median(row["tok_s_skipping"] / row["tok_s"] for row in pairs))
            steps_taken = f"{pairs[0]['steps']} -> {pairs[0]['steps_skipping']}"
            same = f"{sum(row['same_answers'] for row in pairs)} of {batch * len(pairs)}"
            table.append(
                [form, kind, str(batch), steps_taken, *(f"{v:.0f}" for v in speeds), f"{speedups[-1]:.2f}", same]
            )
        summary[f"forced_speedup_{form}"] = min(speedups)
        summary[f"forced_steps_{form}"] = statistics.median(row["steps_skipping"] / row["steps"] for row in of_form)
    names = ("form", "kind", "batch", "steps", "tok/s", "skipping", "times", "same answers")
    print_table("Forced tokens", [*names], table)
    return summary


def summarize(
    found: dict[str, Any], step_rows: Sequence[dict[str, Any]], forced_rows: Sequence[dict[str, Any]]
) -> dict[str, float | None]:
    """The named figures; prints tables."""
    summary: dict[str, float | None] = {}
    if "valid" in found:
        summary |= valid_summary(found["valid"])
    if step_rows:
        for kind in steps.KINDS:
            ratios = [row["masked_ms"] / row["plain_ms"] for row in step_rows if row["kind"] == kind]
            summary[f"step_cost_b32_{kind}"] = statistics.median(ratios) - 1
        summary["step_cost_b32"] = max(summary[f"step_cost_b32_{kind}"] or 0.0 for kind in steps.KINDS)
    if forced_rows:
        summary |= forced_summary(forced_rows)
    if "delays" in found:
        late = [row["new_schema_ms"] - row["plain_ms"] for row in found["delays"]]
        summary["first_token_delay_ms"], summary["first_token_delay_p90_ms"] = (
            statistics.median(late),
            quantile(late, 0.9),
        )
    if "hostile" in found:
        rows, alone, beside = found["hostile"]
        summary["hostile_refused_ms"] = max(row["ms"] for row in rows)
        summary["stream_gap_p99_ms_alone"], summary["stream_gap_p99_ms_beside"] = (
            quantile(alone, 0.99),
            quantile(beside, 0.99),
        )
        print_table(
            "Hostile schemas",
            ["schema", "status", "ms", "why"],
            [[r["schema"], str(r["status"]), f"{r['ms']:.1f}", r["detail"]] for r in rows],
        )
    print_table("Summary", ["figure", "value"], [[n, "" if v is None else f"{v:.3f}"] for n, v in summary.items()])
    return summary


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--suite", type=Path, help="a folder of the suite's files; without it pip gets them, once")
    parser.add_argument("--per-feature", type=int, default=3, help="schemas of each feature")
    parser.add_argument("--alone-every", type=int, default=4, help="one of so many schemas is asked for alone, too")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model_path = resolve_model(options.model)
    step_rows = (
        steps.measure(model_path, options.batch, options.steps, options.repeats) if "steps" in options.parts else []
    )
    forced_rows = forced.measure(model_path, options.repeats) if "forced" in options.parts else []
    found: dict[str, Any] = {}
    if set(options.parts) - {"steps", "forced"}:
        suite = options.suite or (
            fetched(REPOSITORY / "build" / "json-schema-suite") if "valid" in options.parts else None
        )
        cases = read_cases(suite, options.per_feature) if suite else []
        config = parse_config(
            {"model": {"path": str(model_path), "name": requests.MODEL}, "gateway": {"port": 0, "http_port": 0}}
        )
        with ProcessCluster(config) as cluster:
            found = asyncio.run(on_cluster(cluster.http_address, cases, options))
    summary = summarize(found, step_rows, forced_rows)
    if options.json:
        rows = [
            *found.get("valid", []),
            *step_rows,
            *forced_rows,
            *found.get("delays", []),
            *found.get("hostile", [[]])[0],
        ]
        write_json(options.json, report(rows, summary))
