"""Has processes killed that hang: of the launcher's own, and no others.

    watch(name, life, pid) ──> heard(life), heard(life), ... ──silence, or one step for too long──> on_hung, then kill
                                                                                          forget(life) <── line broke

A process that was stopped keeps its connections, and nobody else would ever end it: Ray reports a process only when it
is gone. Killing takes a thread of its own, so that it waits for no start or stop of another process. What a kill leaves
behind is seen as any other end of a process.

Owner: the controller's server; lives on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from disagg.cluster.config.cluster_config import RecoveryConfig
from disagg.cluster.control.gateways import GATEWAY
from disagg.cluster.control.launcher import Launcher
from disagg.router.shell.failure_detector import SWEEP_S, FailureDetector, limit

logger = logging.getLogger(__name__)


class ProcessIncarnation(NamedTuple):
    """One life of a process."""

    name: str
    """As the launcher knows it."""
    incarnation: str
    pid: int


class Supervisor:
    """See the module docstring.

    Args:
        launcher: `kill` is called on a thread of the supervisor's own.
        on_hung: told before the kill, with why; called on the loop.
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
        """Begin to look."""
        self._task = asyncio.create_task(self._run(), name="supervisor")

    async def stop(self) -> None:
        """Look no longer; returns when no kill is under way. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(self._executor.shutdown)

    def watch(self, life: ProcessIncarnation) -> None:
        """This life has a line to the controller."""
        self._detector.watch(life, self._gateway_stuck_after_s if life.name == GATEWAY else None)

    def heard(self, life: ProcessIncarnation, turn_s: float | None = None, doing: str = "") -> None:
        """It spoke, and its engine or event loop has been in its present turn for so long."""
        self._detector.heartbeat(life, turn_s, doing)

    def forget(self, life: ProcessIncarnation) -> None:
        """Its line broke. That it ended, or not, is seen otherwise."""
        self._detector.forget(life)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for life, why in self._detector.sweep(time.monotonic()):
                logger.warning("%s (process %d) %s: killing it", life.name, life.pid, why)
                self._on_hung(life, why)
                loop.run_in_executor(self._executor, self._kill, loop, life)
            await asyncio.sleep(SWEEP_S)

    def _kill(self, loop: asyncio.AbstractEventLoop, life: ProcessIncarnation) -> None:
        try:
            self._launcher.kill(life.name, life.pid)
        except Exception:  # whatever a launcher met must not end the controller
            logger.exception("%s (process %d) could not be killed; that is tried again", life.name, life.pid)
            loop.call_soon_threadsafe(self._watch_again, life)

    def _watch_again(self, life: ProcessIncarnation) -> None:
        if life in self._detector:
            self.watch(life)
