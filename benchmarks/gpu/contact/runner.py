"""The shell of a contact: processes, clock, signals and files around `Schedule`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.contact import commands
from benchmarks.gpu.contact.children import Child
from benchmarks.gpu.contact.commands import History, Place, label
from benchmarks.gpu.contact.output import Output
from benchmarks.gpu.contact.scheduler import (
    WRITING_S,
    Command,
    Cut,
    Ended,
    Event,
    Kill,
    Mode,
    Schedule,
    Skip,
    Start,
    Stop,
    Tick,
    Write,
)
from benchmarks.gpu.contact.sections import REPOSITORY, Section, missing, plans
from benchmarks.gpu.contact.summary import MOST_CHARACTERS, summary
from benchmarks.gpu.report import BAD, OUT_OF_TIME, CheckReport, Row, failure, parse_rows

NO_DEVICE = 3
POLL_S = 0.05
BUDGET_S = 320.0
PREFLIGHT = "preflight"
MOST_AT_ONCE = 4
"""Sections of tests that run at the same time. Processes that import torch and begin to use a device hold each other
up: with thirty of them the first test of each took 25 s."""


@dataclass(kw_only=True)
class Run:
    """One run of a section."""

    start: Start
    child: Child
    began: float
    rows_file: Path
    log: Path
    read_bytes: int = 0
    rows: list[Row] = field(default_factory=list)


class Contact:
    """Runs sections until the budget is used up. Owner: the main thread."""

    def __init__(
        self, sections: Sequence[Section], place: Place, out: Path, budget_s: float, command: Sequence[str]
    ) -> None:
        """Empties `out` of the files of an earlier contact."""
        kernels = os.environ.get("TRITON_CACHE_DIR")
        self._place, self._command = place, command
        self._output = Output(out, place.folder, Path(kernels) if kernels else None)
        self._schedule = Schedule(
            sections,
            now=time.monotonic(),
            budget_s=budget_s,
            at_once=min(max(1, place.cores), MOST_AT_ONCE),
            missing=missing(tuple(sections)),
            has_memcheck=place.device == "cuda" and shutil.which("compute-sanitizer") is not None,
        )
        self._given_off = commands.switched_off(os.environ)
        self._runs: dict[str, Run] = {}
        self._rows: list[Row] = []
        self._lines: list[str] = []
        self._num_printed = 0
        self._is_cut = False

    def run(self) -> int:
        """All of it; the exit status."""
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # by nohup
            numbers.remove(signal.SIGHUP)
        before = {number: signal.signal(number, self._cut) for number in numbers}
        try:
            self._write()
            return self._carry_on()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _carry_on(self) -> int:
        events: list[Event] = [Tick()]
        while True:
            for event in events:
                for command in self._schedule.handle(event, time.monotonic()):
                    if isinstance(command, Stop):
                        return self._end()
                    self._carry_out(command)
            time.sleep(POLL_S)
            events = self._events()

    def _cut(self, *_: Any) -> None:
        self._is_cut = True

    def _events(self) -> list[Event]:
        for run in self._runs.values():
            self._collect(run)
        ended = [name for name, run in self._runs.items() if run.child.has_ended()]
        found: list[Event] = [self._ended(name) for name in ended]
        return [*found, Cut() if self._is_cut else Tick()]

    # ---------------------------------------------------------------- commands

    def _carry_out(self, command: Command) -> None:
        match command:
            case Start():
                self._runs[command.section.name] = self._start(command)
            case Kill(name):
                if name in self._runs:  # else it has just ended, and the next event says so
                    self._runs[name].child.kill()
            case Skip(section, mode, reason, is_missing):
                bad = failure(label(section, mode), "run", reason)
                is_info = is_missing or mode != "plain"
                self._add([replace(bad, status="open") if is_info else bad])
                self._say(f"{label(section, mode)}: {reason}")
            case Write():
                self._write()

    def _start(self, start: Start) -> Run:
        section, mode = start.section, start.mode
        file = self._place.folder / commands.file_name(section, mode)
        off = tuple(dict.fromkeys((*self._given_off, *start.without)))
        arguments = commands.command(section, mode, self._place, self._tests(section))
        environ = commands.environment(section, mode, off, self._place, os.environ)
        rows_file, log = Path(f"{file}.rows"), Path(f"{file}.log")
        log.write_text(f"{shlex.join(arguments)}\n", encoding="utf-8")
        size = rows_file.stat().st_size if rows_file.exists() else 0
        child = Child(arguments, environ, REPOSITORY, log)
        return Run(start=start, child=child, began=time.monotonic(), rows_file=rows_file, log=log, read_bytes=size)

    def _tests(self, section: Section) -> History:
        """Of the run before."""
        of_it = [row for row in self._rows if row.section == section.name and row.is_test]
        files = [self._place.folder / f"{section.name}{end}.begun" for end in ("", "-rest")]
        names = [name for file in files if file.exists() for name in file.read_text(encoding="utf-8").splitlines()]
        ended = {row.name for row in of_it}
        open_names = [name for name in names if name not in ended]
        failed = [row.name for row in of_it if row.status == "failed"]
        return History(failed=failed, ended=[row.name for row in of_it], open=open_names)

    # ---------------------------------------------------------------- rows

    def _collect(self, run: Run) -> None:
        """Take the rows that a section has written since the last time."""
        if not run.rows_file.exists() or run.rows_file.stat().st_size <= run.read_bytes:
            return
        with run.rows_file.open("rb") as file:
            file.seek(run.read_bytes)
            whole = file.read().rpartition(b"\n")[0]
        run.read_bytes += len(whole) + 1 if whole else 0
        self._add_to(run, parse_rows(whole.decode("utf-8", "replace")))

    def _add_to(self, run: Run, rows: Sequence[Row]) -> None:
        off = ", ".join(dict.fromkeys((*self._given_off, *run.start.without)))
        name = label(run.start.section, run.start.mode)
        marked = [replace(row, section=name, without=off) for row in rows]
        run.rows += marked
        self._add(marked)

    def _add(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        self._output.add(rows)

    def _ended(self, name: str) -> Ended:
        run = self._runs.pop(name)
        self._collect(run)
        status, took_s = run.child.status, time.monotonic() - run.began
        section, mode = run.start.section, run.start.mode
        if not self._is_cut:
            end = End(
                name=section.name,
                mode=mode,
                status=status,
                took_s=took_s,
                rows=run.rows,
                open_tests=self._tests(section).open if mode in ("plain", "rest") else (),
                log=run.log,
            )
            self._add_to(run, ending(end))
        num_bad = sum(row.status == "failed" for row in run.rows)
        num_ok = sum(row.status == "ok" for row in run.rows)
        title = label(section, mode)
        self._say(f"{title}: {len(run.rows)} rows, {num_ok} ok, {num_bad} failed, {took_s:.0f} s")
        return Ended(name, status, num_bad > 0, wrong_ops(self._place.folder) if section.probes else ())

    # ---------------------------------------------------------------- output

    def _say(self, line: str) -> None:
        line = line[:100]
        self._lines.append(line)
        self._num_printed += len(line) + 1
        self._print(line)

    def _print(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it; the files are what counts
            print(text, flush=True)

    def _write(self) -> None:
        self._output.write(self._report(), self._summary("it goes on", MOST_CHARACTERS))

    def _report(self) -> CheckReport:
        machine = {row.name: row.detail for row in self._rows if row.section == PREFLIGHT and row.status == "info"}
        told = [row for row in self._rows if not (row.section == PREFLIGHT and row.status in ("info", "ok"))]
        return CheckReport(
            machine=machine, commit=self._place.commit, command=shlex.join(["python", *self._command]), rows=told
        )

    def _summary(self, verdict: str, limit: int) -> str:
        return summary(self._rows, self._lines, verdict, limit)

    def _end(self) -> int:
        if self._is_cut:
            self._add([failure("contact", "run", "ended by a signal")])
        status = exit_status(self._rows)
        verdict = {0: "all as wanted", 1: "missed or failed", NO_DEVICE: "open: no CUDA device"}[status]
        self._output.write(self._report(), self._summary(verdict, MOST_CHARACTERS))
        self._print(summary(self._rows, [], verdict, MOST_CHARACTERS - self._num_printed - 1))
        return status


# ---------------------------------------------------------------- what is found


@dataclass(frozen=True, kw_only=True)
class End:
    """How a run of a section ended."""

    name: str
    mode: Mode
    status: int | None
    """None: it was ended."""
    took_s: float
    rows: Sequence[Row]
    open_tests: Sequence[str]
    """Tests that had begun and not ended."""
    log: Path


def ending(end: End) -> list[Row]:
    """What to report about a section's end, unless its rows have it."""
    found = memcheck_rows(end.name, end.log) if end.mode == "memcheck" else []
    last = f"last line: {last_line(end.log)}"
    if end.status is None:
        during = f"; not ended: {', '.join(end.open_tests[:3])}" if end.open_tests else ""
        told = failure(end.name, OUT_OF_TIME, f"ended after {end.took_s:.0f} s{during}; {last}")
        has_failed = any(row.status == "failed" for row in (*end.rows, *found))
        return [*found, told if has_failed else replace(told, status="open")]
    if end.status != 0 and not any(row.status in (*BAD, "open") for row in end.rows):
        return [*found, failure(end.name, "run", f"exit status {end.status}; {last}")]
    if not end.rows:
        return [*found, failure(end.name, "run", f"it found nothing; {last}")]
    return found


