"""What every benchmark shares: where it ran, how a percentile is defined, one table, one JSON form.

A report is `{machine, commit, command, rows, summary}`: `rows` has every measurement, `summary` is a flat object of
named figures.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]


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
    """One run of one benchmark, in the form that all of them share."""

    machine: Machine
    commit: str
    command: str
    rows: list[dict[str, Any]]
    summary: dict[str, float]


def report(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, float]) -> Report:
    """A report of this machine, commit and command line."""
    return Report(
        machine=machine(), commit=commit(), command=command(), rows=[dict(row) for row in rows], summary=dict(summary)
    )


def write_json(path: Path, content: Report) -> None:
    """Write a report. NaN, which JSON does not know, is an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(content), indent=2, allow_nan=False) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- numbers


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile by linear interpolation between the two closest ranks (Hyndman and Fan's type 7).

    With the values sorted as x[0] .. x[n-1] and h = (n - 1) * percent / 100, it is x[floor(h)] plus the fraction of h
    times the step to the next value. p0 is the least value, p100 the largest.

    Raises:
        ValueError: without values, or with `percent` outside [0, 100].
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], not {percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def percentiles(values: Sequence[float], percents: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """`{"p50": ..., "p90": ..., "p99": ...}`."""
    return {f"p{percent}": percentile(values, percent) for percent in percents}


# ---------------------------------------------------------------- where and what


def machine() -> Machine:
    """This machine and the versions that matter for speed."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        grpcio=_version("grpcio"),
        ray=_version("ray"),
    )


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The commit that was measured, with `-dirty` when the files differ from it; `unknown` outside a git checkout."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()


def command(argv: Sequence[str] | None = None) -> str:
    """The command line, with paths relative to the repository so that a report reads the same everywhere."""
    script, *arguments = sys.argv if argv is None else argv
    path = Path(script).resolve()
    name = path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else path.name
    return shlex.join(["python", name, *arguments])


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
