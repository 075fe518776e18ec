"""What every program that measures shares: where it ran, percentiles, one table, one JSON form.

A report is `{machine, commit, command, rows, summary}`: `rows` has every measurement, `summary` is a flat object of
named figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from disagg.cluster.system import provenance
from disagg.loadtests.verdict.goodput import quantile

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where figures were taken."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    system: str
    python: str
    torch: str
    grpcio: str
    ray: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of one program, in the form that all of them share."""

    machine: Machine
    commit: str
    command: str
    rows: list[dict[str, Any]]
    summary: dict[str, float | None]
    """Figures by name; None for one that was not measured."""


def report(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float | None]) -> Report:
    """A report of this machine, commit and command line."""
    return Report(
        machine=machine(),
        commit=provenance.commit(),
        command=command(),
        rows=[dict(row) for row in rows],
        summary=dict(summary),
    )


def write_json(path: Path, content: Report) -> None:
    """Write a report. NaN, which JSON does not have, is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def in_one_go(work: Generator[None, None, T]) -> T:
    """What work that yields between its pieces comes to, with nothing in between."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


# ---------------------------------------------------------------- numbers


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of values in any order, as `loadtests.goodput` defines it. p0 is the least value,
    p100 the largest.

    Raises:
        ValueError: without values, or with `percent` outside [0, 100].
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], not {percent}")
    return quantile(sorted(values), percent)


def percentiles(values: Sequence[float], percents: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """`{"p50": ..., "p90": ..., "p99": ...}`."""
    return {f"p{percent}": percentile(values, percent) for percent in percents}


# ---------------------------------------------------------------- where and what


def machine() -> Machine:
    """This machine and the versions that matter for speed."""
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **provenance.machine("torch", "grpcio", "ray"),
    )


def command(argv: Sequence[str] | None = None) -> str:
    """The command line without the path of the repository, so that a report reads the same everywhere: `python -m`
    puts the path of the module first, and here it is the module's name."""
    script, *arguments = sys.argv if argv is None else argv
    path = Path(script).resolve()
    if not any(path.is_relative_to(REPOSITORY / folder) for folder in ("benchmarks", "tests")):
        return shlex.join(["python", path.name, *arguments])
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return shlex.join(["python", "-m", ".".join(part for part in parts if part != "__main__"), *arguments])


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


# ---------------------------------------------------------------- table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """One table, never cut off; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)
