"""`scripts/gpu_check.py` without a GPU: sections that crash or hang, and the description of the device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu_check import main, run_process


def test_a_section_that_crashes_or_hangs_is_ended_and_told(tmp_path: Path) -> None:
    crash = [sys.executable, "-c", "import os; print('first'); os.abort()"]
    outcome = run_process(crash, {**os.environ, "PYTHONUNBUFFERED": "1"}, tmp_path / "log", 30.0)
    assert (outcome.status, outcome.last_line) == (-6, "first")
    hang = "import subprocess, time; print('hangs', flush=True); subprocess.Popen(['sleep', '60']); time.sleep(60)"
    outcome = run_process([sys.executable, "-c", hang], os.environ, tmp_path / "log", 5.0)
    assert (outcome.status, outcome.last_line) == (None, "hangs")
    assert outcome.took_s < 30.0


def test_a_section_runs_on_a_cpu(tmp_path: Path) -> None:
    options = ["--json", str(tmp_path / "out" / "found.json"), "--report", str(tmp_path / "found.md")]
    status = main(["--device", "cpu", "--only", "transfer", "--logs", str(tmp_path / "logs"), *options])
    rows = json.loads((tmp_path / "out" / "found.json").read_text())["rows"]
    assert status == 0, rows
    assert [row["name"] for row in rows[:2]] == [
        "gather + scatter, tokens 0 to 48",
        "gather with checksum, tokens 0 to 48",
    ]
    assert all(row["status"] == "info" and row["value"] > 0 for row in rows)
    assert "| transfer | gather + scatter" in (tmp_path / "found.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_device_the_check_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--logs", str(tmp_path), "--json", str(tmp_path / "found.json")])
    assert status == 3
    assert capsys.readouterr().out.strip().endswith("open: no CUDA device")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert ("environment", "device", "no CUDA device") in [(r["section"], r["name"], r["detail"]) for r in rows]
