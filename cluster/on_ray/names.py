"""The names of our actors and placement groups in Ray, and what an actor is told at its creation. Imports no Ray."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig

CONTROLLER: Final = "disagg-controller"
SLOT: Final = "disagg_slot"
"""The resource that each rank of a worker takes on a CPU node. Workers pin themselves, so they take no `CPU` of
Ray's."""
NODE_ID_LABEL: Final = "ray.io/node-id"
"""A label that Ray gives to every node."""
NODE_SHARE: Final = 0.001
"""Of the resource `node:<address>`, which every node has once: enough to be held there."""

_PREFIX: Final = "disagg-"

Kind = Literal["worker", "gateway"]


def actor_name(process: str) -> str:
    """Of a worker, one of its ranks (`ranks.rank_name`) or the gateway, for its actor and its placement group."""
    return _PREFIX + process


def process_name(name: str) -> str | None:
    """The worker, rank or gateway that an actor or placement group is for; None for those of others."""
    if name == CONTROLLER or not name.startswith(_PREFIX):
        return None
    return name.removeprefix(_PREFIX)


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor needs to know of its place."""

    name: str
    """Of the process: a worker's id, or `gateway`."""
    kind: Kind
    cores: tuple[int, ...]
    """The cores that it starts on; Ray's own processes sit on one, and it would inherit that. Empty: those of its
    node."""
    claim_cores: int = 0
    """Take this many cores of its node that no other worker has; 0 leaves the configured ones."""
    bind_node: bool = False
    """Listen on its node's address instead of the configured one."""
    tp: int = 1
    """Ranks of the worker; this process is the first."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor of a follower needs to know; the rest it finds where rank 0 noted it."""

    worker: str
    """The worker's id."""
    rank: int
    cores: tuple[int, ...]
    """As in `ProcessSettings`."""


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller's actor is told."""

    config: ClusterConfig
    cores: tuple[int, ...]
    """As in `ProcessSettings`."""
    is_private: bool
    """Whether Ray is there for this cluster only, on one machine."""


class ControllerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the controller could start."""

    address: str = ""
    error: str = ""
    pid: int
