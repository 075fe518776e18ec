"""Processes of a contact, each in a keeper that ends all that it started (`keeper.py`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

KEEPER = Path(__file__).with_name("keeper.py")


class Child:
    """A running command; its output goes to a file. Owner: the main thread, since the kernel takes the death of the
    thread that started a process for that of its parent."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path, log: Path) -> None:
        """Run it in `folder`."""
        keeper = [sys.executable, "-I", "-S", str(KEEPER), str(os.getpid())]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*keeper, *command],
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._is_killed = False

    @property
    def pid(self) -> int:
        """Process id of the section's keeper."""
        return self._process.pid

    def kill(self) -> None:
        """End it and all that it started, soon."""
        self._is_killed = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def has_ended(self) -> bool:
        """Whether it and all that it started have ended."""
        return self._process.poll() is not None

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None where it was ended by `kill`."""
        found = self._process.returncode
        if self._is_killed or found is None:
            return None
        return 128 - found if found > 128 else found
