"""A contact with a GPU, with sections that are played, is killed: its files are complete, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.contact.children import Child
from benchmarks.gpu.contact.output import FILES
from benchmarks.gpu.contact.summary import MOST_CHARACTERS
from benchmarks.gpu.report import Row, read_rows
from tests.support.waiting import until

REPOSITORY = Path(__file__).resolve().parents[3]

PLAYED = """
import argparse, json, os, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("--rows", "--ceilings", "--device"):
    parser.add_argument(name)
parser.add_argument("behaviour")
arguments = parser.parse_args()

def tell(name, **fields):
    with open(arguments.rows, "a") as file:
        file.write(json.dumps({"section": "played", "name": name, "status": "info", **fields}) + "\\n")

tell("began", detail=str(os.getpid()))
print("it began", flush=True)
if arguments.behaviour == "hangs":
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    tell("started", detail=str(subprocess.Popen(sleeper, start_new_session=True).pid))
    time.sleep(600)
if arguments.behaviour == "probes":
    with open(os.path.dirname(arguments.rows) + "/probe.json", "w") as file:
        json.dump({"embed": True, "silu_mul": False}, file)
tell("switch", detail=os.environ.get("DISAGG_KERNELS", "none"))
if arguments.behaviour == "crashes":
    os.abort()
if arguments.behaviour == "is wrong":
    tell("a test", status="failed", detail="it is wrong")
    sys.exit(1)
with open(os.path.dirname(arguments.rows) + "/step.trace.json", "w") as file:
    file.write("{}")
tell("a figure", value=1.5, unit="ms")
"""

DRIVER = """
import json, sys
from pathlib import Path
from benchmarks.gpu.contact.commands import Place
from benchmarks.gpu.contact.runner import Contact
from benchmarks.gpu.contact import runner
from benchmarks.gpu.contact.sections import Section

