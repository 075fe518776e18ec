"""The interface of a running cluster, the same for both launchers (`on_ray/cluster.py`, `hosts/processes.py`)."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Self

from disagg.cluster.config.cluster_config import ClusterConfig, unused_pools
from disagg.cluster.config.memory import machine_memory
from disagg.cluster.control.plan import ClusterPlan, check_gateway, plan_cluster
from disagg.cluster.control.twin_process import key_for, obstacle
from disagg.cluster.core import state_diff
from disagg.cluster.system.children import LaunchError
from disagg.engine.config import Dtype
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.control import ControlReply, ControlRequest, ControlState
from disagg.proto.messages import WorkerInfo

START_TIMEOUT_S = 180.0
"""Seconds that the whole cluster may take to start."""

Progress = Callable[[str, str], None]
"""Called with (process name, its state): `starting`, `ready`, `stopped`; or, while it starts, a text for people about
what it does."""


def no_progress(name: str, state: str) -> None:
    """The default: reports nothing."""


CheckStop = Callable[[], None]
"""Called again and again during a start; ends it by raising."""

CHECK_STOP_INTERVAL_S = 0.05


def never_stop() -> None:
    """The default: a start runs to its end."""


def notes_of(config: ClusterConfig, twin_key: str, num_cores: int) -> tuple[str, ...]:
    """Notes on settings that have no effect. `twin_key`: see `TwinSettings`; `num_cores`: cores of the controller's
    machine."""
    twin = obstacle(config, twin_key, os.environ, num_cores)
    return (*unused_pools(config), *([twin] if twin else []))


class Cluster(ABC):
    """A running cluster, with any launcher; also a context manager. `stop` leaves no process behind."""

    def __init__(
        self, config: ClusterConfig, progress: Progress, start_timeout_s: float, cpu_dtype: Dtype = "bfloat16"
    ) -> None:
        """`cpu_dtype` is that of `ClusterPlan`."""
        memory_bytes = machine_memory() if self._is_one_machine(config) else None
        self._plan = plan_cluster(config, cpu_dtype=cpu_dtype, memory_bytes=memory_bytes)
        self._progress = progress
        self._start_timeout_s = start_timeout_s
        self._started: list[str] = []
        """Names of processes that were reported as starting; `stop` reports their end."""
        self._doing: dict[str, str] = {}
        """Latest report of each worker that starts, by process name."""

    @staticmethod
    def _is_one_machine(config: ClusterConfig) -> bool:
        """Whether all workers are on this machine."""
        return True

    @property
    def plan(self) -> ClusterPlan:
        """Plan of the processes that are, or will be, started."""
        return self._plan

    @property
    def address(self) -> str:
        """host:port for clients; empty while there is no gateway."""
        return state_diff.gateway_address(self.state())

    @property
    def http_address(self) -> str:
        """host:port of the HTTP server for clients; empty while there is no gateway, or if it serves no HTTP."""
        return next((g.http_address for g in self.state().gateways if g.http_address), "")

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers that are ready, in the order of their pools."""
        return [record.info for record in self.state().workers if record.phase == "ready" and record.info is not None]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Dangers to show to the user before it starts."""
        return ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user before it starts that are no warnings."""
        plan = self._plan
        return (*plan.cores.warnings, *plan.memory, *notes_of(plan.config, self._twin_key, len(plan.available)))

    @property
    def _twin_key(self) -> str:
        """API key of an admin that the controller gives to a twin; empty without one."""
        return key_for(self._plan.config, os.environ)

    def start(self, check_stop: CheckStop = never_stop) -> None:
        """Blocks until requests can be served; raises `LaunchError`, `ConfigError` or what `check_stop` raises, and
        then nothing is left running."""
        try:
            check_gateway(self._plan.config)
            deadline = process_clock().now() + self._start_timeout_s
            self._open(check_stop)
            self._wait_settled(deadline, check_stop)
        except BaseException:
            self.stop()
            raise

    def _wait_settled(self, deadline: float, check_stop: CheckStop) -> None:
        """Wait until all processes are ready; raises `LaunchError` at the first process that cannot start."""
        before: ControlState | None = None
        while True:
            check_stop()
            state = self.state()
            self._report(state_diff.diff(before, state))
            self._report_doing(state)
            if failure := state_diff.first_failure(state):
                raise LaunchError(failure)
            if state.is_settled:
                return
            if process_clock().now() >= deadline:
                raise LaunchError(state_diff.timeout_message(state, self._start_timeout_s))
            before = state
            time.sleep(CHECK_STOP_INTERVAL_S)

    def _report(self, changes: Sequence[state_diff.Change]) -> None:
        for change in changes:
            if change.what == "starting":
                self._started.append(change.name)
            if change.what in ("starting", "ready"):
                self._progress(change.name, change.what)

    def _report_doing(self, state: ControlState) -> None:
        for record in state.workers:
            doing = (record.detail or self._waits_for(record.worker_id)) if record.phase == "starting" else ""
            if doing and doing != self._doing.get(record.worker_id):
                self._progress(record.worker_id, doing)
            self._doing[record.worker_id] = doing

    def _waits_for(self, name: str) -> str:
        """What a starting process waits for before it can report; empty where that is not known."""
        return ""

    @abstractmethod
    def _open(self, check_stop: CheckStop) -> None:
        """Start the controller, which starts the rest."""

    @abstractmethod
    def state(self) -> ControlState:
        """The controller's observed state; the latest one while the controller cannot be reached, an empty one before
        the start. Raises `LaunchError` when the controller is gone for good."""

    @abstractmethod
    def control(self, request: ControlRequest) -> ControlReply:
        """Call the controller. Raises `LaunchError` when it does not answer."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the gateway first, then workers, then the rest, and report progress. Idempotent."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
