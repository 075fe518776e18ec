"""The sections of a contact, by plan. Seconds are those of an H100 with kernels that were compiled before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TEST_FOLDER = "tests/gpu"


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of a contact: a module that is run with `--rows`, `--ceilings` and `--device`, or test files."""

    name: str
    phase: int
    priority: int = 0
    """Of its phase; the smallest is the first."""
    limit_s: float
    """It is ended then."""
    least_s: float
    """With less it is of no use."""
    program: str = ""
    arguments: tuple[str, ...] = ()
    """Behind those that every program has."""
    tests: tuple[str, ...] = ()
    """Paths from the repository."""
    choice: str = ""
    """Of these, what `pytest -k` chooses; empty for all."""
    workers: int = 1
    """Processes of tests, where pytest-xdist is. With 0 the tests run in pytest's own process, and torch is imported
    once: for those whose work on the device is in processes of their own."""
    needs: tuple[str, ...] = ()
    """Sections that must not have ended with an error; those that are not chosen are not needed."""
    alone: bool = False
    """Whether nothing else may use the device."""
    vital: bool = False
    """Whether nothing else is run where it ends with an error."""
    probes: bool = False
    """Whether it finds ops that are wrong."""
    rerun: bool = False
    """Whether it is run once more where it failed, with launches that wait."""
    reference: bool = False
    """Whether it is run once more by the reference where it failed and every op alone is right."""


OWN_TESTS = {
    "engine": ("engine",),
    "graphs": ("graphs",),
    "poisoned": ("poisoned",),
    "transports": ("transports",),
    "serving": ("serving",),
    "serving-nixl": ("serving",),
    "serving-nccl": ("serving",),
    "switches": ("switches",),
    "pairs": ("nccl",),
    "ranks": ("ranks",),
}
"""Section -> its test files; all others are tests of kernels."""
CHOICES = {"serving": "shm", "serving-nixl": "nixl", "serving-nccl": "nccl"}
"""A cluster for each transport, side by side."""


def plans() -> dict[str, tuple[Section, ...]]:
    """`first`: everything, what it decides first. `second`: once the first one was right, or was mended."""
    return {"first": _first(), "second": _second()}


LATER = ("switches", "compiled-peer")
"""What answers no question of the first contact."""
AGAIN = {"kernels": "draws", "pairs": "silent or killed", "ranks": "", "switches": ""}
"""Tests of the second plan, by what `pytest -k` chooses: what failed in the last contact or did not end, and what the
first plan leaves out."""


def _first() -> tuple[Section, ...]:
    return tuple(section for section in (*_begin(), *_tests(), *_figures()) if section.name not in LATER)


def _second() -> tuple[Section, ...]:
    """Fewer tests, and a model under load before most figures."""
    tests = [replace(section, choice=AGAIN[section.name]) for section in _tests() if section.name in AGAIN]
    limits, model, *figures = _figures()
    load = Section(
        name="load",
        phase=3,
        priority=model.priority,
        limit_s=140,
        least_s=60,
        program="benchmarks.gpu.serving",
        needs=("limits",),
        alone=True,
    )
    return (*_begin(), *tests, limits, model, load, *figures)


def _begin() -> tuple[Section, ...]:
    return (
        Section(
            name="preflight", phase=1, limit_s=30, least_s=3, program="benchmarks.gpu.preflight", alone=True, vital=True
        ),
        Section(
            name="probe",
            phase=1,
            priority=1,
            limit_s=45,
            least_s=10,
            program="benchmarks.gpu.probe",
            alone=True,
            probes=True,
        ),
    )


def _tests() -> tuple[Section, ...]:
    own = {name: tuple(f"{TEST_FOLDER}/test_{file}.py" for file in files) for name, files in OWN_TESTS.items()}
    taken = {path for paths in own.values() for path in paths}
    found = sorted(f"{TEST_FOLDER}/{path.name}" for path in (REPOSITORY / TEST_FOLDER).glob("test_*.py"))
    kernels = tuple(path for path in found if path not in taken)

    def section(name: str, priority: int, limit_s: float, least_s: float, workers: int, *, engine: bool) -> Section:
        return Section(
            name=name,
            phase=2,
            priority=priority,
            limit_s=limit_s,
            least_s=least_s,
            tests=kernels if name == "kernels" else own[name],
            choice=CHOICES.get(name, ""),
            workers=workers,
            rerun=True,
            reference=engine,
        )

    return (
        section("kernels", 0, 110, 20, 4, engine=False),
        section("engine", 1, 110, 20, 2, engine=True),
        section("serving", 2, 110, 30, 0, engine=True),
        section("graphs", 3, 90, 15, 2, engine=True),
        section("transports", 4, 100, 20, 0, engine=False),
        section("pairs", 5, 100, 20, 0, engine=False),
        section("ranks", 6, 60, 20, 0, engine=False),
        section("serving-nixl", 7, 110, 30, 0, engine=False),
        section("serving-nccl", 8, 110, 30, 0, engine=False),
        section("switches", 9, 110, 30, 2, engine=False),
        section("poisoned", 10, 60, 15, 0, engine=False),
    )


def _figures() -> tuple[Section, ...]:
    def section(
        name: str, priority: int, limit_s: float, least_s: float, program: str, *needs: str, left_out: str = ""
    ) -> Section:
        return Section(
            name=name,
            phase=3,
            priority=priority,
            limit_s=limit_s,
            least_s=least_s,
            program=f"benchmarks.gpu.{program}",
            arguments=("--not", left_out) if left_out else (),
            needs=needs,
            alone=True,
            rerun=True,
        )

    return (
        section("limits", 0, 20, 6, "timing"),
        section("model", 1, 75, 15, "model", "limits", left_out="transformers compiled"),
        section("attention", 2, 60, 12, "attention", "limits"),
        section("handover", 3, 45, 10, "handover", "limits"),
        section("sweep", 4, 45, 10, "sweep", "limits"),
        section("fp8", 5, 45, 15, "fp8", "limits"),
        section("traces", 6, 30, 10, "traces"),
        section("compiled-peer", 7, 80, 40, "compiled_peer", "limits"),
    )


def missing(sections: tuple[Section, ...]) -> dict[str, str]:
    """Section -> what it lacks here."""
    found = {}
    for section in sections:
        files = [f"{section.program.replace('.', '/')}.py"] if section.program else list(section.tests)
        lacking = [path for path in files if not (REPOSITORY / path).exists()]
        if lacking or not files:
            found[section.name] = f"not there: {', '.join(lacking) or 'tests'}"
    return found
