"""A process that has loaded the code and data of others, and forks them, so that they start without loading these
again.

    owner      Template(module, message, ...)                    template.fork(...) ──> ForkedProcess
                 │ python -m module, a socket as its input          │ a request, and the child's own descriptors
    template   read_first() -> loads -> serve() ──────────────────> fork ──> the child: serve() returns in it
                                          └── reports to the owner how each child ended

A fork copies one thread only, so a template never forks while it has others: the request fails, and its owner starts
the process in the usual way. When the owner ends, the template does too: its socket closes. The children of a template
that ends live on; how they end later is not known then. Linux only, for the sake of pidfds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Final, TypeVar

import msgspec

from disagg.cluster.system.children import child_environment

T = TypeVar("T")

IS_SUPPORTED: Final = hasattr(os, "pidfd_open") and sys.platform == "linux"
FORK_TIMEOUT_S: Final = 600.0
"""Seconds that a template may take to load and to fork the first child: as long as a large model's weights take."""
ANSWER_TIMEOUT_S: Final = 5.0
"""Seconds that a template that has loaded may take to fork."""
REPORT_TIMEOUT_S: Final = 1.0
"""Seconds after the end of a child within which its template must report it."""
STATUS_UNKNOWN: Final = 255
"""Exit status of a process whose template has ended, or does not report it."""
_MESSAGE_BYTES: Final = 64 << 10
_ALONE_S: Final = 1.0
"""Seconds that joined threads may take to disappear for the kernel, too."""
_PR_SET_NAME: Final = 15


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to a template for one child, sent with its standard input and output and a socket for reports."""

    name: str
    """Name of the process that the system shows, cut to 15 bytes."""
    environment: dict[str, str]
    """Variables in addition to the template's own."""


# ---------------------------------------------------------------- owner


class ForkedProcess:
    """A child of a template; the part of `subprocess.Popen` that its owner uses. Any thread."""

    def __init__(self, pid: int, pidfd: int, reports: socket.socket, stdin: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """Exit status as in `Popen`; `STATUS_UNKNOWN` if the template ended before the child, or hangs."""
        self.stdin: IO[bytes] | None = stdin
        self._pidfd = pidfd
        self._reports = reports
        self._ended_s: float | None = None
        """Time at which its end was first seen, on the monotonic clock."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Read and return the present `returncode`."""
        with self._lock:
            if self.returncode is None:
                self._look()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            rest_s = None if deadline is None else deadline - time.monotonic()
            if rest_s is not None and rest_s <= 0.0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            try:
                _is_readable(self._pidfd, rest_s)
                _is_readable(self._reports, REPORT_TIMEOUT_S if rest_s is None else min(rest_s, REPORT_TIMEOUT_S))
            except (OSError, ValueError):  # another thread saw the end
                continue
        return status

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):  # it ended, and its template has not reported that yet
                    signal.pidfd_send_signal(self._pidfd, number)

    def _look(self) -> None:
        has_ended = _is_readable(self._pidfd)
        if has_ended and self._ended_s is None:
            self._ended_s = time.monotonic()
        if not _is_readable(self._reports):
            if self._ended_s is not None and time.monotonic() - self._ended_s >= REPORT_TIMEOUT_S:
                self._end(STATUS_UNKNOWN)
            return
        try:
            report = self._reports.recv(64)
        except ConnectionError:
            report = b""
        if report:
            self._end(int(report))
        elif has_ended:  # as its template has; else it runs
            self._end(STATUS_UNKNOWN)

    def _end(self, status: int) -> None:
        self.returncode = status
        self._reports.close()
        os.close(self._pidfd)


