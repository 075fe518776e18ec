"""The command by which the user started this program, so that hints can be typed as they stand, also where the
environment of `disagg` is not activated.

    disagg up                       -> disagg
    .venv/bin/disagg up             -> .venv/bin/disagg
    .venv/bin/python -m disagg.cli  -> .venv/bin/python -m disagg.cli
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

NAME = "disagg"
MODULE = "disagg.cli"


def command(words: str) -> str:
    """A command line of this program, such as `.venv/bin/disagg status` for `status`."""
    started = sys.argv[0] if sys.argv else ""
    return f"{program(started, python(), shutil.which(NAME), Path.cwd())} {words}"


def python() -> str:
    """The command that starts this program's Python."""
    return typed(sys.executable, shutil.which("python"), Path.cwd(), "python")


def program(started: str, interpreter: str, found: str | None, folder: Path) -> str:
    """The command that starts this program.

    Args:
        started: file that was started, as in `sys.argv[0]`.
        interpreter: command of the Python that runs it.
        found: file that the shell finds for `disagg`, or None.
        folder: current folder.
    """
    path = Path(started)
    if path.name == "__main__.py" and path.parent.name == "cli":
        return f"{interpreter} -m {MODULE}"
    return typed(started, found, folder, NAME) if path.name == NAME else NAME


def typed(file: str, found: str | None, folder: Path, name: str) -> str:
    """What a user types in `folder` to start `file`: `name` where the shell finds that file by it, else its path."""
    path = folder / file
    if "/" not in file or (found is not None and folder / found == path):
        return name
    if path.is_relative_to(folder):
        inside = str(path.relative_to(folder))
        return shlex.quote(inside if "/" in inside else f"./{inside}")
    return shlex.quote(str(path))
