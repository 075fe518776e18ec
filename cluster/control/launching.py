"""The controller's hand on its launcher: blocking calls, one after the other, on one thread; what comes of them is told
as events on the controller's loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from disagg.cluster.control import events
from disagg.cluster.control.launch import LaunchPlan, port_of
from disagg.cluster.control.launcher import Launcher
from disagg.cluster.system.errors import LaunchError
from disagg.cluster.system.process_tools import describe
from disagg.proto.ids import WorkerId

logger = logging.getLogger(__name__)


class Launching:
    """Executes the core's commands for the launcher, in order.

    Args:
        executor: of one thread; shut down by the caller.
        address: of the controller.
        on_event: called on the loop that this was made on.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        launcher: Launcher,
        executor: ThreadPoolExecutor,
        address: str,
        on_event: Callable[[events.Event], None],
    ) -> None:
        self._plan = plan
        self._launcher = launcher
        self._executor = executor
        self._address = address
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def put(self, command: events.Command) -> None:
        """Execute it after those before."""
        self._executor.submit(self._execute, command)

    async def look(self) -> tuple[dict[str, str], dict[str, str]]:
        """What exited, and what is pending."""
        return await self._loop.run_in_executor(self._executor, self._look)

    def _look(self) -> tuple[dict[str, str], dict[str, str]]:
        try:
            return self._launcher.exited(), self._launcher.pending()
        except Exception:  # as in `_execute`
            logger.exception("the launcher cannot say what happened")
            return {}, {}

    async def stop(self, worker_ids: Sequence[WorkerId]) -> None:
        """Drop what was not begun, then end the gateway and these workers."""
        self._stopped = True
        await self._loop.run_in_executor(self._executor, self._launcher.stop_gateway)
        await self._loop.run_in_executor(self._executor, self._launcher.stop_workers, worker_ids)

    def _execute(self, command: events.Command) -> None:
        if self._stopped:
            return
        try:
            done = self._call(command)
        except Exception as error:
            # The barrier: whatever a launcher meets must not end the controller. Starts are tried again; what could
            # not be stopped is counted as gone, so that its place can be taken.
            if not isinstance(error, LaunchError):
                logger.exception("the launcher failed at %s", command)
            done = self._failed(command, str(error) if isinstance(error, LaunchError) else describe(error))
        if done is not None:
            self._loop.call_soon_threadsafe(self._on_event, done)

    def _call(self, command: events.Command) -> events.Event | None:
        match command:
            case events.StartWorker(pool=pool, index=index, start_id=start_id):
                config = msgspec.structs.replace(self._plan.worker(pool, index), start_id=start_id)
                self._launcher.start_worker(config, self._address)
            case events.StopWorkers(worker_ids=worker_ids):
                self._launcher.stop_workers(worker_ids)
                return events.WorkersStopped(worker_ids)
            case events.StartGateway(workers=workers, address=address, http_address=http_address):
                launch = self._plan.gateway(workers, port_of(address), port_of(http_address))
                self._launcher.start_gateway(launch, self._address)
            case events.StopGateway():
                self._launcher.stop_gateway()
                return events.GatewayStopped()
            case _:
                raise AssertionError(f"not for the launcher: {command}")
        return None

    def _failed(self, command: events.Command, error: str) -> Any:
        match command:
            case events.StartWorker(worker_id=worker_id, start_id=start_id):
                return events.WorkerStartFailed(worker_id, error, start_id)
            case events.StopWorkers(worker_ids=worker_ids):
                return events.WorkersStopped(worker_ids)
            case events.StartGateway():
                return events.GatewayStartFailed(error)
            case _:
                return events.GatewayStopped()
