"""Start and stop of processes for the controller: Ray (`on_ray/launcher.py`) or child processes of this one
(`hosts/processes.py`).

`Launcher` is the interface; its methods may block. `LauncherThread` calls them one after the other on one thread, and
reports their results as events on the controller's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec

from disagg.cluster.config.cluster_config import PoolConfig
from disagg.cluster.control.plan import GatewaySpec, port_of
from disagg.cluster.control.plans import Plans
from disagg.cluster.core import events
from disagg.cluster.core.gateways import gateway_names
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.process_tools import describe
from disagg.engine.config import WorkerConfig
from disagg.proto.ids import WorkerId

logger = logging.getLogger(__name__)


class Launcher(Protocol):
    """Starts and ends processes. Its methods may block; the controller calls them on one thread of its own, one after
    the other. The name of a worker's process is its id, those of gateways are `gateways.gateway_names`."""

    restarts: bool
    """Whether the launcher restarts a process that ends by itself (Ray does that)."""

    def running(self) -> frozenset[str]:
        """The names of processes that an earlier controller of this cluster left running. Called once, first."""
        ...

    def start_worker(self, config: WorkerConfig, controller_address: str, pool: PoolConfig) -> None:
        """Begin to start a worker, which registers with the controller by itself, or reports there why it cannot start.
        `pool`: where it may run.

        Raises:
            LaunchError: if not even that can be begun.
        """
        ...

    def prepare_gateways(self, names: Sequence[str]) -> None:
        """Load code for gateways of these names, which will be started once there are workers. Called once, after the
        starts of the first workers were begun."""
        ...

    def stop_workers(self, worker_ids: Sequence[WorkerId]) -> None:
        """End the processes of these workers, side by side; returns when they are gone. Idempotent; unknown ids and
        processes that ended already are fine."""
        ...

    def start_gateway(self, spec: GatewaySpec, controller_address: str) -> None:
        """Begin to start a gateway, which follows the controller by itself, or reports to it why it cannot start.
        Raises `LaunchError`."""
        ...

    def stop_gateways(self, names: Sequence[str]) -> None:
        """End the processes of these gateways, side by side; returns when they are gone. Idempotent."""
        ...

    def keep_only(self, workers: Sequence[WorkerConfig]) -> None:
        """Release what only other workers need, after a rollout. From now on workers are started like these, one for
        each pool."""
        ...

    def kill(self, name: str, pid: int) -> None:
        """End a process that hangs, at once and by force, if its name still has that process id; else do
        nothing. Unlike the others it is called on any thread, at any time."""
        ...

    def exited(self) -> dict[str, str]:
        """Reasons by name of processes that ended by themselves, will not be restarted, and were not reported yet, with
        the end of the log."""
        ...

    def pending(self) -> dict[str, str]:
        """Processes whose start was begun and that cannot run yet: name -> what they wait for, as text for
        operators."""
        ...


class LauncherThread:
    """Executes the core's commands for the launcher, in order.

    Args:
        executor: an executor of one thread, shut down by the caller.
        address: the controller's address.
        on_event: called on the event loop on which this object was made.
    """

    def __init__(
        self,
        plans: Plans,
        launcher: Launcher,
        executor: ThreadPoolExecutor,
        address: str,
        on_event: Callable[[events.Event], None],
    ) -> None:
        self._plans = plans
        self._launcher = launcher
        self._executor = executor
        self._address = address
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def put(self, command: events.Command) -> None:
        """Execute a command after those before it."""
        self._executor.submit(self._execute, command)

    def prepare_gateways(self, names: Sequence[str]) -> None:
        """Call `Launcher.prepare_gateways` after the commands before it."""
        self._executor.submit(self._try, "gateways are not prepared", lambda: self._launcher.prepare_gateways(names))

    def keep_only(self) -> None:
        """Call `Launcher.keep_only` after the commands before it."""
        failed = "what only earlier generations needed could not be released"
        self._executor.submit(self._try, failed, lambda: self._launcher.keep_only(self._plans.workers))

    def _try(self, failed: str, call: Callable[[], None]) -> None:
        if self._stopped:
            return
        try:
            call()
        except Exception:  # as in `_execute`
            logger.exception("%s", failed)

    async def poll(self) -> tuple[dict[str, str], dict[str, str]]:
        """Results of `Launcher.exited` and `Launcher.pending`."""
        return await self._loop.run_in_executor(self._executor, self._poll)

    def _poll(self) -> tuple[dict[str, str], dict[str, str]]:
        try:
            return self._launcher.exited(), self._launcher.pending()
        except Exception:  # as in `_execute`
            logger.exception("the launcher could not be polled; trying again")
            return {}, {}

    async def stop(self, worker_ids: Sequence[WorkerId]) -> None:
        """Drop the commands that were not begun, then end the gateways and these workers."""
        self._stopped = True
        gateways = gateway_names(self._plans.present.config.gateway.replicas)
        await self._loop.run_in_executor(self._executor, self._launcher.stop_gateways, gateways)
        await self._loop.run_in_executor(self._executor, self._launcher.stop_workers, worker_ids)

    def _execute(self, command: events.Command) -> None:
        if self._stopped:
            return
        try:
            done = self._call(command)
        except Exception as error:
            # The exception boundary: no error of a launcher may end the controller. Starts are tried again; what could
            # not be stopped is counted as gone, so that its place can be taken.
            if not isinstance(error, LaunchError):
                logger.exception("the launcher could not execute %s", command)
            done = self._failed(command, str(error) if isinstance(error, LaunchError) else describe(error))
        if done is not None:
            self._loop.call_soon_threadsafe(self._on_event, done)

    def _call(self, command: events.Command) -> events.Event | None:
        match command:
            case events.StartWorker(pool=pool, index=index, start_id=start_id, config_hash=config_hash):
                config, place = self._plans.worker(pool, index, config_hash)
                config = msgspec.structs.replace(config, start_id=start_id)
                self._launcher.start_worker(config, self._address, place)
            case events.StopWorkers(worker_ids=worker_ids):
                self._launcher.stop_workers(worker_ids)
                return events.WorkersStopped(worker_ids)
            case events.StartGateway(workers=workers, address=address, http_address=http_address, name=name):
                spec = self._plans.present.gateway(workers, port_of(address), port_of(http_address), name)
                spec = msgspec.structs.replace(spec, adapters=self._plans.adapters.served)
                self._launcher.start_gateway(spec, self._address)
            case events.StopGateway(name=name):
                self._launcher.stop_gateways([name])
                return events.GatewayStopped(name)
            case _:
                raise AssertionError(f"not for the launcher: {command}")
        return None

    def _failed(self, command: events.Command, error: str) -> Any:
        match command:
            case events.StartWorker(worker_id=worker_id, start_id=start_id):
                return events.WorkerStartFailed(worker_id, error, start_id)
            case events.StopWorkers(worker_ids=worker_ids):
                return events.WorkersStopped(worker_ids)
            case events.StartGateway(name=name):
                return events.GatewayStartFailed(error, name)
            case events.StopGateway(name=name):
                return events.GatewayStopped(name)
            case _:
                raise AssertionError(f"not for the launcher: {command}")
