"""Runs a command and ends all that it started: `python keeper.py PARENT COMMAND...`, PARENT the process that starts it.

    the command ends          what it left running is ended, and the keeper ends with its status (128 + signal)
    SIGTERM                   all of it is ended, and the keeper ends
    PARENT dies, SIGKILL too  the kernel sends SIGTERM
    the keeper is killed      the kernel kills the command

Processes that outlive their parent become the keeper's children (PR_SET_CHILD_SUBREAPER), so those with a session of
their own are found, too. The keeper has a process group of its own: a signal to the group of whoever started it reaches
it through the death of PARENT only, and it can still clean up. Linux only; needs Python alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
END_S = 5.0
"""For processes that are killed to disappear; one that waits in a driver may take longer, and is left to it."""


def prctl(option: int, value: int) -> None:
    """The system call of this name.

    Raises:
        OSError: it failed.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(ancestor: int) -> list[int]:
    """Children of a process and their children, zombies included."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = [], [ancestor]
    while fresh:
        fresh = [pid for pid, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def start(command: list[str]) -> int:
    """Run a command that the kernel kills when this process dies; its process id."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if os.getppid() == keeper:
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def reap(wanted: int) -> int | None:
    """Take the status of all children that have ended; that of `wanted` if it is among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == wanted:
                found = os.waitstatus_to_exitcode(ended[1])
    return found


def end_all() -> None:
    """Kill all descendants, and those that they start meanwhile."""
    ends_at = time.monotonic() + END_S
    while (found := descendants(os.getpid())) and time.monotonic() < ends_at:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(0)
        time.sleep(0.005)


def main(parent: int, command: list[str]) -> int:
    """The keeper; its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.setpgid(0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 128 + signal.SIGTERM
    pid, status = start(command), None
    while status is None:
        status = -signal.SIGTERM if signal.sigwait(SIGNALS) == signal.SIGTERM else reap(pid)
    end_all()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
