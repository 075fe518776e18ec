"""The actor of a worker, of its first rank, or of the gateway (`HostActor`). A worker's other ranks are in
`rank_actors.py`, the controller is in `controller_actor.py`.

An actor *is* the process: its content runs on threads of its own, started when the actor is made, and no actor method
is needed to bring it up. So it comes up by itself, also when Ray has started it again on another node: it finds the
controller by name, and registers there.

    begins ──pause after many short runs───────> host.start() ──> serves ──┬── crashed ──> exit; Ray starts it again
                                                     │ fails               └── rejected, or no controller any more ─┐
                                                     └──> reported to the controller ────> leaves Ray for good <────┘

Arguments and answers are JSON, so that Ray carries only bytes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec

from disagg.cluster.control.plan import GatewaySpec, port_of, with_ports
from disagg.cluster.core.backoff import Starts, next_actor_start
from disagg.cluster.core.ranks import rank_config
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.own_node import OwnNode
from disagg.cluster.on_ray.rank_actors import end_followers, end_this_actor, rank_actors
from disagg.cluster.on_ray.store import CONTROLLER, ProcessSettings
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.cores import pin_process
from disagg.cluster.system.logs import setup_logging
from disagg.cluster.system.process_tools import describe, take_environment
from disagg.engine.config import WorkerConfig
from disagg.proto.clock.process_clock import process_clock
from disagg.proto.control import ControlState, StateRequest
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import GatewayId
from disagg.proto.messages import WorkerInfo

if TYPE_CHECKING:
    from disagg.cluster.hosts.host import Host, Phases
    from disagg.connections.shell.blocking_stream import Resolve

logger = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
POLL_S: Final = 0.2
SPEC_POLL_S: Final = 0.05
ORPHAN_LOOK_S: Final = 1.0
ORPHAN_GRACE_S: Final = 5.0
"""Seconds that Ray may have no controller before its processes end themselves."""
EXIT_CRASHED: Final = 3


class ControllerFinder:
    """Finds the present address of the controller; a `Resolve`. Ray moves the controller, but keeps its name as long as
    it exists.

    Once Ray has no such name any more, for instance after the program that owned the controller was killed, this
    process would never be ended: `orphaned` is set then.
    """

    def __init__(self) -> None:
        self.orphaned = threading.Event()
        self._unknown_since: float | None = None

    def __call__(self) -> str:
        """Return host:port. Raises `LookupError`, or an error of Ray, while there is no controller."""
        import ray

        try:
            ray.get_actor(CONTROLLER, ray_store.NAMESPACE)
        except ValueError:
            self._on_unknown(process_clock().now())
            raise LookupError("Ray has no actor of a controller") from None
        self._unknown_since = None
        address = ray_store.load(ray_store.CONTROLLER_ADDRESS, str)
        if address is None:
            raise LookupError("the controller does not listen yet")
        return address

    def _on_unknown(self, now: float) -> None:
        if self._unknown_since is None:
            self._unknown_since = now
        elif now - self._unknown_since >= ORPHAN_GRACE_S:
            self.orphaned.set()


class HostActor:
    """A worker or a gateway; see the module docstring. `content` is a `WorkerConfig`, or null: the specification of a
    gateway is in the store, or will be."""

    def __init__(self, settings: bytes, content: bytes) -> None:
        self._settings = msgspec.json.decode(settings, type=ProcessSettings)
        take_environment(self._settings.environment)
        setup_logging(os.environ)
        pin_process(self._settings.cores)
        self._began_s = time.monotonic()
        self._find = ControllerFinder()
        self._node = OwnNode(self._settings)
        self._host: Host | None = None
        """The host, once it has started."""
        self._stopping = threading.Event()
        threading.Thread(target=self._run, args=(content,), name="host", daemon=True).start()

    def stop(self) -> None:
        """Stop, and block until only the process is left. A host that is still starting is left to be killed."""
        self._stopping.set()
        if self._host is not None:
            self._host.stop()

    def _run(self, content: bytes) -> None:
        try:
            self._stopping.wait(record_start(self._settings.name))
            if self._stopping.is_set():
                return
            host = self._begin(content)
            if host is None:
                return
        except Exception as error:
            logger.exception("%s: could not start", self._settings.name)
            ray_store.save(
                ray_store.failure_key(self._settings.name), describe(error)
            )  # if the host has not reported it
            self._leave()
            return
        self._host = host
        self._watch(host)

    def _watch(self, host: Host) -> None:
        while not self._stopping.wait(POLL_S):
            if host.crashed.is_set():
                os._exit(EXIT_CRASHED)
            if host.rejected.is_set() or self._find.orphaned.is_set():
                host.stop()
                self._leave()
                return

    def _leave(self) -> None:
        end_followers(self._settings.name, self._settings.num_ranks)
        leave_ray()

    def _begin(self, content: bytes) -> Host | None:
        """Start the host; None if this process is stopped before. Imports only what is needed: torch for a worker,
        neither torch nor engine for the gateway."""
        if self._settings.kind == "gateway":
            from disagg.cluster.hosts.gateway_host import GatewayHost

            phases = self._phases()
            found = self._wait_for_spec()
            if found is None:
                return None
            spec = resumed_spec(found, self._find)
            gateway = GatewayHost(spec, self._find, ray_store.cluster_secret(), phases)
            gateway.start()
            ray_store.save(ray_store.GATEWAY_PORT, port_of(gateway.address))
            if gateway.http_address:
                ray_store.save(ray_store.GATEWAY_HTTP_PORT, port_of(gateway.http_address))
            return gateway
        from disagg.cluster.hosts.worker_host import WorkerHost

        config = msgspec.json.decode(content, type=WorkerConfig)
        mine = self._node.configured(rank_config(config, 0, sees_all_devices=False))
        start_ranks = rank_actors(config) if config.num_ranks > 1 else None
        worker = WorkerHost(mine, self._find, ray_store.cluster_secret(), start_ranks, self._phases())
        worker.start()
        return worker

    def _wait_for_spec(self) -> GatewaySpec | None:
        """Wait for the gateway's specification, which exists once it is to be started; None if this process is to end
        before that."""
        key, look_due = ray_store.gateway_spec_key(self._settings.name), 0.0
        while (spec := ray_store.load(key, GatewaySpec)) is None:
            if self._stopping.wait(SPEC_POLL_S):
                return None
            if (now := time.monotonic()) >= look_due:
                look_due = now + ORPHAN_LOOK_S
                if self._is_orphaned():
                    self._leave()
                    return None
        return spec

    def _is_orphaned(self) -> bool:
        with suppress(Exception):  # without a controller for a moment, or without Ray's store
            self._find()
        return self._find.orphaned.is_set()

    def _phases(self) -> Phases:
        """Phases of the start from the actor on. The time at which Ray was asked for it is known by another clock only,
        and its process may be older."""
        from disagg.cluster.hosts.host import first_phases

        return first_phases(None, 0.0, self._began_s, time.monotonic())


def resumed_spec(spec: GatewaySpec, resolve: Resolve) -> GatewaySpec:
    """The specification of a restarted gateway: the ports of the first process, and the present workers."""
    port = ray_store.load(ray_store.GATEWAY_PORT, int)
    if port is None:
        return spec
    http_port = ray_store.load(ray_store.GATEWAY_HTTP_PORT, int)
    return msgspec.structs.replace(
        spec,
        gateway=with_ports(spec.gateway, port, http_port),
        gateway_id=GatewayId(f"{spec.name}-{uuid.uuid4().hex[:8]}"),
        workers=present_workers(resolve) or spec.workers,
    )


def present_workers(resolve: Resolve) -> tuple[WorkerInfo, ...]:
    """The workers that can be used now; none if the controller does not answer."""
    from disagg.cluster.control.controller_link import call_controller

    try:
        state = call_controller(resolve(), StateRequest(), ray_store.cluster_secret())
    except (LookupError, UnavailableError, LaunchError) as error:
        logger.warning("%s", error)
        return ()
    if not isinstance(state, ControlState):
        return ()
    return tuple(record.info for record in state.workers if record.phase == "ready" and record.info is not None)


def record_start(name: str) -> float:
    """Record a start of this process; returns the seconds that it has to wait first."""
    key = ray_store.starts_key(name)
    starts, pause_s = next_actor_start(ray_store.load(key, Starts) or Starts(), time.time())
    ray_store.save(key, starts)
    if pause_s:
        logger.warning(
            "%s ended %d times in a row soon after its start; starting in %g s", name, starts.count - 1, pause_s
        )
    return pause_s


def leave_ray() -> None:
    """End this actor's process for good, and remove its placement group."""
    import ray

    group = ray.util.get_current_placement_group()
    end_this_actor()
    if group is not None:
        ray.util.remove_placement_group(group)


def was_restarted() -> bool:
    """Whether Ray has started this actor before."""
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)
