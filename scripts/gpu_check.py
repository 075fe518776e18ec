"""Everything that needs a GPU, in one run of less than fifteen minutes: tests and benchmarks, a table, JSON and a page.

    python scripts/gpu_check.py --json build/gpu-check.json --report build/gpu-check.md

Needs Python, torch, Triton, transformers and pytest, but neither Ray nor a network nor an installed disagg. Each
section is a process of its own with a time limit: one that crashes, hangs or finds no memory is a row of the report,
and the others still run. `--device cpu` runs the same sections with tiny sizes, Triton's interpreter and gloo, to test
them.

Exit status: 0 all is as wanted, 1 a target was missed or something failed, 3 open, because there is no CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "src")]

from benchmarks.gpu.report import BAD, CheckReport, Row, as_json, as_markdown, as_table, failure, read_rows
from disagg.cluster.system import provenance

REPOSITORY = Path(__file__).resolve().parents[1]
NO_DEVICE = 3
TOTAL_S = 840.0
"""All sections together; what is left at the end goes to none."""
TEST_FOLDER = "tests/gpu"
OWN_TESTS = (
    "test_engine.py",
    "test_graphs.py",
    "test_nccl.py",
    "test_poisoned.py",
    "test_ranks.py",
    "test_serving.py",
    "test_transports.py",
)
"""Test files that are sections, or parts of one; all others are tests of kernels."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the check. `program` is a module that is run with `--rows`, `--ceilings` and `--device`, or a list of
    test files."""

    name: str
    limit_s: float
    program: str = ""
    tests: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a section's process ended."""

    status: int | None
    """None: it ran past its limit."""
    took_s: float
    last_line: str


def sections() -> tuple[Section, ...]:
    """In the order in which they run: what others need first, then what is wrong, then how fast it is."""
    found = sorted(path.name for path in (REPOSITORY / TEST_FOLDER).glob("test_*.py"))
    kernel_tests = tuple(f"{TEST_FOLDER}/{name}" for name in found if name not in OWN_TESTS)
    return (
        Section(name="environment", limit_s=90, program="benchmarks.gpu.environment"),
        Section(name="limits", limit_s=40, program="benchmarks.gpu.timing"),
        Section(name="kernels", limit_s=130, tests=kernel_tests),
        Section(name="engine", limit_s=110, tests=_tests("engine", "graphs", "poisoned")),
        Section(name="nccl", limit_s=120, tests=_tests("nccl", "ranks")),
        Section(name="transports", limit_s=60, tests=_tests("transports")),
        Section(name="serving", limit_s=110, tests=_tests("serving")),
        Section(name="model", limit_s=90, program="benchmarks.gpu.model"),
        Section(name="attention", limit_s=110, program="benchmarks.gpu.attention"),
        Section(name="transfer", limit_s=40, program="benchmarks.gpu.transfer"),
        Section(name="traces", limit_s=40, program="benchmarks.gpu.traces"),
    )


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"{TEST_FOLDER}/test_{name}.py" for name in names)


# ---------------------------------------------------------------- one section


def command(section: Section, device: str, folder: Path) -> list[str]:
    """What to run."""
    if section.program:
        rows, ceilings = folder / f"{section.name}.rows", folder / "ceilings.json"
        arguments = ["--rows", str(rows), "--ceilings", str(ceilings), "--device", device]
        return [sys.executable, "-m", section.program, *arguments]
    parallel = section.name == "kernels" and device == "cuda" and importlib.util.find_spec("xdist") is not None
    options = ["-n", "6"] if parallel else []  # most of their time goes into compiling kernels
    return [sys.executable, "-m", "pytest", "-q", "-c", f"{TEST_FOLDER}/pytest.ini", *options, *section.tests]


def environment(section: Section, device: str, folder: Path) -> dict[str, str]:
    """Of the section's process: ours, with the code on the path."""
    given = dict(os.environ)
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), given.get("PYTHONPATH", "")]
    given.pop("TRITON_INTERPRET", None)
    given |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "DISAGG_GPU_CHECK_DEVICE": device,
        "DISAGG_GPU_CHECK_SECTION": section.name,
        "DISAGG_GPU_CHECK_LOGS": str(folder),
        "DISAGG_GPU_CHECK_ROWS": str(folder / f"{section.name}.rows"),
    }
    return given | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})


