"""Packages that applications use, unchanged, against a real cluster: each program does what their users do."""

from __future__ import annotations

import subprocess

import pytest

from tests.clients import conftest
from tests.clients.serving import Served, client_environment
from tests.support.architecture import REPOSITORY


@pytest.mark.parametrize(
    ("client", "module", "num_checks"),
    [
        ("openai", "use_openai", 27),
        ("openai", "use_responses", 17),
        ("openai", "use_batches", 4),
        ("anthropic", "use_anthropic", 18),
        ("langchain", "use_langchain", 12),
        ("instructor", "use_instructor", 7),
    ],
)
def test_everything_that_its_users_do(served: Served, client: str, module: str, num_checks: int) -> None:
    python = conftest.program(client, "python")
    done = subprocess.run(
        [python, "-m", f"tests.clients.{module}", served.url, served.model],
        env=client_environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in lines if line.startswith("ok ")]) == len(lines) == num_checks
