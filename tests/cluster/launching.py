"""`ray up`, `disagg` and `ray down` as a user runs them, for tests: a home and ports of their own."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from disagg.cluster.system.children import last_lines
from disagg.cluster.system.process_tools import ProcessRef

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy" / "ray"
BIN = Path(sys.executable).parent
COMMAND_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0


class Launch:
    """A folder with a home, a cluster file and what commands printed. Owner of that folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster_file = folder / "cluster.yaml"
        self.output = folder / "output"
        home = folder / "home"
        (home / ".ray").mkdir(parents=True)
        token = home / ".ray" / "auth_token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        path = f"{BIN}:{os.environ.get('PATH', os.defpath)}"
        self.environment = {**kept, "HOME": str(home), "TMPDIR": str(home), "PATH": path}

    def write(self, name: str, content: dict[str, Any]) -> Path:
        """A YAML file in the folder."""
        file = self.folder / name
        file.write_text(yaml.safe_dump(content))
        return file

    def read(self, *command: str) -> str:
        """What a command prints about the Ray cluster; fails the test if it fails."""
        environment = self.environment | {"RAY_AUTH_MODE": "token"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stderr}"
        return done.stdout

    def run(self, *command: str) -> None:
        """Run a command to its end; fails the test with its output if it fails."""
        with self.output.open("a") as output:
            done = subprocess.run(
                command,
                env=self.environment,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT_S,
            )
        assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{last_lines(self.output, 60)}"

    def processes(self) -> list[ProcessRef]:
        """Everything that the commands left running, on whichever node: it has inherited the environment."""
        return ProcessRef.family(f"TMPDIR={self.environment['TMPDIR']}")

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Until it holds; fails with the logs of all nodes when it does not."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not condition():
            if time.monotonic() >= deadline:
                raise AssertionError(f"never seen: {what}\n{self.logs()}")
            time.sleep(0.3)

    def logs(self) -> str:
        """The ends of what the commands and Ray's processes wrote."""
        names = ("monitor.out", "monitor.log", "*.err")
        files = [file for name in names for file in self.folder.rglob(f"session_latest/logs/{name}")]
        parts = [f"== {file}\n{last_lines(file, 15)}" for file in (self.output, *files) if last_lines(file, 1)]
        return "\n".join(parts)[-12_000:]


@contextmanager
def new_launch(name: str) -> Iterator[Launch]:
    """A launch in a folder whose path is short enough for Ray; what it left on the machine is taken away at the end."""
    folder = Path("/tmp") / f"{name}{os.getpid()}"
    folder.mkdir(mode=0o700)
    launch = Launch(folder)
    try:
        yield launch
    finally:
        if launch.cluster_file.exists():
            launch.run("ray", "down", "-y", str(launch.cluster_file))
        for file in sorted(folder.rglob("*"), reverse=True):
            if file.is_dir() and not file.is_symlink():
                file.rmdir()
            else:
                file.unlink()
        folder.rmdir()


def read_deploy(name: str) -> dict[str, Any]:
    """A file of deploy/ray."""
    content: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return content


def free_ports(count: int) -> list[int]:
    """Ports that are free now, one after the other, below the range from which the system gives ports away."""
    while True:
        first = 20_000 + secrets.randbelow(12_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(closing(socket.create_server(("127.0.0.1", port))))
            except OSError:
                continue
            return list(range(first, first + count))
