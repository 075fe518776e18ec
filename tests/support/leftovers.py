"""Finds what a test left running: threads, asyncio tasks and processes of ours.

    before = Snapshot.take()  ->  the test  ->  leftovers(before, grace_s)

Our processes are our children, and all that carry a mark in their environment, which children inherit: so an orphan
whose parent died is found too.
"""

from __future__ import annotations

import asyncio
import asyncio.runners
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[2]
PROC = Path("/proc")
MARK = "DISAGG_TEST_RUN"

LASTING_THREADS = ("_poll_wrapper", "_poller_wrapper", "TMonitor", "pytest_timeout", "tqdm_monitor", "Dummy-")
"""Daemon threads of libraries that live as long as the process, by a part of their name. `Dummy-`: one that Python did
not start, such as gRPC's own, once it has logged something."""
LASTING_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers that Python keeps as long as the process, by a part of their command line."""
LASTING_PIDS: set[int] = set()
"""Processes of the tests' own that end with this one."""
FORKING_PROCESSES = ("disagg.gateway.answers.grammars.compiler",)
"""Processes that replace their children as they see fit, as long as they run, by a part of their command line."""

_cancel_all = asyncio.runners._cancel_all_tasks  # type: ignore[attr-defined]  # the one place where a runner sees them


def mark_this_run() -> None:
    """Put a mark that is unique to this test run into the environment, once, before the first child starts.

    Workers of one run that share its tests have a mark each, or one would find the children of the other.
    """
    if "PYTEST_XDIST_WORKER" in os.environ or MARK not in os.environ:
        os.environ[MARK] = uuid.uuid4().hex


@dataclass(frozen=True)
class Snapshot:
    """What ran at one moment."""

    threads: frozenset[threading.Thread]
    pids: frozenset[int]
    """Of all processes, ours or not."""

    @classmethod
    def take(cls) -> Snapshot:
        """What runs now."""
        return cls(frozenset(threading.enumerate()), all_pids())


def leftovers(before: Snapshot, grace_s: float) -> list[str]:
    """What runs now, did not run before, and does not end within `grace_s` seconds."""
    deadline = time.monotonic() + grace_s
    while found := _new_since(before):
        if time.monotonic() >= deadline:
            return found
        threading.Event().wait(0.02)
    return []


def _new_since(before: Snapshot) -> list[str]:
    threads = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in before.threads and not _lasts(thread.name, LASTING_THREADS)
    ]
    processes = [
        f"process {pid}: {command}"
        for pid in sorted(all_pids() - before.pids - LASTING_PIDS)
        if is_ours(pid)
        and not _lasts(command := _command_line(pid), LASTING_PROCESSES)
        and not _belongs_to_one_that_lasts(pid, before)
    ]
    return threads + processes


def _lasts(text: str, parts: tuple[str, ...]) -> bool:
    return any(part in text for part in parts)


def _belongs_to_one_that_lasts(pid: int, before: Snapshot) -> bool:
    parent = _parent(pid)
    return parent in before.pids and _lasts(_command_line(parent), FORKING_PROCESSES)


def all_pids() -> frozenset[int]:
    """Every other process of the machine; where there is no /proc, the children that Python knows."""
    if not PROC.exists():
        return frozenset(child.pid for child in multiprocessing.active_children() if child.pid is not None)
    return frozenset(int(entry) for entry in os.listdir(PROC) if entry.isdigit()) - {os.getpid()}  # noqa: PTH208 - quick


def is_ours(pid: int) -> bool:
    """Whether a process was started by this test run and still runs; a zombie does not."""
    if not PROC.exists():
        return True
    fields = _stat(pid)
    if not fields or fields[0] == b"Z":
        return False
    mark = f"{MARK}={os.environ[MARK]}".encode()
    return int(fields[1]) == os.getpid() or mark in _read(pid, "environ").split(b"\0")


def _parent(pid: int) -> int:
    """0 for a process that has just ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    """From the state on: what follows the name, which may have anything in it."""
    return _read(pid, "stat").rpartition(b") ")[2].split()


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()[:200]


def _read(pid: int, name: str) -> bytes:
    """A file of /proc; empty for a process that has just ended, or that belongs to another user."""
    try:
        return (PROC / str(pid) / name).read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


@contextmanager
def pending_tasks(grace_s: float = 0.0) -> Iterator[list[str]]:
    """Collects the tasks that were still pending when an event loop of this thread was closed.

    Ours at once; gRPC's own if they do not end within `grace_s` seconds, since those of a call, a channel or a server
    end some turns of the loop after it.
    """
    found: list[str] = []

    def note_and_cancel(loop: asyncio.AbstractEventLoop) -> None:
        tasks = asyncio.all_tasks(loop)
        found.extend(_describe(task) for task in tasks if _is_in(task, _is_of_ours))
        if grpcs := [task for task in tasks if _is_in(task, _is_of_grpc)]:
            _, left = loop.run_until_complete(asyncio.wait(grpcs, timeout=grace_s))
            found.extend(map(_describe, left))
        _cancel_all(loop)

    with mock.patch.object(asyncio.runners, "_cancel_all_tasks", note_and_cancel):
        yield found


def _is_in(task: asyncio.Task[Any], is_source: Callable[[Path], bool]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and is_source(Path(code.co_filename))


def _is_of_ours(path: Path) -> bool:
    return path.is_absolute() and path.resolve().is_relative_to(REPOSITORY) and "site-packages" not in path.parts


def _is_of_grpc(path: Path) -> bool:
    """Its compiled parts name their source by a relative path."""
    return "grpc" in path.parts


def _describe(task: asyncio.Task[Any]) -> str:
    return f"task {task.get_name()}: {task.get_coro().__qualname__}"  # type: ignore[union-attr]
