"""This package's programs as child processes: started with a message on standard input, ended with signals.

    parent   spawn(module, message) ................................ end(processes)
    child    read_config() -> terminate_when_orphaned() -> ... until SIGTERM

The message is one JSON line; the pipe then stays open, and its end means that the parent is gone, which the child takes
as SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class Process(Protocol):
    """A child process: a `subprocess.Popen`, or one that a template forked."""

    pid: int
    returncode: int | None
    """Exit status as in `subprocess.Popen`: None until `poll` or `wait` saw the end."""
    stdin: IO[bytes] | None

    def poll(self) -> int | None:
        """Read and return the present `returncode`."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        ...

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        ...


LOG_TAIL_LINES = 15
_TAIL_BYTES = 64 << 10
"""Bytes that are read of the end of a log, whatever the length of its lines."""

NOT_FOR_CHILDREN: Final = ("DISAGG_API_KEY",)
"""Variables of the operator that children do not get; no process of a cluster calls a gateway."""


class LaunchError(RuntimeError):
    """A process could not be started; the message says which and why, with the end of its log."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of child processes, made from ours."""
    return {name: value for name, value in environ.items() if name not in NOT_FOR_CHILDREN}


def spawn(
    module: str, message: object, environment: Mapping[str, str] | None = None, output: IO[bytes] | None = None
) -> Process:
    """Start `python -m module` and hand it its message.

    Args:
        environment: variables in addition to this process's own.
        output: file for its standard output and error; None for this process's own.

    Raises:
        OSError: if no process can be made.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**child_environment(os.environ), **(environment or {})},
        start_new_session=True,  # a Ctrl-C in the terminal is for this process, which stops the children in order
    )
    try:
        pipe = _pipe(process)
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()
    except BrokenPipeError:  # it ended already; its exit status and log show why
        pass
    return process


def end(processes: Sequence[Process], timeout_s: float) -> list[Process]:
    """End processes: SIGTERM to those that still run, SIGKILL after `timeout_s`; reaps all. Returns those that had to
    be killed."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + timeout_s
    killed = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed.append(process)
        try:
            _pipe(process).close()
        except BrokenPipeError:  # its message was never read
            continue
    return killed


def _pipe(process: Process) -> Any:
    assert process.stdin is not None, "children are started with a pipe"
    return process.stdin


def terminate_when_orphaned() -> None:
    """Treat an end of standard input, which the parent holds open, as SIGTERM."""
    threading.Thread(target=_terminate_at_end_of_stdin, name="parent-watch", daemon=True).start()


def _terminate_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def read_config(kind: type[T]) -> T:
    """The configuration that the parent sent; raises `msgspec.ValidationError`."""
    return msgspec.json.decode(_read_line(0), type=kind)


def _read_line(fd: int) -> bytes:
    """Read one line without a buffer, so that nothing is left in it that the watcher does not see."""
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(fd, 65536)
        if not piece:
            break
        data += piece
    return data


def describe_exit(status: int) -> str:
    """Text for a `Popen.returncode`, such as `killed by SIGKILL` or `exit status 3`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-status}"


def open_log(path: Path) -> IO[bytes]:
    """Open a log file to append to; a new file is readable by its owner only, because logs name who calls."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def last_lines(log: Path, count: int) -> str:
    """The end of a log file; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            end = file.read(_TAIL_BYTES)
    except OSError:
        return ""
    return "\n".join(end.replace(b"\0", b"").decode(errors="replace").splitlines()[-count:])


def with_log(reason: str, log_tail: str) -> str:
    """A reason, followed by the end of a log if there is one."""
    return f"{reason}; the end of its log:\n{log_tail}" if log_tail else reason
