"""Client of the controller's actor: creates, finds, calls and ends it. Used by `disagg up`, whose controller ends with
it, and by `disagg cluster`, whose controller stands by itself in a Ray cluster.

All of it needs an open `session.Session`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig, active_pools, pool_path
from disagg.cluster.control import controller_link
from disagg.cluster.control.changes import values_of
from disagg.cluster.control.cluster import CHECK_STOP_INTERVAL_S
from disagg.cluster.control.plan import new_secret
from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.handles import present_actors, present_groups, remove_group, stop_actors
from disagg.cluster.on_ray.store import CONTROLLER, ControllerAnswer, ControllerSettings
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.proto.control import ControlReply, ControlRequest, PoolName
from disagg.proto.errors import UnavailableError

STOP_TIMEOUT_S: Final = 45.0
"""Seconds that a controller may take to end its workers side by side and itself; each step has a shorter limit of its
own."""


def find_controller() -> Any | None:
    """Find the controller's actor, unless Ray has given it up."""
    import ray

    try:
        return ray.get_actor(CONTROLLER, ray_store.NAMESPACE)
    except ValueError:
        return None


def check_controller() -> None:
    """Raises `LaunchError` when Ray has given up the controller's actor."""
    if find_controller() is None:
        raise LaunchError("the controller is gone for good; Ray does not start it again") from None


def create_controller(settings: ControllerSettings, *, detached: bool) -> Any:
    """Start a controller on this node; `detached` lets it outlive this process. Leftovers of an earlier one are ended.

    Raises:
        LaunchError: if there is one already.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from disagg.cluster.on_ray.controller_actor import ControllerActor

    if find_controller() is not None:
        raise LaunchError("a disagg cluster runs in that Ray already; `disagg cluster status` shows it")
    sweep()
    ray_store.save(ray_store.CONFIG, settings.config)
    ray_store.save(ray_store.SECRET, new_secret(settings.config.network))
    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {"lifetime": "detached"} if detached else {}
    actor_class = ray.remote(ControllerActor).options(
        name=CONTROLLER,
        namespace=ray_store.NAMESPACE,
        max_restarts=-1,
        max_concurrency=4,  # `stop` must not wait for an `answer` that waits
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        **options,
    )
    return actor_class.remote(msgspec.json.encode(settings))


def wait_for_answer(actor: Any, check_stop: Callable[[], None], timeout_s: float) -> ControllerAnswer:
    """Wait until the controller listens.

    Raises:
        LaunchError: if it cannot start, or not in time.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    pending = [actor.answer.remote()]
    while not ray.wait(pending, timeout=CHECK_STOP_INTERVAL_S)[0]:
        check_stop()
        if time.monotonic() >= deadline:
            raise LaunchError(f"the controller did not start within {timeout_s:g} s")
    try:
        answer = msgspec.json.decode(ray.get(pending[0]), type=ControllerAnswer)
    except ray.exceptions.RayError as error:
        raise LaunchError(f"the controller's actor failed: {str(error).strip().splitlines()[-1]}") from error
    if answer.error:
        raise LaunchError(answer.error)
    return answer


def controller_address() -> str | None:
    """Last known host:port of the controller, or None."""
    return ray_store.load(ray_store.CONTROLLER_ADDRESS, str)


def call_controller(request: ControlRequest) -> ControlReply:
    """Call the controller. Raises `UnavailableError` while it cannot be reached."""
    address = controller_address()
    if address is None:
        raise UnavailableError("the controller does not listen yet", "controller_away")
    return controller_link.call_controller(address, request, ray_store.cluster_secret())


def end_controller(actor: Any | None) -> None:
    """End gateway, workers and controller, in any state; nothing of the cluster is left in Ray."""
    import ray

    if actor is not None:
        config = ray_store.load(ray_store.CONFIG, ClusterConfig)
        drain_s = 0.0 if config is None else config.gateway.drain_timeout_s
        ray.wait([actor.stop.remote()], timeout=STOP_TIMEOUT_S + drain_s)
        ray.kill(actor, no_restart=True)
    sweep()


def sweep() -> None:
    """End actors, groups and notes that have no controller."""
    actors = [actor for name in present_actors() if (actor := ray_store.find_actor(name)) is not None]
    if actors:
        stop_actors(actors)
    for name in present_groups():
        remove_group(name)
    ray_store.clear()


def changed_sizes(running: ClusterConfig, requested: ClusterConfig) -> dict[PoolName, int]:
    """The pool sizes in which a configuration differs from the one that runs.

    Raises:
        LaunchError: naming what else differs; that cannot be changed while the cluster runs.
    """
    before, after = values_of(running), values_of(requested)
    names = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    sizes = {f"{pool_path(name)}.size": name for name, _ in active_pools(requested)}
    if fixed := sorted(names - set(sizes)):
        raise LaunchError(
            f"a cluster runs here with another configuration ({', '.join(fixed)} differ); change it with "
            f"`{command('apply')}`, or end it first with `{command('cluster stop')}`"
        )
    return {sizes[path]: dict(active_pools(requested))[sizes[path]].size for path in names}