def run_process(arguments: Sequence[str], environ: Mapping[str, str], log: Path, limit_s: float) -> Outcome:
    """Run a process and all that it starts for at most `limit_s`; its output goes to `log`."""
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            arguments,
            cwd=REPOSITORY,
            env=dict(environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill_session(child)
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(status=status, took_s=time.monotonic() - began, last_line=lines[-1] if lines else "no output")


def _kill_session(child: subprocess.Popen[bytes]) -> None:
    """End what is left of it, children included: a process that keeps the GPU would spoil the figures that follow."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def check_section(section: Section, device: str, folder: Path, limit_s: float) -> tuple[list[Row], Outcome | None]:
    """Run it; its rows, and one more where it did not end as it should."""
    if limit_s <= 0:
        return [failure(section.name, "run", "no time was left")], None
    missing = [test for test in section.tests if not (REPOSITORY / test).exists()]
    if missing or not (section.program or section.tests):
        detail = f"no such tests: {', '.join(missing)}" if missing else "there are no tests"
        return [failure(section.name, "run", detail)], None
    log = folder / f"{section.name}.log"
    outcome = run_process(command(section, device, folder), environment(section, device, folder), log, limit_s)
    rows = read_rows(folder / f"{section.name}.rows")
    return rows + ending(section, rows, outcome, limit_s), outcome


def ending(section: Section, rows: Sequence[Row], outcome: Outcome, limit_s: float) -> list[Row]:
    """What to report about its end, unless its rows have it."""
    if outcome.status is None:
        return [failure(section.name, "run", f"stopped after {limit_s:.0f} s; last line: {outcome.last_line}")]
    is_told = any(row.status in (*BAD, "open") for row in rows)
    if outcome.status != 0 and not is_told:
        return [failure(section.name, "run", f"exit status {outcome.status}; last line: {outcome.last_line}")]
    if not rows:
        return [failure(section.name, "run", f"it found nothing; last line: {outcome.last_line}")]
    return []


# ---------------------------------------------------------------- all


def check(chosen: Sequence[Section], device: str, folder: Path, total_s: float) -> list[Row]:
    """All sections within `total_s`; only the first one where that finds no device."""
    ends_at = time.monotonic() + total_s
    rows: list[Row] = []
    for section in chosen:
        limit_s = min(section.limit_s, ends_at - time.monotonic())
        found, outcome = check_section(section, device, folder, limit_s)
        rows += found
        seconds = f"{outcome.took_s:.0f} s" if outcome else "not run"
        print(
            f"{section.name}: {len(found)} findings, {sum(row.status in BAD for row in found)} bad, {seconds}",
            flush=True,
        )
        if section.name == "environment" and outcome is not None and outcome.status == NO_DEVICE:
            break
    return rows


def exit_status(rows: Sequence[Row]) -> int:
    """0 if all is well, 1 after a failure, `NO_DEVICE` without a GPU."""
    if any(row.status == "open" and row.name == "device" for row in rows):
        return NO_DEVICE
    return 1 if any(row.status in BAD for row in rows) else 0


def make_report(rows: list[Row], arguments: Sequence[str]) -> CheckReport:
    """The rows with where they come from."""
    machine = {row.name: row.detail for row in rows if row.section == "environment" and row.status == "info"}
    return CheckReport(
        machine=machine,
        commit=provenance.commit(),
        command=shlex.join(["python", "scripts/gpu_check.py", *arguments]),
        rows=[row for row in rows if not (row.section == "environment" and row.status in ("info", "ok"))],
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    names = [section.name for section in sections()]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to test the check")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="time for all sections together")
    parser.add_argument("--json", type=Path, help="write the findings")
    parser.add_argument("--report", type=Path, help="write a page in Markdown")
    parser.add_argument("--logs", type=Path, default=Path("build/gpu-check"), help="folder for the sections' output")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run the check; the exit status."""
    options = parse(arguments)
    folder: Path = options.logs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.rows"), folder / "ceilings.json"):
        old.unlink(missing_ok=True)
    chosen = [section for section in sections() if section.name in options.only]
    report = make_report(check(chosen, options.device, folder, options.total_s), arguments)
    for path, text in ((options.json, as_json(report)), (options.report, as_markdown(report))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(as_table(report.rows))
    status = exit_status(report.rows)
    print({0: "all as wanted", 1: "missed or failed", NO_DEVICE: "open: no CUDA device"}[status])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
