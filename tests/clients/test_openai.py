"""The `openai` package against a real cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.clients import conftest
from tests.clients.serving import Served, client_environment

PROGRAM = Path(__file__).with_name("use_openai.py")
NUM_CHECKS = 27


def test_everything_that_its_users_do(served: Served) -> None:
    python = conftest.program("openai", "python")
    done = subprocess.run(
        [python, PROGRAM, served.url, served.model],
        env=client_environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in lines if line.startswith("ok ")]) == len(lines) == NUM_CHECKS
