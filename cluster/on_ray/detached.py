"""`disagg cluster start | stop | status | leave`: a cluster that runs detached in a Ray cluster.

The controller is a detached actor: it outlives the command that made it, Ray starts it again where it dies, and it
starts the rest by itself, when nodes join.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.control.cluster import START_TIMEOUT_S, never_stop
from disagg.cluster.control.plan import check_gateway
from disagg.cluster.control.plans import SavedState
from disagg.cluster.core import state_diff
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.controller_client import (
    call_controller,
    changed_sizes,
    check_controller,
    create_controller,
    end_controller,
    find_controller,
    wait_for_answer,
)
from disagg.cluster.on_ray.joined import AUTO, JoinedSession
from disagg.cluster.on_ray.places import check_places, known_nodes
from disagg.cluster.on_ray.store import ControllerSettings
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import table
from disagg.connections.addresses import split_address
from disagg.engine.config import Dtype
from disagg.proto.control import ControlRefused, ControlState, DrainRequest, ScaleRequest, StateRequest
from disagg.proto.errors import UnavailableError
from disagg.proto.ids import Incarnation, WorkerId

POLL_INTERVAL_S = 0.2
LEAVE_GRACE_S = 15.0
"""Seconds that a drained worker's process may take to end."""


def ray_address(config: ClusterConfig, option: str | None) -> str:
    """The address of the Ray cluster to join: the command line's, or the file's, where `local` means none."""
    if option is not None:
        return option
    return AUTO if config.ray.address == "local" else config.ray.address


def run_start(
    config: ClusterConfig, address: str, console: Console, wait_s: float | None, cpu_dtype: Dtype = "bfloat16"
) -> None:
    """Start a cluster on this node of a Ray cluster, or resize a running one to the file's pool sizes.

    Args:
        wait_s: wait that long until everything serves; None returns as soon as the controller runs.
        cpu_dtype: what `model.dtype: auto` is on the CPUs of a cluster that begins.

    Raises:
        LaunchError: if it cannot begin, runs with another configuration, or is not ready in time.
        ConfigError: if the nodes that there can be have no place for a worker.
    """
    with joined(address):
        if find_controller() is None:
            check_gateway(config)
            if (nodes := known_nodes(may_join=True)) is not None:
                check_places(config, nodes)
            _create(config, cpu_dtype)
            console.print("the controller runs and starts the workers as nodes come", highlight=False)
        else:
            _update(config, console)
        if wait_s is not None:
            _wait_settled(console, wait_s)
        console.print(f"gateway: {_gateway_address(config)}", highlight=False, soft_wrap=True)
        console.print(f"next: {command('cluster status')}", highlight=False, markup=False, soft_wrap=True, style="dim")


def run_stop(address: str, console: Console) -> None:
    """End controller, gateway and workers, and their leftovers. Idempotent. Raises `LaunchError`."""
    with joined(address):
        controller = find_controller()
        end_controller(controller)
        console.print("nothing was running" if controller is None else "stopped", highlight=False)


def run_status(address: str, console: Console) -> None:
    """Print pools, workers and the gateway. Raises `LaunchError` if there is no cluster, or its controller is away."""
    with joined(address):
        if find_controller() is None:
            raise LaunchError(f"no cluster runs here; start one with: {command('cluster start --config FILE')}")
        show(_state(), console)


def run_leave(address: str, console: Console, deadline_s: float) -> None:
    """Drain the workers of this node and wait until they have left it. The only ready worker of a pool is not drained:
    its requests are computed again once another one is ready.

    Args:
        deadline_s: seconds for their sequences to move or end.

    Raises:
        LaunchError: if one is still there some time after that.
    """
    import ray

    with joined(address):
        if find_controller() is None:
            console.print("nothing is running", highlight=False)
            return
        leaving: set[tuple[WorkerId, Incarnation]] = set()
        here = str(ray.util.get_node_ip_address())
        for worker_id, incarnation in ready_on(_state(), here):
            reply = call_controller(DrainRequest(worker_id=worker_id, deadline_s=deadline_s))
            if isinstance(reply, ControlRefused):
                console.print(f"{worker_id} stays: {reply.message}", highlight=False, markup=False, soft_wrap=True)
            else:
                leaving.add((worker_id, incarnation))
        until = time.monotonic() + deadline_s + LEAVE_GRACE_S
        state = _state()
        while left := leaving & present(state):
            if time.monotonic() >= until:
                raise LaunchError(f"{', '.join(sorted(name for name, _ in left))}: still there; it goes on")
            time.sleep(POLL_INTERVAL_S)
            state = latest_state(state)
        console.print(f"left: {', '.join(sorted(name for name, _ in leaving)) or 'none'}", highlight=False)


def ready_on(state: ControlState, host: str) -> list[tuple[WorkerId, Incarnation]]:
    """The workers that are ready on a host, and their incarnations."""
    return [
        (record.worker_id, record.info.incarnation)
        for record in state.workers
        if record.phase == "ready" and record.info is not None and split_address(record.info.address)[0] == host
    ]


