"""Functions that find, describe, stop and kill actors and placement groups of the cluster in Ray.

A process that hangs is killed by its process id, on whatever node it is: `ray.kill` calls the process itself first, and
waits five seconds for one that cannot answer. A process id means something on its own node only: there, a process is
killed if it is an actor of ours and has the same parent as the one that kills, which is the node's raylet. Ray sees the
end of the process and starts the actor again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from disagg.cluster.on_ray import store as ray_store
from disagg.cluster.on_ray.store import actor_name, process_name
from disagg.cluster.system.process_tools import ProcessRef, end_processes

STOP_TIMEOUT_S: Final = 10.0
"""Seconds that an actor may take to stop before it is killed."""
GONE_TIMEOUT_S: Final = 10.0
"""Seconds that Ray may take to notice the end of an actor."""
_POLL_S: Final = 0.05
KILL_TIMEOUT_S: Final = 10.0
"""Seconds that a node may take to start a process that kills."""
ACTOR_TITLE: Final = b"HostActor"
"""Part of the title that Ray gives to the processes of our actors."""


def stop_actors(actors: Sequence[Any], timeout_s: float = STOP_TIMEOUT_S) -> None:
    """Let actors stop, for at most `timeout_s`, end their processes, and wait until they are gone. Actors that do not
    run are ended at once."""
    import ray

    here = ray.util.get_node_ip_address()
    infos = [actor_info(actor) for actor in actors]
    alive = [(actor, info) for actor, info in zip(actors, infos, strict=True) if info["State"] == "ALIVE"]
    processes = [ProcessRef.of(info["Pid"]) for _, info in alive if info["Address"]["IPAddress"] == here]
    stops = [actor.stop.remote() for actor, _ in alive]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=timeout_s)
    for actor in actors:
        ray.kill(actor, no_restart=True)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while any(actor_info(actor)["State"] != "DEAD" for actor in actors) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    end_processes(processes)


def present_actors() -> set[str]:
    """The names of all processes of the cluster that have an actor, whatever its state."""
    import ray

    found = ray.util.list_named_actors(all_namespaces=True)
    names = (process_name(entry["name"]) for entry in found if entry["namespace"] == ray_store.NAMESPACE)
    return {name for name in names if name is not None}


def present_groups() -> set[str]:
    """The names of all processes that have a placement group of the cluster."""
    import ray

    infos = ray.util.placement_group_table().values()
    names = (process_name(info["name"]) for info in infos if info["state"] != "REMOVED")
    return {name for name in names if name is not None}


def remove_group(name: str) -> None:
    """Remove the placement group of a process, if it has one."""
    import ray

    try:
        group = ray.util.get_placement_group(actor_name(name))
    except ValueError:
        return
    ray.util.remove_placement_group(group)


def actor_info(actor: Any) -> dict[str, Any]:
    """Ray's record of an actor: `State`, `Pid`, `Address`, `DeathCause` and more. An actor that Ray has forgotten is
    DEAD."""
    from ray._private.state import actors

    found: dict[str, Any] = actors(actor_id=actor._actor_id.hex())
    return found or {"State": "DEAD", "DeathCause": None}


def why_dead(info: dict[str, Any]) -> str:
    """Reason why Ray gave an actor up, in one line."""
    cause = info["DeathCause"]
    context = cause.WhichOneof("context") if cause is not None else None
    if context is None:
        return "its actor ended"
    detail = getattr(cause, context)
    text = getattr(detail, "error_message", "") or getattr(detail, "formatted_exception_string", "")
    lines = str(text).strip().splitlines()
    return f"its actor ended: {lines[-1]}" if lines else "its actor ended"


def unmet_needs(group: Any) -> list[str]:
    """Resources of each bundle of a placement group for which there are no nodes; empty if it is placed, or was
    requested just now."""
    import ray

    info = ray.util.placement_group_table(group)
    scheduling = info.get("stats", {}).get("scheduling_state", "")
    if info.get("state") not in ("PENDING", "RESCHEDULING") or scheduling not in ("INFEASIBLE", "NO_RESOURCES"):
        return []
    return [", ".join(f"{amount:g} {key}" for key, amount in needs.items()) for needs in info["bundles"].values()]


def kill_actor_process(info: dict[str, Any], pid: int) -> None:
    """Kill the process of an actor if it still is that one.

    Args:
        info: Ray's record of the actor, see `actor_info`.

    Raises:
        RayError: if its node does not kill it.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if info["State"] != "ALIVE" or info["Pid"] != pid:
        return
    node_id = info["Address"]["NodeID"]
    if node_id == ray.get_runtime_context().get_node_id():
        kill_sibling(pid)
        return
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(kill_sibling).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    ray.get(task.remote(pid), timeout=KILL_TIMEOUT_S)


def kill_sibling(pid: int) -> bool:
    """Kill a process of this node if it is an actor of ours with the same parent as this process. Returns whether it
    was."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it is gone
        return False
    parent_pid = int(stat.rpartition(") ")[2].split()[1])
    if parent_pid != os.getppid() or ACTOR_TITLE not in title:
        return False
    os.kill(pid, signal.SIGKILL)
    return True
