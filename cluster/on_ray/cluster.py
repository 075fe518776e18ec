"""A cluster under Ray that runs as long as this process: `disagg up`. Ray places, starts, restarts and stops; no
token and no KV byte goes through it.

    start()   private Ray (or join one) -> controller actor -> it starts workers, then the gateway -> all of them ready
    stop()    controller: gateway stops, workers stop -> Ray goes -> its folder goes

The controller is called over gRPC; Ray starts it again when it crashes, and the rest serves on.
"""

from __future__ import annotations

import os
from typing import Any

from typing_extensions import override

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.control.cluster import (
    START_TIMEOUT_S,
    CheckStop,
    Cluster,
    Progress,
    never_stop,
    no_progress,
)
from disagg.cluster.control.controller_link import call_controller
from disagg.cluster.core import state_diff
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.controller_client import (
    check_controller,
    controller_address,
    create_controller,
    end_controller,
    wait_for_answer,
)
from disagg.cluster.on_ray.joined import JoinedSession
from disagg.cluster.on_ray.places import check_places, known_nodes
from disagg.cluster.on_ray.private import PrivateSession, auth_warnings
from disagg.cluster.on_ray.session import Session
from disagg.cluster.on_ray.store import ControllerSettings
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.cores import available_cores
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import Dtype
from disagg.proto.control import ControlReply, ControlRequest, ControlState, StateRequest
from disagg.proto.errors import UnavailableError

PRIVATE = "local"
"""Value of `ray.address` for a private Ray."""


class RayCluster(Cluster):
    """A cluster of Ray actors; also a context manager. Owner of its controller, which owns the other actors, and of its
    session."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        progress: Progress = no_progress,
        start_timeout_s: float = START_TIMEOUT_S,
        cpu_dtype: Dtype = "bfloat16",
    ) -> None:
        super().__init__(config, progress, start_timeout_s, cpu_dtype)
        self._is_private = self._is_one_machine(config)
        self._session: Session
        if self._is_private:
            num_processes = 1 + config.gateway.replicas + sum(worker.num_ranks for worker in self._plan.workers)
            self._session = PrivateSession(config.ray.temp_dir, self._plan.cores.gateway, num_processes)
        else:
            self._session = JoinedSession(config.ray.address)
        self._controller: Any | None = None
        self._controller_address = ""
        """Last known host:port of the controller."""
        self._secret: ClusterSecret | None = None
        self._state: ControlState = state_diff.EMPTY_STATE

    @staticmethod
    @override
    def _is_one_machine(config: ClusterConfig) -> bool:
        return config.ray.address == PRIVATE

    @property
    @override
    def warnings(self) -> tuple[str, ...]:
        return auth_warnings(os.environ) if self._is_private else ()

    @property
    @override
    def _twin_key(self) -> str:
        return super()._twin_key if self._is_private else ""

    @override
    def start(self, check_stop: CheckStop = never_stop) -> None:
        super().start(check_stop)
        self._session.settle()

    def _open(self, check_stop: CheckStop) -> None:
        self._progress("ray", "starting")
        self._session.open()
        if not self._is_private and (nodes := known_nodes(may_join=False)) is not None:
            check_places(self._plan.config, nodes)
        check_stop()
        self._progress("ray", "ready")
        self._progress("controller", "starting")
        cores = available_cores() if self._is_private else ()
        settings = ControllerSettings(
            config=self._plan.config,
            cores=cores,
            is_private=self._is_private,
            twin_key=self._twin_key,
            cpu_dtype=self._plan.cpu_dtype,
        )
        self._controller = create_controller(settings, detached=False)
        self._secret = ray_store.cluster_secret()
        self._controller_address = wait_for_answer(self._controller, check_stop, self._start_timeout_s).address
        self._progress("controller", "ready")

    @override
    def _waits_for(self, name: str) -> str:
        return "Ray starts its process"

    @override
    def state(self) -> ControlState:
        if self._controller is None:
            return self._state
        try:
            reply = self._call(StateRequest())
        except UnavailableError:
            return self._state
        assert isinstance(reply, ControlState), f"the controller replied to a StateRequest with {reply}"
        self._state = reply
        return reply

    @override
    def control(self, request: ControlRequest) -> ControlReply:
        try:
            return self._call(request)
        except UnavailableError as error:
            raise LaunchError(str(error)) from None

    def _call(self, request: ControlRequest) -> ControlReply:
        """Call the controller, and return its reply. Only if it does not answer, it is looked up in Ray: it may have
        moved, or be gone.

        Raises:
            UnavailableError: while it cannot be reached.
            LaunchError: when it is gone for good.
        """
        if self._secret is None:
            raise UnavailableError("the cluster was not started", "controller_away")
        try:
            return call_controller(self._controller_address, request, self._secret)
        except UnavailableError:
            check_controller()
            self._controller_address = controller_address() or self._controller_address
            raise

    @override
    def stop(self) -> None:
        controller, self._controller = self._controller, None
        if self._session.is_open and controller is not None and self._session.has_head:
            end_controller(controller)  # else the session ends all processes of its Ray
        self._session.close()
        for name in self._started:
            self._progress(name, "stopped")
        self._started = []
