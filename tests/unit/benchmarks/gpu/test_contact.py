"""The pure parts of a contact with a GPU beside its schedule: commands, environments, plans, and what is printed."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.contact import commands
from benchmarks.gpu.contact.commands import History, Place
from benchmarks.gpu.contact.runner import parse
from benchmarks.gpu.contact.scheduler import WRITING_S
from benchmarks.gpu.contact.sections import REPOSITORY, TEST_FOLDER, Section, missing, plans
from benchmarks.gpu.contact.summary import MOST_CHARACTERS, summary
from benchmarks.gpu.report import Row, failure

PLACE = Place(device="cuda", folder=Path("/logs"), cores=16, has_xdist=True, commit="abc")
MODEL = Section(name="model", phase=3, limit_s=9.0, least_s=1.0, program="benchmarks.gpu.model", arguments=("--small",))
KERNELS = Section(
    name="kernels", phase=2, limit_s=9.0, least_s=1.0, tests=("tests/gpu/test_a.py", "tests/gpu/test_b.py"), workers=8
)
PYTEST = [sys.executable, "-m", "pytest", "-q", "-c", "tests/gpu/pytest.ini", "-o", "faulthandler_timeout=40"]


# ---------------------------------------------------------------- what is run


def test_a_program_gets_its_files_and_its_device() -> None:
    files = ["--rows", "/logs/model.rows", "--ceilings", "/logs/ceilings.json"]
    program = [sys.executable, "-m", "benchmarks.gpu.model", *files, "--device", "cuda", "--small"]
    assert commands.command(MODEL, "plain", PLACE, History()) == program
    blocking = commands.command(MODEL, "blocking", PLACE, History())
    assert blocking[3:5] == ["--rows", "/logs/model-blocking.rows"]


def test_tests_run_in_processes_that_can_be_replaced() -> None:
    plain = commands.command(KERNELS, "plain", PLACE, History())
    assert plain == [*PYTEST, "-n", "8", *KERNELS.tests]
    on_cpu = dataclasses.replace(PLACE, device="cpu")
    assert commands.command(KERNELS, "plain", on_cpu, History()) == [*PYTEST, "-n", "1", *KERNELS.tests]
    few = dataclasses.replace(PLACE, cores=4)
    assert commands.command(KERNELS, "plain", few, History()) == [*PYTEST, "-n", "4", *KERNELS.tests]
    alone = dataclasses.replace(PLACE, has_xdist=False)
    assert commands.command(KERNELS, "plain", alone, History()) == [*PYTEST, *KERNELS.tests]
    none = dataclasses.replace(KERNELS, workers=0)
    for place in (PLACE, on_cpu):
        assert commands.command(none, "plain", place, History()) == [*PYTEST, *KERNELS.tests]


def test_a_failure_is_looked_at_with_the_tests_that_failed() -> None:
    tests = History(failed=["test_a.py::x[1]"], ended=["test_a.py::w", "test_a.py::x[1]"], open=["test_b.py::y"])
    chosen = ["tests/gpu/test_a.py::x[1]", "tests/gpu/test_b.py::y"]
    assert commands.command(KERNELS, "blocking", PLACE, tests) == [*PYTEST, "-n", "8", *chosen]
    memcheck = ["compute-sanitizer", "--tool", "memcheck", *PYTEST, *chosen]
    assert commands.command(KERNELS, "memcheck", PLACE, tests) == memcheck
    unknown = commands.command(KERNELS, "blocking", PLACE, History())
    assert unknown == [*PYTEST, "-n", "8", *KERNELS.tests]


def test_the_rest_is_what_has_not_ended() -> None:
    alone = dataclasses.replace(PLACE, has_xdist=False)
    rest = commands.command(
        KERNELS, "rest", alone, History(failed=["test_a.py::a"], ended=["test_a.py::a"], open=["test_a.py::b"])
    )
    assert rest == [*PYTEST, "--deselect=test_a.py::a", "--deselect=test_a.py::b", *KERNELS.tests]


def test_a_section_s_environment() -> None:
    given = {"PATH": "/bin", "PYTHONPATH": "/site", "TRITON_INTERPRET": "1"}
    found = commands.environment(KERNELS, "plain", (), PLACE, given)
    assert found == {
        "PATH": "/bin",
        "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}:/site",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "DISAGG_COMMIT": "abc",
        "DISAGG_GPU_CHECK_DEVICE": "cuda",
        "DISAGG_GPU_CHECK_SECTION": "kernels",
        "DISAGG_GPU_CHECK_LOGS": "/logs",
        "DISAGG_GPU_CHECK_ROWS": "/logs/kernels.rows",
    }
    on_cpu = commands.environment(KERNELS, "plain", (), dataclasses.replace(PLACE, device="cpu"), given)
    assert on_cpu["TRITON_INTERPRET"] == "1"
    large = dataclasses.replace(PLACE, scratch=Path("/memory"))
    assert commands.environment(KERNELS, "plain", (), large, {})["DISAGG_GPU_CHECK_SCRATCH"] == "/memory"


def test_switches_and_reruns_are_variables() -> None:
    off = commands.environment(KERNELS, "plain", ("draw_rows", "silu_mul"), PLACE, {})
    assert off["DISAGG_KERNELS"] == "auto,-draw_rows,-silu_mul"
    assert commands.environment(KERNELS, "reference", ("draw_rows",), PLACE, {})["DISAGG_KERNELS"] == "reference"
    given = commands.environment(KERNELS, "plain", ("draw_rows",), PLACE, {"DISAGG_KERNELS": "reference"})
    assert given["DISAGG_KERNELS"] == "reference"
    blocking = commands.environment(KERNELS, "blocking", (), PLACE, {})
    assert (blocking["CUDA_LAUNCH_BLOCKING"], blocking["DISAGG_GPU_CHECK_SECTION"]) == ("1", "kernels, blocking")
    assert "DISAGG_KERNELS" not in blocking


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ()),
        ({"DISAGG_KERNELS": "auto,-embed,-silu_mul"}, ("embed", "silu_mul")),
        ({"DISAGG_KERNELS": "reference"}, ()),
    ],
)
def test_ops_that_are_off_already_are_known(given: dict[str, str], found: tuple[str, ...]) -> None:
    assert commands.switched_off(given) == found


# ---------------------------------------------------------------- plans


def test_every_test_of_the_folder_is_in_the_first_plan_once() -> None:
    """But for those of which each section chooses some, and the switches, which are in the second one."""
    switches = [section for section in plans()["second"] if section.name == "switches"]
    taken = [path for section in (*plans()["first"], *switches) if not section.choice for path in section.tests]
    assert len(set(taken)) == len(taken)
    chosen = {(path, section.choice) for section in plans()["first"] if section.choice for path in section.tests}
    assert chosen == {(f"{TEST_FOLDER}/test_serving.py", transport) for transport in ("shm", "nixl", "nccl")}
    assert sorted({*taken, *(path for path, _ in chosen)}) == sorted(
        f"{TEST_FOLDER}/{path.name}" for path in (REPOSITORY / TEST_FOLDER).glob("test_*.py")
    )


@pytest.mark.parametrize("plan", ["first", "second"])
def test_names_are_unique_needs_exist_and_the_least_fits(plan: str) -> None:
    sections = plans()[plan]
    names = [section.name for section in sections]
    assert len(set(names)) == len(names)
    assert all(need in names for section in sections for need in section.needs)
    assert all(0 < section.least_s <= section.limit_s for section in sections)
    phases = [sum(section.least_s for section in sections if section.phase == phase) for phase in (1, 3)]
    tests_s = max(section.limit_s for section in sections if section.phase == 2)
    assert sum(phases) + tests_s < 320.0 - WRITING_S


def test_what_a_section_lacks_is_named() -> None:
    here = dataclasses.replace(MODEL, name="here")
    gone = dataclasses.replace(MODEL, name="gone", program="benchmarks.gpu.gone")
    assert missing((here, gone, dataclasses.replace(KERNELS, tests=()))) == {
        "gone": "not there: benchmarks/gpu/gone.py",
        "kernels": "not there: tests",
    }


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--budget", "15"], "--budget: must be more than 15 s, not 15"),
        (["--plan", "second", "--only", "graphs"], "--only: not in the plan second: graphs"),
        (["--only", "none"], "invalid choice: 'none'"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([*arguments, "--out", "out"], "", 320.0, None)
    assert error in capsys.readouterr().err


# ---------------------------------------------------------------- what is printed


def figure(number: int, **changes: object) -> Row:
    fields = {"section": "model", "name": f"decode step, batch {number}", "status": "ok", "value": 5.25, "unit": "ms"}
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def test_failures_come_first_and_figures_last() -> None:
    rows = [
        figure(1, share=0.95, target=0.8),
        figure(8, share=0.7, target=0.8, status="miss", without="silu_mul"),
        Row(section="kernels", name="test_a.py::test_x", status="ok", value=3.0, unit="s"),
        Row(section="preflight", name="device", status="info", detail="H100"),
        failure("kernels", "test_a.py::test_y", "it is wrong"),
        Row(section="pairs", name="time", status="open", detail="ended after 9 s"),
        Row(section="ranks, blocking", name="run", status="open", detail="not begun"),
    ]
    assert summary(rows, ["kernels: 2 rows"], "missed or failed").splitlines() == [
        "failed:",
        "  kernels: test_a.py::test_y: it is wrong",
        "  pairs: time: ended after 9 s",
        "sections:",
        "  kernels: 2 rows",
        "figures:",
        "  model: decode step, batch 1: 5.25 ms (0.95 of 0.80)",
        "  model: decode step, batch 8: 5.25 ms (0.70 of 0.80) MISS without silu_mul",
        "missed or failed",
    ]


@pytest.mark.parametrize(("num_failures", "num_figures"), [(0, 0), (3, 400), (400, 3), (400, 400)])
def test_all_of_it_fits_and_what_does_not_is_counted(num_failures: int, num_figures: int) -> None:
    failures = [failure("kernels", f"test_a.py::test_{number}", "x" * 500) for number in range(num_failures)]
    figures = [figure(number, name=f"{number} {'y' * 100}") for number in range(num_figures)]
    text = summary([*figures, *failures], ["section"] * 30, "missed or failed")
    assert len(text) <= MOST_CHARACTERS
    lines = text.splitlines()
    assert lines[-1] == "missed or failed"
    shown = [sum(line.startswith(f"  {name}: ") for line in lines) for name in ("kernels", "model")]
    left_out = [int(line.split()[1]) for line in lines if line.endswith(" more in rows.jsonl")]
    assert sum(shown) + sum(left_out) == num_failures + num_figures
    assert min(shown[0], 20) == min(num_failures, 20)
    assert min(shown[1], 20) == min(num_figures, 20)
