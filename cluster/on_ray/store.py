"""What of a cluster Ray keeps: the names of its actors and placement groups, what an actor gets when it is made, and
values in Ray's own store, so that actors that Ray starts again go on where they were.

The store is in Ray's head process and exists as long as the Ray cluster. Values are JSON. There is one disagg cluster
per Ray cluster: `NAMESPACE` is its name for actors, placement groups and keys.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig
from disagg.cluster.system.children import LaunchError
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.config import Dtype

NAMESPACE: Final = "disagg"
CONTROLLER: Final = "disagg-controller"
SLOT: Final = "disagg_slot"
"""The resource that each rank of a worker takes on a CPU node. Workers pin themselves, so they take no `CPU` of
Ray's."""
NODE_ID_LABEL: Final = "ray.io/node-id"
"""A label that Ray gives to every node."""
NODE_SHARE: Final = 0.001
"""Of the resource `node:<address>`, which every node has once: enough to be held there."""

_PREFIX: Final = "disagg-"

ProcessKind = Literal["worker", "gateway"]

T = TypeVar("T")

CONFIG: Final = "config"
"""`ClusterConfig` as it was started."""
SECRET: Final = "secret"
"""`ClusterSecret` of the cluster. Whoever Ray lets in can read it: Ray's token guards both."""
DESIRED: Final = "desired"
"""`SavedState` of the controller, after the first change."""
CONTROLLER_ADDRESS: Final = "controller"
"""host:port of the controller's present process."""
GATEWAY_PORT: Final = "gateway-port"
"""Where the gateway listened first, and so listens again."""
GATEWAY_HTTP_PORT: Final = "gateway-http-port"
"""The same of HTTP."""
_STARTS: Final = "starts/"
_FAILURE: Final = "failure/"
_GATEWAY_SPEC: Final = "gateway-spec/"
_LEADER: Final = "leader/"
_FOLLOWING: Final = "following/"


def actor_name(process: str) -> str:
    """Of a worker, one of its ranks (`ranks.rank_name`) or the gateway, for its actor and its placement group."""
    return _PREFIX + process


def process_name(name: str) -> str | None:
    """The worker, rank or gateway that an actor or placement group is for; None for those of others."""
    if name == CONTROLLER or not name.startswith(_PREFIX):
        return None
    return name.removeprefix(_PREFIX)


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor of a worker or the gateway gets when it is made."""

    name: str
    """Of the process: a worker's id, or `gateway`."""
    kind: ProcessKind
    cores: tuple[int, ...]
    """The cores that it starts on; Ray's own processes sit on one, and it would inherit that. Empty: those of its
    node."""
    claim_cores: int = 0
    """Take this many cores of its node that no other worker has; 0 leaves the configured ones."""
    bind_node: bool = False
    """Listen on its node's address instead of the configured one."""
    tp: int = 1
    """Ranks of the worker; this process is the first."""
    environment: dict[str, str] = {}
    """Variables that it sets before it loads what reads them."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the actor of a follower gets when it is made; the rest is what rank 0 has saved."""

    worker: str
    """The worker's id."""
    rank: int
    cores: tuple[int, ...]
    """As in `ProcessSettings`."""
    environment: dict[str, str] = {}
    """As in `ProcessSettings`."""


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller's actor gets when it is made."""

    config: ClusterConfig
    cores: tuple[int, ...]
    """As in `ProcessSettings`."""
    is_private: bool
    """Whether Ray is there for this cluster only, on one machine."""
    twin_key: str = ""
    """The key of an admin for the twin; only where Ray is private, because Ray keeps it."""
    cpu_dtype: Dtype = "bfloat16"
    """As in `ClusterPlan`."""


class ControllerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the controller could start."""

    address: str = ""
    error: str = ""
    pid: int


def starts_key(name: str) -> str:
    """The key of a process's `backoff.Starts`."""
    return _STARTS + name


def gateway_spec_key(name: str) -> str:
    """The key of a gateway's `GatewaySpec`; there is none while its process is only prepared."""
    return _GATEWAY_SPEC + name


def failure_key(name: str) -> str:
    """The key of why a process could not start, as one line, the last time."""
    return _FAILURE + name


def leader_key(worker: str) -> str:
    """The key of the `rank_actors.Leader` of a worker of several ranks."""
    return _LEADER + worker


def following_key(process: str) -> str:
    """The key of the `rank_actors.Following` of one of its other ranks."""
    return _FOLLOWING + process


def load(key: str, kind: type[T]) -> T | None:
    """A value, if there is one. Raises `msgspec.ValidationError` if it is of another kind, and what Ray raises when its
    head is away."""
    found = _kv()._internal_kv_get(key, namespace=NAMESPACE)
    return None if found is None else msgspec.json.decode(found, type=kind)


def cluster_secret() -> ClusterSecret:
    """By which the cluster's processes authenticate each other. Raises `LaunchError` where there is no cluster of
    ours."""
    secret = load(SECRET, ClusterSecret)
    if secret is None:
        raise LaunchError("there is no disagg cluster in that Ray")
    return secret


def save(key: str, value: object) -> None:
    """Replace a value."""
    _kv()._internal_kv_put(key, msgspec.json.encode(value), overwrite=True, namespace=NAMESPACE)


def delete(key: str) -> None:
    """Remove a value, if there is one."""
    _kv()._internal_kv_del(key, namespace=NAMESPACE)


def clear() -> None:
    """Delete everything."""
    kv = _kv()
    for key in kv._internal_kv_list("", namespace=NAMESPACE):
        kv._internal_kv_del(key, namespace=NAMESPACE)


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def find_actor(name: str) -> Any | None:
    """The actor of a process, unless Ray has given it up."""
    import ray

    try:
        return ray.get_actor(actor_name(name), NAMESPACE)
    except ValueError:
        return None
