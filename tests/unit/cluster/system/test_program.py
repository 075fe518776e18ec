"""The command that a hint names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from disagg.cluster.system import program

HERE = Path("/home/me/project")


@pytest.mark.parametrize(
    ("started", "found", "expected"),
    [
        ("/usr/bin/disagg", "/usr/bin/disagg", "disagg"),
        ("/home/me/project/.venv/bin/disagg", "/home/me/project/.venv/bin/disagg", "disagg"),
        (".venv/bin/disagg", None, ".venv/bin/disagg"),
        (".venv/bin/disagg", "/usr/bin/disagg", ".venv/bin/disagg"),
        ("/home/me/project/.venv/bin/disagg", None, ".venv/bin/disagg"),
        ("/home/me/project/disagg", None, "./disagg"),
        ("/opt/my tools/disagg", None, "'/opt/my tools/disagg'"),
        ("/x/cli/__main__.py", "/usr/bin/disagg", ".venv/bin/python -m disagg.cli"),
        ("/x/pytest/__main__.py", None, "disagg"),
        ("disagg", None, "disagg"),
        ("-c", None, "disagg"),
        ("", None, "disagg"),
    ],
)
def test_what_the_user_typed(started: str, found: str | None, expected: str) -> None:
    assert program.program(started, ".venv/bin/python", found, HERE) == expected


@pytest.mark.parametrize(
    ("found", "expected"), [("/home/me/project/.venv/bin/python", "python"), (None, ".venv/bin/python")]
)
def test_the_interpreter(found: str | None, expected: str) -> None:
    assert program.typed("/home/me/project/.venv/bin/python", found, HERE, "python") == expected


def test_a_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bin/disagg"), "status"])
    assert program.command("explain --list") == "bin/disagg explain --list"
