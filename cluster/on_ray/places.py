"""Whether the nodes of a Ray cluster can ever have places for a worker of each pool.

    known_nodes()    the kinds of nodes that Ray's autoscaler may start, or the nodes that there are; None where more
                     may join that nobody can know
    check_places()   refuses, by the pool's `tp` or `pp`, a worker for which they have no places; pure

A worker that is only waited for, because others have the places now, is no mistake: the controller says what it waits
for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from disagg.cluster.config.cluster_config import ClusterConfig, PoolConfig, active_pools, pool_path
from disagg.cluster.on_ray.store import SLOT
from disagg.proto.errors import ConfigError
from disagg.proto.wording import counted

_MONITOR: Final = "monitor.py"
"""Program of Ray's autoscaler."""
_ADDRESS: Final = "--gcs-address="
_AUTOSCALING: Final = "--autoscaling-config="
_RAYS_LABEL: Final = "ray.io/"
"""Prefix of labels that Ray gives to nodes once they are there."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that are alike."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]
    count: int = 1


def check_places(config: ClusterConfig, nodes: Sequence[NodeKind]) -> None:
    """Check that each pool has places for one worker at least. The ranks of a stage are on one node.

    Raises:
        ConfigError: naming the pool's `tp` or `pp`, and what nodes there are.
    """
    for name, pool in active_pools(config):
        resource = SLOT if pool.device == "cpu" else "GPU"
        fitting = [node for node in nodes if _has_labels(node, pool)]
        places = [int(node.resources.get(resource, 0)) for node in fitting]
        num_stages = sum(each // pool.tp * node.count for each, node in zip(places, fitting, strict=True))
        if num_stages >= pool.pp:
            continue
        num_nodes = sum(node.count for node in fitting)
        total = sum(each * node.count for each, node in zip(places, fitting, strict=True))
        labels = ", ".join(f"{key}={value}" for key, value in pool.node_labels.items())
        kind = f" with the labels {labels}" if labels else ""
        largest = max(places, default=0)
        nodes_there = f"there {'is' if num_nodes == 1 else 'are'} at most {counted(num_nodes, 'node')}{kind}"
        have = f"{nodes_there}, with {total} {resource}, at most {largest} each"
        ranks = counted(pool.tp, "rank")
        if num_stages == 0:
            need = "needs" if pool.tp == 1 else "need"
            raise ConfigError(f"{pool_path(name)}.tp: {ranks} {need} {pool.tp} {resource} of one node; {have}")
        raise ConfigError(
            f"{pool_path(name)}.pp: {pool.pp} stages of {ranks} need {pool.num_ranks} {resource}, those of a stage on "
            f"one node; {have}"
        )


def _has_labels(node: NodeKind, pool: PoolConfig) -> bool:
    wanted = {key: value for key, value in pool.node_labels.items() if not key.startswith(_RAYS_LABEL)}
    return wanted.items() <= node.labels.items()


# ---------------------------------------------------------------- what nodes there can be


def known_nodes(*, may_join: bool) -> list[NodeKind] | None:
    """The nodes of the Ray cluster that this process has joined, at the most. `may_join`: whether nodes may be added by
    hand later. None where they cannot be known."""
    import ray

    monitor = monitor_options(ray.get_runtime_context().gcs_address)
    if monitor is None:
        return None
    file = next((option.removeprefix(_AUTOSCALING) for option in monitor if option.startswith(_AUTOSCALING)), "")
    if file:
        with suppress(OSError, yaml.YAMLError):
            return node_kinds(yaml.safe_load(Path(file).expanduser().read_text()))
        return None
    if may_join:
        return None
    return [NodeKind(node["Resources"], node.get("Labels", {})) for node in ray.nodes() if node["Alive"]]


def monitor_options(address: str, commands: Iterable[Sequence[str]] | None = None) -> list[str] | None:
    """The options of the autoscaler of Ray's head at host:port, if that is on this machine. `commands`: those of the
    machine's processes."""
    for command in _commands() if commands is None else commands:
        if any(part.endswith(_MONITOR) for part in command) and f"{_ADDRESS}{address}" in command:
            return [part for part in command if part.startswith("--")]
    return None


def _commands() -> Iterable[list[str]]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield (process / "cmdline").read_bytes().decode(errors="replace").split("\0")


def node_kinds(cluster_file: Any) -> list[NodeKind] | None:
    """The kinds of nodes of a cluster file of `ray up`. None where it does not say what one of them has: Ray looks at
    the node then."""
    kinds = []
    for name, kind in cluster_file.get("available_node_types", {}).items():
        resources = kind.get("resources")
        if not resources:
            return None
        is_head = name == cluster_file.get("head_node_type")
        most_others = kind.get("max_workers", 0 if is_head else cluster_file.get("max_workers", 0))
        kinds.append(NodeKind(resources, kind.get("labels", {}), int(is_head) + most_others))
    return kinds or None