def memcheck_rows(name: str, log: Path) -> list[Row]:
    """What compute-sanitizer saw first."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.lstrip("= ").strip() for line in lines if line.startswith("=========")]
    seen = [line for line in told if line and not line.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY: 0"))]
    return [failure(name, "compute-sanitizer", "; ".join(seen[:6]))] if seen else []


def last_line(log: Path) -> str:
    """The last line of a section's output that is not its command."""
    lines = [
        line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[1:] if line.strip()
    ]
    return lines[-1] if lines else "no output"


def wrong_ops(folder: Path) -> tuple[str, ...]:
    """The ops that the probe found wrong, as far as it came."""
    path = folder / commands.PROBE_FILE
    if not path.exists():
        return ()
    return tuple(op for op, is_right in json.loads(path.read_text(encoding="utf-8")).items() if not is_right)


def exit_status(rows: Sequence[Row]) -> int:
    """0 if all is well, 1 after a failure, `NO_DEVICE` without a GPU."""
    if any(row.status == "open" and row.name == "device" for row in rows):
        return NO_DEVICE
    return 1 if any(row.status in BAD or row.name == OUT_OF_TIME for row in rows) else 0


# ---------------------------------------------------------------- the command


def parse(arguments: Sequence[str], description: str, budget_s: float | None, out: str | None) -> argparse.Namespace:
    """The command line; `budget_s` and `out` are defaults, None where the option has to be given."""
    chosen = plans()
    names = list(dict.fromkeys(section.name for sections in chosen.values() for section in sections))
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--budget", type=float, default=budget_s, required=budget_s is None, help="seconds for all of it"
    )
    parser.add_argument("--out", type=Path, default=out, required=out is None, help="folder for at most seven files")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to test the program"
    )
    parser.add_argument("--plan", choices=tuple(chosen), default="first", help="second: once the first has been read")
    parser.add_argument("--only", nargs="+", choices=names, metavar="SECTION", help=f"of the plan: {', '.join(names)}")
    found = parser.parse_args(arguments)
    if found.budget <= WRITING_S:
        parser.error(f"--budget: must be more than {WRITING_S:.0f} s, not {found.budget:g}")
    of_plan = {section.name for section in chosen[found.plan]}
    if others := [name for name in found.only or () if name not in of_plan]:
        parser.error(f"--only: not in the plan {found.plan}: {', '.join(others)}")
    return found


def commit() -> str:
    """Of the source; `unknown` where its package cannot be imported."""
    try:
        from disagg.cluster.system import provenance
    except Exception:
        return "unknown"
    return provenance.commit()


def main(
    arguments: Sequence[str] | None = None,
    *,
    program: Sequence[str] = ("-m", "benchmarks.gpu.contact"),
    budget_s: float | None = BUDGET_S,
    out: str | None = None,
) -> int:
    """Make contact with a GPU: tests and figures, within a time, in at most seven files."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given, main.__doc__ or "", budget_s, out)
    chosen = [section for section in plans()[options.plan] if options.only is None or section.name in options.only]
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="contact-") as folder,
        tempfile.TemporaryDirectory(prefix="contact-", dir=shared) as scratch,
    ):
        place = Place(
            device=options.device,
            folder=Path(folder),
            cores=len(os.sched_getaffinity(0)),
            has_xdist=importlib.util.find_spec("xdist") is not None,
            commit=commit(),
            scratch=Path(scratch),
        )
        return Contact(chosen, place, options.out.resolve(), options.budget, [*program, *given]).run()
