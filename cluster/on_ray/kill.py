"""Kills an actor's process that hangs, by its process id, on whatever node it is.

`ray.kill` asks the process itself first, and waits five seconds for one that cannot answer. A process id means
something on its own node only: there, a process is killed if it is an actor of ours and has the same parent as we have,
which is the node's raylet. Ray sees the end of the process and starts the actor again.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

KILL_TIMEOUT_S: Final = 10.0
"""How long a node may take to find a process that kills."""
ACTOR_TITLE: Final = b"HostActor"
"""Part of the title that Ray gives to the processes of our actors."""


def kill_actor_process(info: dict[str, Any], pid: int) -> None:
    """Kill the process of an actor if it still is that one.

    Args:
        info: what Ray's head knows of the actor, see `ray_launcher.actor_info`.

    Raises:
        RayError: if its node does not do it.
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
    """Kill a process of this node that is an actor of ours and has the parent that this one has; whether it was."""
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