class Template:
    """Starts a template; owner of it. Its methods are called by one thread at a time.

    Args:
        module: calls `read_first`, and `serve` as soon as it has loaded.
        message: the message that `read_first` returns.
        environment: variables in addition to this process's own.
        output: for its standard output and error.

    Raises:
        OSError: if no process can be made.
    """

    def __init__(self, module: str, message: object, environment: Mapping[str, str], output: IO[bytes]) -> None:
        self._answered_s: float | None = None
        """Time of its last fork, on the monotonic clock."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env={**child_environment(os.environ), **environment},
                start_new_session=True,
            )
            self._control.send(msgspec.json.encode(message))
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """Process id of the template itself."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the template runs and can be asked to fork."""
        return self._process.poll() is None

    def fork(self, request: ForkRequest, message: object, output: IO[bytes]) -> ForkedProcess:
        """Fork a child; waits until the template has loaded. `message` is on the child's standard input, which stays
        open as with `children.spawn`.

        Raises:
            OSError: it did not fork: it is gone, has threads, or takes longer than `FORK_TIMEOUT_S`, and than
                `ANSWER_TIMEOUT_S` once it has forked. After that only `close` may be called.
        """
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reader, writer = os.pipe()
        stdin = os.fdopen(writer, "wb")
        try:
            with theirs:
                descriptors = [reader, output.fileno(), theirs.fileno()]
                socket.send_fds(self._control, [msgspec.json.encode(request)], descriptors)
            timeout_s = FORK_TIMEOUT_S if self._answered_s is None else ANSWER_TIMEOUT_S
            reports.settimeout(timeout_s)
            try:
                pid, received, _, _ = socket.recv_fds(reports, 64, 1)
            except TimeoutError:
                raise OSError(
                    f"the template (process {self.pid}) did not answer for {timeout_s:g} s; it {self._last_answer()}"
                ) from None
            if not pid:
                raise OSError(f"the template (process {self.pid}) did not fork")
            self._answered_s = time.monotonic()
            reports.settimeout(None)
            process = ForkedProcess(int(pid), received[0], reports, stdin)
        except BaseException:
            reports.close()
            stdin.close()
            raise
        finally:
            os.close(reader)
        try:
            stdin.write(msgspec.json.encode(message) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it ended already; its exit status and log show why
        return process

    def _last_answer(self) -> str:
        if self._answered_s is None:
            return "never did"
        return f"last did {time.monotonic() - self._answered_s:.0f} s ago"

    def close(self) -> None:
        """End the template; its children live on. Idempotent."""
        self._control.close()
        self._process.kill()
        self._process.wait()


# ---------------------------------------------------------------- template


@dataclass(frozen=True, slots=True)
class _Forked:
    pid: int
    reports: socket.socket


def read_first(kind: type[T]) -> T:
    """The message of the owner; raises `msgspec.ValidationError`."""
    with _control() as control:
        content = msgspec.json.decode(control.recv(_MESSAGE_BYTES), type=kind)
        control.detach()
    return content


def owner_is_gone() -> bool:
    """Whether the owner has ended: a template that loads for long may then stop."""
    watch = select.poll()
    watch.register(0, select.POLLRDHUP)
    return bool(watch.poll(0))


def serve() -> ForkRequest | None:
    """Fork children until the owner ends: None then. In each child it returns the request that it is to become: with
    standard input, output and error of its own, in a session of its own, nothing of the template's left open."""
    control = _control()
    children: dict[int, _Forked] = {}
    while True:
        watch = select.poll()
        for descriptor in (0, *children):
            watch.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in watch.poll()]
        for descriptor in ready:
            if descriptor in children:
                _report(descriptor, children.pop(descriptor))
        if 0 in ready:
            content, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
            if not content:
                return None
            request = msgspec.json.decode(content, type=ForkRequest)
            if _fork(descriptors, children):
                _become(request, control, descriptors, children)
                return request


def _fork(descriptors: list[int], children: dict[int, _Forked]) -> bool:
    """Fork a child; returns True in the child. If there are other threads nothing is forked, which the owner sees by
    the closed socket."""
    reader, output, reports = descriptors
    with socket.socket(fileno=reports) as answers:
        if not _is_alone():
            os.close(reader)
            os.close(output)
            return False
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            answers.detach()
            return True
        os.close(reader)
        os.close(output)
        pidfd = os.pidfd_open(pid)
        children[pidfd] = _Forked(pid, answers.dup())
        with suppress(OSError):  # the owner waits no longer; the child sees the end of its standard input
            socket.send_fds(answers, [str(pid).encode()], [pidfd])
    return False


def _become(
    request: ForkRequest, control: socket.socket, descriptors: list[int], siblings: Mapping[int, _Forked]
) -> None:
    reader, output, reports = descriptors
    os.setsid()
    control.detach()
    os.dup2(reader, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in (reader, output, reports, *siblings):
        os.close(descriptor)
    for sibling in siblings.values():
        sibling.reports.close()
    os.environ.update(request.environment)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_NAME, request.name.encode()[:15], 0, 0, 0)


def _report(pidfd: int, child: _Forked) -> None:
    _, status = os.waitpid(child.pid, 0)
    os.close(pidfd)
    with child.reports, suppress(OSError):  # the owner has closed its end
        child.reports.send(str(os.waitstatus_to_exitcode(status)).encode())


def _is_alone() -> bool:
    deadline = time.monotonic() + _ALONE_S
    while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a count, quickly
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True


def _control() -> socket.socket:
    return socket.socket(fileno=0)


def _is_readable(file: int | socket.socket, timeout_s: float | None = 0.0) -> bool:
    """Whether there is data or an end to read; waits up to `timeout_s` for it, for ever with None."""
    watch = select.poll()  # `select` takes small descriptors only
    watch.register(file, select.POLLIN)
    return bool(watch.poll(None if timeout_s is None else timeout_s * 1e3))
