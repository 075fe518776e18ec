"""How many requests per second the router core places, and how fast it finds prefixes; both on one core, without I/O.

    python -m benchmarks.router [--workers 10 100 1000] [--blocks 100000 1000000 10000000] [--json FILE]

Placements (placements.py): whole requests through `RouterCore.handle`, for each number of workers (half
P, half D) and of indexed blocks, without and with tiers of KV and fetches, each in a process of its own. The aim is
10,000 per second with 1,000 workers.

Ways (ways.py): what tiers and fetches cost a placement, as the ratio of two routers in turns: `--part ways`.

Lookups (lookups.py): `PrefixIndex` against Dynamo's `RadixTree`, where the optional package
`ai-dynamo-runtime` can be imported. It may be in another environment, which needs `msgspec` and `rich` too:

    python -m benchmarks.router --part lookups --dynamo-python /path/to/environment/bin/python
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, get_args

from benchmarks.router.lookups import compare_lookups, load_radix_tree
from benchmarks.router.placements import CLOCKS, measure_placements
from benchmarks.router.ways import WAYS, compare_ways
from disagg.router.config import PolicyName
from tests.support.reports import REPOSITORY, positive, print_table, report, write_json

Row = dict[str, Any]


def placements(options: argparse.Namespace) -> list[Row]:
    """Two rows per number of workers and of blocks. Every one has a process of its own, for the sake of its memory."""
    rows: list[Row] = []
    for num_workers in options.workers:
        for num_blocks in options.blocks:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                arguments = (options.requests, options.repeats, options.policy, options.clock)
                for tiers in (False, True):
                    run = pool.submit(measure_placements, num_workers, num_blocks, *arguments, tiers=tiers)
                    rows.append(run.result())
    return rows


def ways(options: argparse.Namespace) -> list[Row]:
    """One row per number of workers and of blocks, and per kind of ways; each in a process of its own. `--repeats`
    stands for ten pairs of turns each."""
    rows: list[Row] = []
    for num_workers in options.workers:
        for num_blocks in options.blocks:
            for kind in WAYS:
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    arguments = (kind, num_workers, num_blocks, 10 * options.repeats, options.policy, options.clock)
                    rows.append(pool.submit(compare_ways, *arguments).result())
    return rows


def lookups(options: argparse.Namespace) -> list[Row]:
    """One row per length of chains, measured here or by the interpreter that has the package."""
    if options.dynamo_python is None:
        radix_tree = load_radix_tree()
        if radix_tree is None:
            print("ai-dynamo-runtime is not installed: lookups are measured without the radix tree", file=sys.stderr)
        return compare_lookups(radix_tree, options.turn_blocks, options.sessions, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [options.dynamo_python, "-m", "benchmarks.router", "--part", "lookups", "--json", str(path)]
        command += ["--sessions", str(options.sessions), "--repeats", str(options.repeats)]
        command += ["--turn-blocks", *map(str, options.turn_blocks)]
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
        subprocess.run(command, check=True, cwd=REPOSITORY, env=environ, stdout=subprocess.DEVNULL)
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """The figures that matter: placements and whole requests per second and p99 of a placement with most blocks, by
    number of workers; the least ratio of lookups over the radix tree, by the clock or by processor time, whichever is
    less."""
    figures: dict[str, float] = {}
    for row in sorted((row for row in rows if row["part"] == "placements"), key=lambda row: row["indexed_blocks"]):
        name = f"{row['workers']}_tiers" if row.get("tiers") else f"{row['workers']}"
        figures[f"placements_per_s_{name}"] = row["placements_per_s"]
        figures[f"lives_per_s_{name}"] = row["lives_per_s"]
        figures[f"submit_p99_us_{name}"] = row["submit_p99_us"]
    for row in (row for row in rows if row["part"] == "ways"):
        figures[f"placements_{row['ways']}_over_none_{row['workers']}"] = row["over_none"]
    ratios = [row[name] for row in rows for name in ("over_radix_tree", "over_radix_tree_cpu") if name in row]
    if ratios:
        figures["lookups_over_radixtree"] = min(ratios)
    return figures


PLACEMENT_COLUMNS = (
    "workers",
    "indexed_blocks",
    "tiers",
    "placements_per_s",
    "lives_per_s",
    "submit_p50_us",
    "submit_p99_us",
    "longest_event_ms",
    "placed_alone",
    "resident_mib",
)
WAYS_COLUMNS = (
    "ways",
    "workers",
    "indexed_blocks",
    "over_none",
    "quartiles",
    "none_p50_us",
    "submit_p50_us",
    "none_p99_us",
    "submit_p99_us",
    "fetches",
)
LOOKUP_COLUMNS = (
    "mean_matched_blocks",
    "chain_blocks",
    "disagg_per_s",
    "disagg_best_per_s",
    "disagg_cpu_us",
    "radix_tree_per_s",
    "radix_tree_cpu_us",
    "over_radix_tree",
    "over_radix_tree_cpu",
)


def show(title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    """One table of these columns; `-` where a row has no such value."""
    if rows:
        cells = [[str(row.get(column, "-")) for column in columns] for row in rows]
        print_table(title, [column.replace("_", " ") for column in columns], cells)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["both", "placements", "lookups", "ways"], default="both")
    parser.add_argument("--workers", type=positive, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--blocks", type=positive, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--requests", type=positive, default=3000, help="requests of one repeat")
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--policy", choices=get_args(PolicyName), default="joint")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: leave out what others take")
    parser.add_argument("--sessions", type=positive, default=1000, help="chains that are looked up")
    parser.add_argument("--turn-blocks", type=positive, nargs="+", default=[7, 36, 110, 230], help="mean growth a turn")
    parser.add_argument("--dynamo-python", metavar="PYTHON", help="interpreter that has ai-dynamo-runtime, for lookups")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> None:
    """Measure, print, and write the report."""
    options = parse_arguments()
    rows = lookups(options) if options.part in ("both", "lookups") else []
    rows += placements(options) if options.part in ("both", "placements") else []
    rows += ways(options) if options.part == "ways" else []
    show("Lookups per second, 16 workers", LOOKUP_COLUMNS, [row for row in rows if row["part"] == "lookups"])
    show("Placements on one core", PLACEMENT_COLUMNS, [row for row in rows if row["part"] == "placements"])
    show("Placements per second over those without", WAYS_COLUMNS, [row for row in rows if row["part"] == "ways"])
    if options.json is not None:
        write_json(options.json, report(rows, summary(rows)))
