"""Python programs of ours as child processes: started with a message on standard input, ended with signals.

The message is one JSON line; the pipe then stays open, and its end tells the child that its parent is gone (see
`process_tools.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

import msgspec

Process = subprocess.Popen[bytes]


NOT_FOR_CHILDREN: Final = ("DISAGG_API_KEY",)
"""The operator's own; no process of a cluster calls a gateway."""


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What child processes have of ours."""
    return {name: value for name, value in environ.items() if name not in NOT_FOR_CHILDREN}


def spawn(
    module: str, message: object, environment: Mapping[str, str] | None = None, output: IO[bytes] | None = None
) -> Process:
    """Start `python -m module` and hand it its message.

    Args:
        environment: on top of this process's own.
        output: for its standard output and error; this process's own without.

    Raises:
        OSError: if no process can be made.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**child_environment(os.environ), **(environment or {})},
        start_new_session=True,  # a Ctrl-C in the terminal is ours; we tell the children in order
    )
    try:
        pipe = _pipe(process)
        pipe.write(msgspec.json.encode(message) + b"\n")
        pipe.flush()
    except BrokenPipeError:  # it ended already; its exit status and log say why
        pass
    return process


def end(processes: Sequence[Process], timeout_s: float) -> list[Process]:
    """SIGTERM to those that still run, SIGKILL after `timeout_s`; reaps all. Returns those that had to be killed."""
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
