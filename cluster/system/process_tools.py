"""Functions of the operating system for every process of a cluster: limits, scheduling, signals, other processes by id.
Cores and devices: `cores.py`. Child processes: `children.py`."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

MAX_OPEN_FILES = 1 << 16
"""Limit of open files to request: more than a gateway's connections; some systems refuse to set `unlimited`."""
NICENESS = 10
"""Priority of a process that gives way to others, as `nice` counts."""
KILL_TIMEOUT_S = 5.0
"""Seconds that the kernel may take to end a killed process."""


def use_batch_scheduling() -> None:
    """Use batch scheduling for this thread and the threads that it starts: they wait for a core until the thread on it
    is at the end of its time slice (a few milliseconds) or pauses, and then do all collected work. For a process with
    many short tasks beside others that compute: each interruption costs both more than the task itself. A free core is
    taken at once."""
    if hasattr(os, "SCHED_BATCH"):  # Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def give_way() -> None:
    """Lower the priority of this thread and of the threads that it starts: where they share cores with threads of the
    usual priority, these get nine tenths of the time. A free core is taken at once."""
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def allow_open_files(wanted: int = MAX_OPEN_FILES) -> int:
    """Raise this process's limit of open files to `wanted`, or as far as is allowed; never lower it. Usual limits (256,
    1024) are less than the connections that a gateway shall take: it could accept none until some close.

    Returns:
        The limit now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def freeze_start() -> None:
    """Exclude the objects of the start, modules above all, from garbage collection: a full collection of a worker with
    torch takes 87 ms, in which no stream gets a token; without these objects it takes next to nothing."""
    gc.collect()
    gc.freeze()


def age_s() -> float:
    """Age of this process, forked or not, to a hundredth of a second; 0 where the system does not report it."""
    if not (stat := _stat(os.getpid())) or not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / os.sysconf("SC_CLK_TCK"))


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let a SIGTERM leave the block through its clean-up, as Ctrl-C does; a second one does not disturb that."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


OPENMP_LOOKS = 4000
"""Number of times that an idle thread of torch's OpenMP looks for work before it sleeps: about as long as those of the
C++ kernels (`SPIN_US` in `kernels/cpu/team.cpp`). By default it is 300,000 times, 8 ms, on a core that a thread of the
kernels needs: one op of torch's in each layer made steps with several prompts 1.6 times as long on two threads."""


def thread_environment(num_threads: int) -> dict[str, str]:
    """Environment that limits a process to `num_threads` compute threads, which yield their cores when they are idle,
    and its memory to few malloc arenas. Libraries read it when they load, so it must be set before the process starts.
    """
    count = str(num_threads)
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), count)
    return {
        **limits,
        "GOMP_SPINCOUNT": str(OPENMP_LOOKS),
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
    }


_M_ARENA_MAX = -8
"""The option of glibc's `mallopt` that the variable `MALLOC_ARENA_MAX` sets at the start of a process."""


def take_environment(environment: Mapping[str, str]) -> None:
    """Apply variables such as those of `thread_environment` in a running process. To be called before the libraries
    that read them are loaded."""
    os.environ.update(environment)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and (arenas := environment.get("MALLOC_ARENA_MAX")):
        mallopt(_M_ARENA_MAX, int(arenas))


class Stopped(BaseException):
    """Raised when a signal of a `StopFlag` has come: by `check`, or anywhere in code that its owner made
    `interruptible`."""


class StopFlag:
    """Signals that mean "stop", as a flag that can be waited for. Made and used by the main thread.

    A handler interrupts the main thread anywhere, even in `threading.Event.wait`, whose lock it would then wait for for
    ever. So it takes no lock: it sets a bool and writes to a pipe.
    """

    def __init__(self, *signals: signal.Signals, max_signals: int | None = None) -> None:
        """`max_signals`: number of signals after which the next one ends the process at once."""
        self.is_set = False
        self._max_signals = max_signals
        self._num_signals = 0
        self._interruptible = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous = {number: signal.signal(number, self._on_signal) for number in signals}

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for a signal; returns whether one has come."""
        if not self.is_set:
            select.select([self._reader], [], [], timeout_s)
        return self.is_set

    def check(self) -> None:
        """Raises `Stopped` if a signal has come."""
        if self.is_set:
            raise Stopped

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Raise `Stopped` in the body when the first signal comes; at once if it came before.

        For bodies of plain Python only. In the middle of an extension's call, such as one of Ray's, an exception comes
        out as another one or ends the process; those bodies call `check` in between.
        """
        self._interruptible = True
        try:
            self.check()
            yield
        finally:
            self._interruptible = False

    def close(self) -> None:
        """Give the signals back to their previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first, self.is_set = not self.is_set, True
        self._num_signals += 1
        if self._num_signals == self._max_signals:
            for number in self._previous:
                signal.signal(number, signal.SIG_DFL)
        with suppress(BlockingIOError):  # the pipe is full of earlier signals
            os.write(self._writer, b"\0")
        if first and self._interruptible:
            raise Stopped


def describe(error: BaseException) -> str:
    """Text for an error in one line: the message for errors made for users, with the type for others."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """A process id and its start time: a reused id is another process."""

    pid: int
    start_ticks: int
    """Start time of the process, from /proc; -1 if it had ended already."""

    @classmethod
    def of(cls, pid: int) -> ProcessRef:
        """The process that has this id now."""
        return cls(pid, _start_ticks(pid))

    @classmethod
    def family(cls, mark: str) -> list[ProcessRef]:
        """The processes that started with `mark` (`NAME=value`) in their environment, and all that descend from them.

        A process that rewrites its title may overwrite its environment, as some of Ray's do; those are found as
        descendants, while their parents live. This process is not among them.
        """
        parents = _parents()
        family = {pid for pid in parents if pid != os.getpid() and mark.encode() in _environment(pid)}
        grown = True
        while grown:
            children = {pid for pid, parent in parents.items() if parent in family}
            grown = not children <= family
            family |= children
        return [cls.of(pid) for pid in sorted(family)]

    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        return self.start_ticks >= 0 and _start_ticks(self.pid) == self.start_ticks

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


def end_processes(processes: list[ProcessRef], grace_s: float = 5.0) -> None:
    """Wait for processes that are ending, kill those that remain after `grace_s`, and wait for their end."""
    if not _wait_gone(processes, grace_s):
        for process in processes:
            process.kill()
        _wait_gone(processes, KILL_TIMEOUT_S)


def _wait_gone(processes: list[ProcessRef], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def _start_ticks(pid: int) -> int:
    """Start time of a process, or -1 for one that is gone or a zombie."""
    state, *fields = _stat(pid) or ["Z"]
    return -1 if state == "Z" else int(fields[18])


def _parents() -> dict[int, int]:
    """Process id -> id of its parent, for all processes."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return {pid: int(stat[1]) for pid in pids if (stat := _stat(pid))}


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from field 3 (state, parent, ...) on; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _environment(pid: int) -> list[bytes]:
    """`NAME=value` strings that a process started with; empty for one that is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
