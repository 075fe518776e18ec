"""Liveness of the launcher's processes, by their heartbeats: one that hangs is killed.

    watch(process) ──> heartbeat(process), ... ──silence, or one step for too long──> on_hung, then kill
                                └──> forget(process), when its connection breaks

A suspended process keeps its connections, and Ray reports a process only when it is gone: without this it would never
end. Killing has a thread of its own, so that it does not wait for the start or stop of another process. The launcher
then reports the end of the process like any other.

This finds hung processes only. The death of a process is noticed elsewhere: by the controller when the stream on which
the process registered ends, or when the launcher reports its exit (`server.py`); by a gateway when its session with the
worker ends (`router/shell/worker_link.py`).

Owner: the controller's server; runs on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from disagg.cluster.config.cluster_config import RecoveryConfig
from disagg.cluster.control.launcher import Launcher
from disagg.cluster.core.gateways import is_gateway
from disagg.connections.failure_detector import SWEEP_S, FailureDetector, limit
from disagg.proto.clock.process_clock import process_clock

logger = logging.getLogger(__name__)


class ProcessIncarnation(NamedTuple):
    """One run of a process: its name, and what distinguishes it from earlier ones."""

    name: str
    """Name of the process in the launcher."""
    incarnation: str
    pid: int


class Supervisor:
    """Kills processes that hang: without a heartbeat, or too long in one step.

    Args:
        launcher: `kill` is called on a thread of the supervisor's own.
        on_hung: called with the reason before the kill, on the loop.
    """

    def __init__(
        self, config: RecoveryConfig, launcher: Launcher, on_hung: Callable[[ProcessIncarnation, str], None]
    ) -> None:
        self._detector: FailureDetector[ProcessIncarnation] = FailureDetector(
            limit(config.kill_after_s), limit(config.stuck_after_s)
        )
        self._gateway_stuck_after_s = limit(config.gateway_stuck_after_s)
        self._launcher = launcher
        self._on_hung = on_hung
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="supervisor")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin the periodic checks."""
        self._task = asyncio.create_task(self._run(), name="supervisor")

    async def stop(self) -> None:
        """Stop checking; returns when no kill is under way. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown)

    def watch(self, process: ProcessIncarnation) -> None:
        """Watch a process that has connected to the controller."""
        limit_s = self._gateway_stuck_after_s if is_gateway(process.name) else None
        self._detector.watch(process, process_clock().now(), limit_s)

    def heartbeat(
        self, process: ProcessIncarnation, turn_s: float | None = None, doing: str = "", expected_s: float = 0.0
    ) -> None:
        """Note a message of a process. `turn_s`: seconds that its engine or event loop has been in its present step;
        `expected_s`: predicted duration of that step."""
        self._detector.heartbeat(process, process_clock().now(), turn_s, doing, expected_s)

    def forget(self, process: ProcessIncarnation) -> None:
        """Stop watching a process whose connection broke. The launcher reports whether it ended."""
        self._detector.forget(process)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for process, why, _ in self._detector.sweep(process_clock().now()):
                logger.warning(
                    "%s (process %d) %s: killing it; a new process replaces it", process.name, process.pid, why
                )
                self._on_hung(process, why)
                loop.run_in_executor(self._executor, self._kill, loop, process)
            await asyncio.sleep(SWEEP_S)

    def _kill(self, loop: asyncio.AbstractEventLoop, process: ProcessIncarnation) -> None:
        try:
            self._launcher.kill(process.name, process.pid)
        except Exception:  # whatever a launcher met must not end the controller
            logger.exception("%s (process %d) could not be killed; trying again later", process.name, process.pid)
            loop.call_soon_threadsafe(self._watch_again, process)

    def _watch_again(self, process: ProcessIncarnation) -> None:
        if process in self._detector:
            self.watch(process)
