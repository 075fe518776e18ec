"""Packages that applications use, unchanged, against a real cluster: each program does what their users do."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.clients import conftest
from tests.clients.serving import Served, client_environment
from tests.support.architecture import REPOSITORY


@pytest.mark.parametrize(
    ("client", "module", "num_checks"),
    [
        ("libraries", "use_openai", 27),
        ("libraries", "use_responses", 17),
        ("libraries", "use_batches", 4),
        ("libraries", "use_anthropic", 18),
        ("libraries", "use_langchain", 12),
        ("libraries", "use_litellm", 13),
        ("libraries", "use_agents", 12),
        ("instructor", "use_instructor", 7),
    ],
)
def test_everything_that_its_users_do(served: Served, client: str, module: str, num_checks: int) -> None:
    python = conftest.program(client, "python")
    _run([python, "-m", f"tests.clients.{module}", served.url, served.model], REPOSITORY, num_checks)


def test_everything_that_users_of_vercels_sdk_do(served: Served) -> None:
    """The program runs from a copy: node looks for packages beside it."""
    folder = conftest.folder("ai-sdk")
    shutil.copy(REPOSITORY / "tests/clients/use_ai_sdk.mjs", folder)
    _run(["node", "use_ai_sdk.mjs", served.url, served.model], folder, 18)


def _run(command: Sequence[str | Path], folder: Path, num_checks: int) -> None:
    done = subprocess.run(
        command,
        env=client_environment(LITELLM_LOCAL_MODEL_COST_MAP="True"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in lines if line.startswith("ok ")]) == len(lines) == num_checks
