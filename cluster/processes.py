"""The launcher without Ray: workers and gateway as child processes of this one.

    start()   workers (all at once) -> their ready lines -> gateway -> its ready line
    stop()    SIGTERM to the gateway, then to the workers; SIGKILL for what is left after a grace

Children get their configuration on standard input and end by themselves when that closes, so that they also go when
this process is killed. Each writes its log to a file; the end of it becomes part of the error when a start fails.
Only own children are ever signalled.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from disagg.cluster.config import ClusterConfig
from disagg.cluster.errors import LaunchError
from disagg.cluster.launch import (
    CHECK_STOP_INTERVAL_S,
    GATEWAY,
    LOG_TAIL_LINES,
    START_TIMEOUT_S,
    CheckStop,
    Cluster,
    GatewayInfo,
    Progress,
    never_stop,
    no_progress,
    with_log,
)
from disagg.cluster.process_tools import describe_exit, last_lines, thread_environment
from disagg.proto.messages import WorkerInfo

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0
"""What children get after SIGTERM, before SIGKILL."""


@dataclass(slots=True)
class Child:
    """One child process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    answer: bytearray = field(default_factory=bytearray)
    """What it has written on standard output; complete with its newline, or when it ended."""

    @property
    def answered(self) -> bool:
        """Whether the ready line is here."""
        return self.answer.endswith(b"\n")

    def log_tail(self) -> str:
        """The end of its log."""
        return last_lines(self.log, LOG_TAIL_LINES)


def start_child(name: str, module: str, config: msgspec.Struct, log_dir: Path, environment: Mapping[str, str]) -> Child:
    """Start `python -m module` and hand it its configuration."""
    log = log_dir / f"{name}.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **environment},
            start_new_session=True,  # a Ctrl-C in the terminal is ours; we tell the children in order
        )
    child = Child(name, process, log)
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:  # it ended already; reading its answer says why
        pass
    return child


def wait_ready(
    children: Sequence[Child],
    kind: type[T],
    timeout_s: float,
    progress: Progress = no_progress,
    check_stop: CheckStop = never_stop,
) -> list[T]:
    """The ready lines of all children, in their order; raises `LaunchError` for the first one that fails or is late."""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.process.stdout is not None
            selector.register(child.process.stdout, selectors.EVENT_READ, child)
        while selector.get_map():
            check_stop()
            for key, _ in selector.select(min(CHECK_STOP_INTERVAL_S, max(0.0, deadline - time.monotonic()))):
                child = key.data
                if not _read_answer(child):
                    continue
                selector.unregister(key.fileobj)
                _check_answer(child)
                progress(child.name, "ready")
            if selector.get_map() and time.monotonic() >= deadline:
                late = [key.data for key in selector.get_map().values()]
                names = ", ".join(child.name for child in late)
                raise LaunchError(
                    f"{names}: not ready after {timeout_s:g} s; log of {late[0].name}:\n{late[0].log_tail()}"
                )
    return [msgspec.json.decode(child.answer, type=kind) for child in children]


def _read_answer(child: Child) -> bool:
    """Read what is there; whether the answer is complete, or the child has closed its output without one."""
    assert child.process.stdout is not None
    piece = os.read(child.process.stdout.fileno(), 65536)
    child.answer += piece
    return child.answered or not piece


def _check_answer(child: Child) -> None:
    if not child.answered:
        reason = f"{describe_exit(child.process.wait())} before it was ready"
        raise LaunchError(f"{child.name}: {with_log(reason, child.log_tail())}")
    answer: dict[str, Any] = msgspec.json.decode(child.answer)
    if "error" in answer:
        raise LaunchError(f"{child.name}: {answer['error']}")


def stop_children(children: Sequence[Child], timeout_s: float = STOP_TIMEOUT_S) -> list[str]:
    """End children that still run and reap all; returns the names of those that had to be killed."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + timeout_s
    killed = []
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
            killed.append(child.name)
        _close_pipes(child)
    return killed


def _close_pipes(child: Child) -> None:
    for pipe in (child.process.stdin, child.process.stdout):
        if pipe is None:
            continue
        try:
            pipe.close()
        except BrokenPipeError:  # its configuration was never read
            continue


class ProcessCluster(Cluster):
    """A cluster of child processes; also a context manager. Owner of its children and of its log folder."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        progress: Progress = no_progress,
        log_dir: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(config, progress, start_timeout_s)
        self.killed: list[str] = []
        """After `stop`: the processes that did not end when told to."""
        self._keep_logs = log_dir is not None
        self._log_dir = log_dir
        self._workers: list[Child] = []
        self._gateway: list[Child] = []

    def _start(self, check_stop: CheckStop) -> None:
        log_dir = self._make_log_dir()
        for config in self._plan.workers:
            self._progress(config.worker_id, "starting")
            environment = thread_environment(config.num_threads)
            child = start_child(config.worker_id, "disagg.cluster.worker_process", config, log_dir, environment)
            self._workers.append(child)
        timeout_s = self._start_timeout_s
        self._infos = wait_ready(self._workers, WorkerInfo, timeout_s, self._progress, check_stop)
        self._progress(GATEWAY, "starting")
        launch = self._plan.gateway(self._infos)
        self._gateway = [start_child(GATEWAY, "disagg.cluster.gateway_process", launch, log_dir, thread_environment(1))]
        (info,) = wait_ready(self._gateway, GatewayInfo, timeout_s, self._progress, check_stop)
        self._address = info.address

    def _make_log_dir(self) -> Path:
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="disagg-logs-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return self._log_dir

    def pid(self, name: str) -> int:
        """The process id of a worker or of the gateway; raises `KeyError`."""
        return self._child(name).process.pid

    def _child(self, name: str) -> Child:
        return {child.name: child for child in (*self._workers, *self._gateway)}[name]

    def lost(self) -> list[str]:
        """See `launch.Cluster`."""
        return [child.name for child in (*self._gateway, *self._workers) if child.process.poll() is not None]

    def why_lost(self, name: str) -> str:
        """See `launch.Cluster`."""
        child = self._child(name)
        return with_log(describe_exit(child.process.wait()), child.log_tail())

    def stop(self) -> None:
        """See `launch.Cluster`."""
        self.killed += stop_children(self._gateway)
        self.killed += stop_children(self._workers)
        for child in (*self._gateway, *self._workers):
            self._progress(child.name, "stopped")
        self._gateway, self._workers = [], []
        if self._log_dir is not None and not self._keep_logs:
            shutil.rmtree(self._log_dir, ignore_errors=True)
