"""Does the automatic shape serve at least what the best static shape does, whatever the limits? In virtual time.

    python -m benchmarks.elastic [--workers 2 4 8] [--workloads 512/64 ...] [--automatic SHAPE ...] [--json FILE]
    python -m benchmarks.elastic --quick        one workload, two workers, one seed

For each number of workers and workload, 25 pairs of limits: the goodput of the automatic shape, whose requests bring
the limits as targets, over that of the best static shape (chunked prefill with 16 to 512 tokens a step, prompts first,
static batching, every P:D split), and over the best one where hopeless prompts may also go last. See `workloads.py`,
`runs.py`, `grid.py` and `day.py`. `--automatic` is a shape as `disagg load compare` has them, `{n}` for the workers.
Of several, as by default, a twin chooses by a replay of other requests.
Runs of static shapes are kept in `--cache`, so that a change of the policy simulates its own shape only.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.elastic.day import DAY
from benchmarks.elastic.grid import TPOT_S, TTFT_S, Column, Row, Settings, day_row
from benchmarks.elastic.heat_map import as_text, grids_of, short, write_png
from benchmarks.elastic.runs import TIMING, Runs
from disagg.cli.planning.simulate import read_times
from tests.support.reports import positive, print_table, report, write_json

WORKLOADS = ("512/64", "512/128", "varied", "mooncake")
CACHE = Path("build/elastic-runs.sqlite")
ENOUGH = 0.97


class _Task(NamedTuple):
    """A column of cells, or the day."""

    settings: Settings
    times: Path | None
    cache: Path | None
    workers: int
    workload: str
    ttft_s: float
    tpots_s: tuple[float, ...]


def measure(task: _Task) -> tuple[list[Row], int]:
    """Its rows, and how many requests were simulated for them."""
    runs = Runs(TIMING if task.times is None else read_times(task.times), task.cache)
    if task.workload == DAY:
        return [day_row(runs, task.settings, task.workers)], runs.num_requests
    column = Column(runs, task.settings, task.workers, task.workload)
    return column.rows(task.ttft_s, task.tpots_s), runs.num_requests


def measured(tasks: Sequence[_Task], num_jobs: int) -> Iterator[tuple[list[Row], int]]:
    """The measured results, in the order of the tasks."""
    if num_jobs == 1:
        yield from map(measure, tasks)
        return
    with ProcessPoolExecutor(num_jobs) as pool:
        yield from pool.map(measure, tasks)


# ---------------------------------------------------------------- what comes out


def summary(rows: Sequence[Row]) -> dict[str, float | None]:
    """The least and the median of both ratios by number of workers, and of the day."""
    figures: dict[str, float | None] = {}
    cells = [row for row in rows if row["workload"] != DAY and row["over_best"] is not None]
    for workers in sorted({row["workers"] for row in cells}):
        own = [row for row in cells if row["workers"] == workers]
        for name, value in (("", "over_best"), ("_last", "over_last")):
            ratios = [row[value] for row in own]
            figures[f"min_{workers}{name}"] = round(min(ratios), 3)
            figures[f"median_{workers}{name}"] = round(median(ratios), 3)
        figures[f"below_{workers}"] = sum(row["over_best"] < ENOUGH for row in own)
        figures[f"worst_quarter_{workers}"] = round(min(row["worst_quarter"] for row in own), 3)
    days = [row["over_best"] for row in rows if row["workload"] == DAY]
    return {**figures, "day_over_best_single": round(days[0], 3) if days else None}


def print_rows(rows: Sequence[Row]) -> None:
    """Heat maps as text, and what lies below `ENOUGH`."""
    for (workers, workload), grid in grids_of([row for row in rows if row["workload"] != DAY]).items():
        for value, name in (("over_best", "the best static shape"), ("over_last", "that, or hopeless prompts last")):
            print(f"\n{workload}, {workers} workers, over {name}:\n\n{as_text(grid, value)}")
    columns = ("cell", "automatic", "best", "which", "last", "pauses", "quarters", "TTFT p99 by length")
    below = [row for row in rows if row["workload"] != DAY and (row["over_best"] or 1.0) < ENOUGH]
    print_table(f"Below {ENOUGH}", columns, [_shown(row) for row in sorted(below, key=lambda row: row["over_best"])])


def _shown(row: Row) -> list[str]:
    def both(name: str, scale: float = 1.0) -> str:
        own, theirs = row[name], row[f"best_{name}"]
        return f"{_number(own, scale)} / {_number(theirs, scale)}"

    ttfts = zip(row["ttft_p99_s_by_length"], row["best_ttft_p99_s_by_length"], strict=True)
    return [
        f"{row['workers']}x {row['workload']} {row['ttft_s']:g} s {row['tpot_s'] * 1e3:g} ms",
        f"{row['automatic']:.2f} ({row['over_best']:.2f})",
        f"{row['best']:.2f}",
        short(row["best_shape"]),
        f"{row['best_last']:.2f} {short(row['best_last_shape'])}",
        both("pause_p99_s", 1e3),
        f"{row['worst_quarter']:+.3f}",
        ", ".join(f"{_number(own)}/{_number(theirs)}" for own, theirs in ttfts),
    ]


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.3g}"


def tasks_of(options: argparse.Namespace) -> list[_Task]:
    """Everything that was asked for."""
    settings = Settings(automatic=tuple(options.automatic), num_requests=options.requests, num_seeds=options.seeds)
    common = (settings, options.times, options.cache)
    tasks = [
        _Task(*common, workers, workload, ttft_s, tuple(options.tpots))
        for workers in options.workers
        for workload in options.workloads
        for ttft_s in options.ttfts
    ]
    return [*tasks, _Task(*common, 2, DAY, 0.0, ())] if options.day else tasks


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--automatic", nargs="+", default=list(Settings.automatic), help="shapes; {n} is the number of workers"
    )
    parser.add_argument("--workers", type=positive, nargs="+", default=[2, 4, 8])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), help="prompt/answer, varied, mooncake")
    parser.add_argument("--ttfts", type=float, nargs="+", default=list(TTFT_S), help="limits in seconds")
    parser.add_argument("--tpots", type=float, nargs="+", default=list(TPOT_S), help="limits in seconds")
    parser.add_argument("--requests", type=positive, default=Settings.num_requests, help="of a run, on two workers")
    parser.add_argument("--seeds", type=positive, default=Settings.num_seeds, help="runs of each rate")
    parser.add_argument("--day", action=argparse.BooleanOptionalAction, default=True, help="the day of eight phases")
    parser.add_argument("--quick", action="store_true", help="two workers, varied, one seed, no day")
    parser.add_argument("--times", type=Path, help="a file of step times, as of `disagg simulate`")
    parser.add_argument("--cache", type=Path, default=CACHE, help="what static shapes did, kept between calls")
    parser.add_argument("--jobs", type=positive, default=1, help="processes")
    parser.add_argument("--png", type=Path, help="draw the heat maps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.workers, options.workloads, options.seeds, options.day = [2], ["varied"], 1, False
    tasks = tasks_of(options)
    rows: list[dict[str, Any]] = []
    num_simulated, began = 0, time.monotonic()
    for task, (found, number) in zip(tasks, measured(tasks, options.jobs), strict=True):
        rows += found
        num_simulated += number
        ratios = [row["over_best"] for row in found]
        shown = " ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        print(f"{task.workers} {task.workload} {task.ttft_s:g} s: {shown}", file=sys.stderr, flush=True)
    print_rows(rows)
    print(f"{num_simulated} requests simulated in {time.monotonic() - began:.0f} s")
    figures = summary(rows)
    print(figures)
    if options.png is not None:
        write_png(options.png, [row for row in rows if row["workload"] != DAY], " or ".join(options.automatic))
    if options.json is not None:
        write_json(options.json, report(rows, figures))
