"""A device whose context is lost, played: tests and measurements that follow go on in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.isolation import CONTEXT_LOST
from benchmarks.gpu.report import Row, read_rows

REPOSITORY = Path(__file__).resolve().parents[3]

CONFTEST = """
import builtins
from tests.gpu.conftest import register

def synchronize():
    if getattr(builtins, "context_is_lost", False):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

def pytest_configure(config):
    register(config, synchronize)
"""

TESTS = """
import builtins
import pytest

@pytest.mark.parametrize("number", range(9))
def test_each(number):
    assert not getattr(builtins, "context_is_lost", False)
    assert number != 2
    if number == 6:
        pytest.skip("needs two devices")
    if number == 4:
        builtins.context_is_lost = True
        raise ValueError("launch failed")
"""

BENCHMARK = """
import os
from benchmarks.gpu.timing import attempt, parse, row_file

class AcceleratorError(RuntimeError):
    pass

AcceleratorError.__module__ = "torch"
arguments = parse("played")
rows, is_lost = row_file(arguments, "played"), []

def measure(number):
    if is_lost or number == 2:
        is_lost.append(number)
        raise AcceleratorError(f"CUDA error in {number}")
    if number == 1:
        raise ValueError("a wrong argument")
    rows.add(f"figure {number}", float(os.getpid()), "")

for number in range(6):
    attempt(rows, f"figure {number}", lambda: measure(number))
"""


def run(arguments: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}", **changes}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def outcome(folder: Path, *options: str) -> tuple[int, dict[str, Row], list[Row]]:
    """Exit status, rows of tests by their number, and the other rows."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_played.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib -p no:cacheprovider\n")
    rows = folder / "played.rows"
    done = run(
        ["-m", "pytest", "-q", "-c", "pytest.ini", *options],
        folder,
        DISAGG_GPU_CHECK_ROWS=str(rows),
        DISAGG_GPU_CHECK_SECTION="played",
    )
    found = read_rows(rows)
    tests = {row.name.partition("[")[2].rstrip("]"): row for row in found if row.is_test}
    return done.returncode, tests, [row for row in found if not row.is_test]


@pytest.mark.slow
def test_tests_behind_one_that_loses_the_context_pass_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    status, tests, others = outcome(tmp_path, "-n", "1")
    assert status == 1
    assert {number: row.status for number, row in tests.items()} == {
        **dict.fromkeys(map(str, range(9)), "ok"),
        "2": "failed",
        "4": "failed",
        "6": "info",
    }
    assert tests["6"].detail == "Skipped: needs two devices"
    assert [row.unit for row in tests.values()] == ["s"] * 9
    assert [(row.name, row.status) for row in others] == [("context lost", "failed"), ("tests", "failed")]
    assert others[0].detail.startswith("in test_played.py::test_each[4]: CUDA error: an illegal memory access")
    assert others[1].detail == "6 passed, 2 failed, 1 skipped (Skipped: needs two devices)"


def test_without_xdist_the_process_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    status, tests, others = outcome(tmp_path, "-p", "no:xdist")
    assert status == CONTEXT_LOST
    assert list(tests) == ["0", "1", "2", "3", "4"]
    assert tests["4"].status == "failed"
    assert [row.name for row in others] == ["context lost"]
    begun = (tmp_path / "played.begun").read_text().splitlines()
    assert begun == [f"test_played.py::test_each[{number}]" for number in range(5)]


def test_measurements_behind_one_that_loses_the_context_are_made_by_the_process_that_replaces_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "played.py").write_text(BENCHMARK)
    options = ["--rows", "played.rows", "--ceilings", "none", "--device", "cpu", "--not", "figure 5"]
    done = run(["-m", "played", *options], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "played.rows")
    assert [(row.name, row.status, row.detail) for row in rows] == [
        ("figure 0", "info", ""),
        ("figure 1", "failed", "ValueError: a wrong argument"),
        ("figure 2", "failed", "AcceleratorError: CUDA error in 2"),
        ("figure 3", "info", ""),
        ("figure 4", "info", ""),
    ]
    assert len({row.value for row in rows if row.status == "info"}) == 1