def present(state: ControlState) -> set[tuple[WorkerId, Incarnation]]:
    """All workers that have a process, and their incarnations."""
    return {(record.worker_id, record.info.incarnation) for record in state.workers if record.info is not None}


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Join that Ray cluster while the body runs."""
    session = JoinedSession(address)
    try:
        session.open()
        yield
    finally:
        session.close()


def _create(config: ClusterConfig, cpu_dtype: Dtype) -> None:
    settings = ControllerSettings(config=config, cores=(), is_private=False, cpu_dtype=cpu_dtype)
    controller = create_controller(settings, detached=True)
    try:
        wait_for_answer(controller, never_stop, START_TIMEOUT_S)
    except BaseException:
        end_controller(controller)
        raise


def _update(config: ClusterConfig, console: Console) -> None:
    running = ray_store.load(ray_store.CONFIG, ClusterConfig)
    saved = ray_store.load(ray_store.DESIRED, SavedState)
    if saved is not None and saved.desired.target.generation > 1:  # applied; the sizes may have been set since
        running = saved.present
    if running is None:
        raise LaunchError(
            f"a cluster runs here, but not its configuration; end it first with `{command('cluster stop')}`"
        )
    sizes = changed_sizes(running, config)
    if not sizes:
        console.print("runs already", highlight=False)
        return
    reply = call_controller(ScaleRequest(sizes=sizes))
    if isinstance(reply, ControlRefused):
        raise LaunchError(f"{reply.field}: {reply.message}")
    ray_store.save(ray_store.CONFIG, config)
    texts = ", ".join(f"{name}={size}" for name, size in sizes.items())
    console.print(f"runs already; sizes are now {texts}", highlight=False)


def _state() -> ControlState:
    """The state of the cluster; raises `LaunchError` while the controller cannot be reached."""
    try:
        return _ask_state()
    except UnavailableError as error:
        raise LaunchError(str(error)) from None


def _ask_state() -> ControlState:
    state = call_controller(StateRequest())
    assert isinstance(state, ControlState), f"the controller replied to a StateRequest with {state}"
    return state


def latest_state(before: ControlState) -> ControlState:
    """The state of the cluster; `before` where the controller does not answer this time: it may be busy, or Ray starts
    it again. Raises `LaunchError` when it is gone for good."""
    try:
        return _ask_state()
    except UnavailableError:
        check_controller()
        return before


def _wait_settled(console: Console, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    before = state_diff.EMPTY_STATE
    while True:
        state = latest_state(before)
        for change in state_diff.diff(before, state):
            detail = f" ({escape(change.detail)})" if change.detail else ""
            console.print(f"  {change.what:<9} {escape(change.name)}{detail}", highlight=False, soft_wrap=True)
        if state.is_settled:
            return
        if failure := state_diff.first_failure(state):
            raise LaunchError(f"{failure}; the controller tries again, `disagg cluster stop` ends it")
        if time.monotonic() >= deadline:
            raise LaunchError(f"{state_diff.timeout_message(state, wait_s)}; it goes on")
        before = state
        time.sleep(POLL_INTERVAL_S)


def _gateway_address(config: ClusterConfig) -> str:
    """Address of the gateway for clients; with the node's address if the gateway listens on all addresses."""
    import ray

    host, port = config.gateway.host, config.gateway.port
    if port == 0:  # chosen when it starts
        port = ray_store.load(ray_store.GATEWAY_PORT, int) or 0
    if _is_any(host):
        host = str(ray.util.get_node_ip_address())
    return f"{host}:{port}" if port else f"{host}, on a port that `disagg cluster status` shows once it is there"


def _is_any(host: str) -> bool:
    """Whether a server there listens on all addresses of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def show(state: ControlState, console: Console) -> None:
    """Print pools, workers and gateways, and their problems."""
    pools = table("pool", "ready", "desired")
    for pool in state.pools:
        pools.add_row(pool.name, str(pool.ready), str(pool.desired))
    processes = table("process", "phase", "pid", "address", "starts")
    for worker in state.workers:
        info = worker.info
        pid, address = (str(info.pid), info.address) if info is not None else ("", "")
        processes.add_row(worker.worker_id, worker.phase, pid, address, str(worker.num_starts))
    for gateway in state.gateways:
        http = f" (HTTP {gateway.http_address})" if gateway.http_address else ""
        processes.add_row(gateway.name, gateway.phase, str(gateway.pid or ""), f"{gateway.address}{http}", "")
    console.print(pools)
    console.print()
    console.print(processes)
    notes: list[tuple[str, str, str]] = [(worker.worker_id, worker.phase, worker.detail) for worker in state.workers]
    notes += [(gateway.name, gateway.phase, gateway.detail) for gateway in state.gateways]
    for name, phase, detail in notes:
        if detail and phase != "ready":
            console.print(f"{name}: {escape(detail)}", highlight=False, soft_wrap=True)
