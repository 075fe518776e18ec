"""Command line and environment of a section's process. Pure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.contact.scheduler import Mode
from benchmarks.gpu.contact.sections import REPOSITORY, TEST_FOLDER, Section

SWITCH = "DISAGG_KERNELS"
PROBE_FILE = "probe.json"
"""Op -> whether it is right; beside the rows of the probe."""
SLOW_TEST_S = 40
"""A test that takes longer has the stacks of its threads in the log."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device and the folders with which sections run."""

    device: str
    """`cuda` or `cpu`."""
    folder: Path
    """Folder of rows and logs."""
    cores: int
    has_xdist: bool
    commit: str = "unknown"
    scratch: Path | None = None
    """Folder for large files of a section; in memory if there is enough."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What became of the tests of a section, by node id."""

    failed: Sequence[str] = ()
    ended: Sequence[str] = ()
    """Failed or not."""
    open: Sequence[str] = ()
    """Begun, and not ended."""


def label(section: Section, mode: Mode) -> str:
    """The name of a run's rows."""
    return section.name if mode in ("plain", "rest") else f"{section.name}, {mode}"


def command(section: Section, mode: Mode, place: Place, tests: History) -> list[str]:
    """What to run: after a failure the tests that failed, where they are known, or those that have not ended yet."""
    file = place.folder / file_name(section, mode)
    if section.program:
        arguments = [
            "--rows",
            f"{file}.rows",
            "--ceilings",
            str(place.folder / "ceilings.json"),
            "--device",
            place.device,
        ]
        found = [sys.executable, "-m", section.program, *arguments, *section.arguments]
    else:
        workers = min(section.workers, place.cores if place.device == "cuda" else 1)
        # A process of xdist that is lost is replaced by another one, which goes on.
        processes = ["-n", str(workers)] if workers and place.has_xdist and mode != "memcheck" else []
        options = ["-q", "-c", f"{TEST_FOLDER}/pytest.ini", "-o", f"faulthandler_timeout={SLOW_TEST_S}"]
        chosen = list(section.tests)
        if mode == "rest":
            processes += [f"--deselect={name}" for name in (*tests.ended, *tests.open)]
        elif mode != "plain" and (culprits := [*tests.failed, *tests.open]):
            chosen = [f"{TEST_FOLDER}/{name}" for name in culprits]
        choice = ["-k", section.choice] if section.choice else []
        found = [sys.executable, "-m", "pytest", *options, *choice, *processes, *chosen]
    return ["compute-sanitizer", "--tool", "memcheck", *found] if mode == "memcheck" else found


def file_name(section: Section, mode: Mode) -> str:
    """Name of the section's log and rows, without the suffix."""
    return section.name if mode == "plain" else f"{section.name}-{mode}"


def environment(
    section: Section, mode: Mode, without: Sequence[str], place: Place, given: Mapping[str, str]
) -> dict[str, str]:
    """`given` with our code on the path, and with what tests and benchmarks want to know."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), given.get("PYTHONPATH", "")]
    file = place.folder / file_name(section, mode)
    found = {name: value for name, value in given.items() if name != "TRITON_INTERPRET"}
    found |= {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "DISAGG_COMMIT": place.commit,
        "DISAGG_GPU_CHECK_DEVICE": place.device,
        "DISAGG_GPU_CHECK_SECTION": label(section, mode),
        "DISAGG_GPU_CHECK_LOGS": str(place.folder),
        "DISAGG_GPU_CHECK_ROWS": f"{file}.rows",
    }
    if place.scratch is not None:
        found["DISAGG_GPU_CHECK_SCRATCH"] = str(place.scratch)
    if mode == "reference":
        found[SWITCH] = "reference"
    elif without and given.get(SWITCH, "auto").startswith("auto"):
        found[SWITCH] = ",".join(["auto", *(f"-{name}" for name in without)])
    if mode == "blocking":
        found["CUDA_LAUNCH_BLOCKING"] = "1"
    return found | ({"TRITON_INTERPRET": "1"} if place.device == "cpu" else {})


def switched_off(given: Mapping[str, str]) -> tuple[str, ...]:
    """The ops that `DISAGG_KERNELS` leaves to the reference already."""
    mode, *names = given.get(SWITCH, "auto").split(",")
    return tuple(name.strip().removeprefix("-") for name in names) if mode == "auto" else ()