runner.missing = lambda sections: {each.name: "not there" for each in sections if each.name == "gone"}
folder = Path(sys.argv[1])
place = Place(device="cpu", folder=folder / "logs", cores=2, has_xdist=False, commit="abc")
place.folder.mkdir()
sections = [
    Section(name=name, phase=phase, priority=number, least_s=1.0, program="played", arguments=(behaviour,), **fields)
    for number, (name, phase, behaviour, fields) in enumerate(json.loads(sys.argv[2]))
]
sys.exit(Contact(sections, place, folder / "out", float(sys.argv[3]), ["driver"]).run())
"""

Played = tuple[str, int, str, dict[str, object]]
QUICK: Played = ("quick", 1, "is right", {"limit_s": 60.0, "alone": True})
HANGS: Played = ("hangs", 2, "hangs", {"limit_s": 600.0})
OTHER: Played = ("hangs-too", 2, "hangs", {"limit_s": 600.0})


@contextmanager
def contact(folder: Path, *sections: Played, budget_s: float = 3600.0) -> Iterator[subprocess.Popen[str]]:
    (folder / "played.py").write_text(PLAYED)
    path = os.pathsep.join(str(part) for part in (REPOSITORY / "src", REPOSITORY, folder))
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), json.dumps(sections), str(budget_s)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "kernels")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def rows_of(folder: Path) -> list[Row]:
    return read_rows(folder / "out" / "rows.jsonl")


def wait_for(folder: Path, section: str, name: str) -> None:
    until(
        lambda: (section, name) in [(row.section, row.name) for row in rows_of(folder)], f"no row {name} of {section}"
    )


def pids(folder: Path) -> list[int]:
    return [int(row.detail) for row in rows_of(folder) if row.name in ("began", "started")]


def wait_for_the_end_of(processes: list[int]) -> None:
    def are_gone() -> bool:
        return not any(is_running(pid) for pid in processes)

    until(are_gone, "a process is left")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def check_files(folder: Path, *ended: str) -> None:
    """All are readable, and have all of the sections that had ended."""
    out = folder / "out"
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert names <= set(FILES)
    report = json.loads((out / "report.json").read_text())
    assert report["commit"] == "abc"
    assert {"rows.jsonl", "summary.txt", "report.json", "report.md", "logs.tgz"} <= names
    page, summary = (out / "report.md").read_text(), (out / "summary.txt").read_text()
    with tarfile.open(out / "logs.tgz") as archive:
        logs = archive.getnames()
    for name in ended:
        assert (name, "a figure", 1.5) in [(row["section"], row["name"], row["value"]) for row in report["rows"]]
        assert f"| {name} | a figure | 1.5 ms |" in page
        assert f"  {name}: a figure: 1.5 ms" in summary
        assert {f"{name}.log", f"{name}.rows"} <= set(logs)
    if ended:
        with tarfile.open(out / "traces.tgz") as archive:
            assert archive.getnames() == ["step.trace.json"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_in_the_middle_its_files_are_complete_and_no_process_is_left(
    tmp_path: Path, how: signal.Signals
) -> None:
    with contact(tmp_path, QUICK, HANGS, OTHER) as process:
        for name in ("hangs", "hangs-too"):
            wait_for(tmp_path, name, "started")
        processes = pids(tmp_path)[1:]
        assert len(processes) == 4
        assert all(is_running(pid) for pid in processes)
        process.send_signal(how)
        output = process.communicate()[0]
    wait_for_the_end_of(processes)
    check_files(tmp_path, "quick")
    if how == signal.SIGTERM:
        assert process.returncode == 1
        assert output.splitlines()[-1] == "missed or failed"
        assert ("contact", "ended by a signal") in [(row.section, row.detail) for row in rows_of(tmp_path)]
    else:
        assert (tmp_path / "out" / "summary.txt").read_text().endswith("it goes on\n")


@pytest.mark.parametrize("num_ended", [0, 1, 2, 3])
def test_killed_after_any_section_its_files_have_those_that_ended(tmp_path: Path, num_ended: int) -> None:
    quick = [(f"quick-{number}", number, *QUICK[2:]) for number in range(num_ended)]
    with contact(tmp_path, *quick, (HANGS[0], 9, *HANGS[2:])) as process:
        wait_for(tmp_path, "hangs", "began")
        process.kill()
        process.communicate()
    wait_for_the_end_of(pids(tmp_path))
    check_files(tmp_path, *(name for name, *_ in quick))


def test_a_section_that_hangs_crashes_or_is_not_there_does_not_stop_the_others(tmp_path: Path) -> None:
    sections: list[Played] = [
        ("hangs", 1, "hangs", {"limit_s": 1.5}),
        ("crashes", 2, "crashes", {"limit_s": 60.0}),
        ("wrong", 3, "is wrong", {"limit_s": 60.0, "rerun": True}),
        ("gone", 4, "is right", {"limit_s": 60.0}),
        ("quick", 5, "is right", {"limit_s": 60.0, "needs": ["hangs-not"]}),
    ]
    with contact(tmp_path, *sections, budget_s=200.0) as process:
        output = process.communicate()[0]
    assert process.returncode == 1
    wait_for_the_end_of(pids(tmp_path))
    check_files(tmp_path, "quick")
    found = {(row.section, row.status, row.detail.split(";")[0]) for row in rows_of(tmp_path) if row.status != "info"}
    told = {(section, status) for section, status, _ in found}
    assert told == {
        ("hangs", "open"),
        ("crashes", "failed"),
        ("wrong", "failed"),
        ("gone", "open"),
        ("wrong, blocking", "failed"),
    }
    assert ("crashes", "failed", "exit status -6") in found
    assert ("gone", "open", "not there") in found
    hung = next(row for row in rows_of(tmp_path) if (row.section, row.status) == ("hangs", "open"))
    assert hung.detail.endswith("last line: it began")
    assert len(output) <= MOST_CHARACTERS
    lines = output.splitlines()
    assert lines[-1] == "missed or failed"
    assert lines.index("failed:") < lines.index("figures:")


def test_an_op_that_is_wrong_is_switched_off_in_all_that_follows_and_every_row_says_so(tmp_path: Path) -> None:
    probe: Played = ("probe", 1, "probes", {"limit_s": 60.0, "probes": True})
    with contact(tmp_path, probe, ("quick", 2, *QUICK[2:])) as process:
        process.communicate()
    found = [(row.section, row.detail, row.without) for row in rows_of(tmp_path) if row.name == "switch"]
    assert found == [("probe", "none", ""), ("quick", "auto,-silu_mul", "silu_mul")]
    assert "; without: silu_mul |" in (tmp_path / "out" / "report.md").read_text()


def test_kernels_that_are_compiled_come_back(tmp_path: Path) -> None:
    """Those that were there before do not."""
    (tmp_path / "kernels" / "old").mkdir(parents=True)
    (tmp_path / "kernels" / "old" / "a.cubin").write_bytes(b"old")
    with contact(tmp_path, QUICK, HANGS) as process:
        wait_for(tmp_path, "hangs", "started")
        (tmp_path / "kernels" / "new").mkdir()
        (tmp_path / "kernels" / "new" / "b.cubin").write_bytes(b"new")
        (tmp_path / "kernels" / "new" / "b.ptx").write_bytes(b"text")
        process.terminate()
        process.communicate()
    with tarfile.open(tmp_path / "out" / "cubins.txz") as archive:
        assert archive.getnames() == ["new/b.cubin"]


def test_what_a_command_leaves_running_in_a_session_of_its_own_is_ended_with_it(tmp_path: Path) -> None:
    left = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(600)"
    code = f"import os\nif os.fork() == 0:\n    exec({left!r})\nimport time; time.sleep(0.3); raise SystemExit(7)"
    child = Child([sys.executable, "-c", code], os.environ, tmp_path, tmp_path / "log")
    until(child.has_ended)
    assert child.status == 7
    assert not is_running(int((tmp_path / "log").read_text()))


def test_a_command_whose_keeper_is_killed_ends(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    child = Child([sys.executable, "-c", code], os.environ, tmp_path, tmp_path / "log")
    until(lambda: (tmp_path / "log").read_text().endswith("\n"))
    pid = int((tmp_path / "log").read_text())
    os.kill(child.pid, signal.SIGKILL)
    wait_for_the_end_of([pid])
    until(child.has_ended)
    assert child.status == -signal.SIGKILL


def test_a_command_that_is_not_there_is_told(tmp_path: Path) -> None:
    child = Child(["no-such-program"], os.environ, tmp_path, tmp_path / "log")
    until(child.has_ended)
    assert child.status == 127
    assert (tmp_path / "log").read_text().startswith("no-such-program: ")


def check(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["scripts/gpu_check.py", "--out", str(tmp_path / "out"), *options]
    return subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_sections_run_on_a_cpu(tmp_path: Path) -> None:
    done = check(tmp_path, "--device", "cpu", "--only", "preflight", "limits", "attention")
    rows = rows_of(tmp_path)
    assert done.returncode == 0, done.stdout
    assert {row.section for row in rows} == {"preflight", "limits", "attention"}
    figures = [row for row in rows if row.value is not None]
    assert {row.section for row in figures} == {"limits", "attention"}
    assert done.stdout.splitlines()[-1] == "all as wanted"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["machine"]["device"] == "cpu: tiny sizes, no targets"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_the_check_is_open(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "open: no CUDA device"
    assert {row.section for row in rows_of(tmp_path)} == {"preflight"}


def test_without_torch_the_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    driver = (
        "import os, sys; sys.path[:0] = ['src', '.']; from benchmarks.gpu.contact import commands, runner;"
        "path = os.environ['BROKEN']; real = commands.environment;"
        "commands.environment = lambda *a: (e := real(*a)) | {'PYTHONPATH': path + ':' + e['PYTHONPATH']};"
        f"sys.exit(runner.main(['--out', {str(tmp_path / 'out')!r}]))"
    )
    environ = {**os.environ, "BROKEN": str(tmp_path / "path")}
    done = subprocess.run(
        [sys.executable, "-c", driver], cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    failed = [(row.name, row.detail) for row in rows_of(tmp_path) if row.status == "failed"]
    assert ("import torch", "ImportError: libcudart.so.13: cannot open shared object file") in failed
    assert {row.section for row in rows_of(tmp_path)} == {"preflight"}
