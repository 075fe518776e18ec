"""State of a cluster that Ray keeps: the names of its actors and placement groups, the settings of an actor, and values
in Ray's own store, with which actors that Ray starts again continue.

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
"""Name of a label that Ray gives to every node."""
NODE_SHARE: Final = 0.001
"""Share of the resource `node:<address>`, of which every node has 1, that an actor takes to be placed there."""

_PREFIX: Final = "disagg-"

ProcessKind = Literal["worker", "gateway"]

T = TypeVar("T")

CONFIG: Final = "config"
"""Key of the `ClusterConfig` with which the cluster was started."""
SECRET: Final = "secret"
"""Key of the cluster's `ClusterSecret`. Every client of Ray can read it: Ray's token guards both."""
DESIRED: Final = "desired"
"""Key of the controller's `SavedState`, after the first change."""
CONTROLLER_ADDRESS: Final = "controller"
"""Key of the host:port of the controller's present process."""
GATEWAY_PORT: Final = "gateway-port"
"""Key of the port at which the gateway listened first, and so listens again."""
GATEWAY_HTTP_PORT: Final = "gateway-http-port"
"""Key of the port of the gateway's HTTP server, in the same way."""
_STARTS: Final = "starts/"
_FAILURE: Final = "failure/"
_GATEWAY_SPEC: Final = "gateway-spec/"
_LEADER: Final = "leader/"
_FOLLOWING: Final = "following/"


def actor_name(process: str) -> str:
    """Name in Ray of the actor and the placement group of a worker, one of its ranks (`ranks.rank_name`) or the
    gateway."""
    return _PREFIX + process


def process_name(name: str) -> str | None:
    """The worker, rank or gateway of an actor or placement group; None for those of others."""
    if name == CONTROLLER or not name.startswith(_PREFIX):
        return None
    return name.removeprefix(_PREFIX)


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the actor of a worker or the gateway."""

    name: str
    """Name of the process: a worker's id, or `gateway`."""
    kind: ProcessKind
    cores: tuple[int, ...]
    """Cores that it starts on; Ray's own processes sit on one, which it would inherit. Empty: all cores of its node."""
    claim_cores: int = 0
    """Number of cores of its node to claim that no other rank has; 0 keeps the configured ones."""
    bind_node: bool = False
    """Whether to listen on its node's address in place of the configured one."""
    num_ranks: int = 1
    """Number of ranks of the worker, over all stages; this process is the first one."""
    environment: dict[str, str] = {}
    """Environment variables that are set before the libraries that read them are loaded."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the actor of a follower; rank 0 has saved the rest."""

    worker: str
    """Id of the worker."""
    rank: int
    """Its number among the ranks of all stages."""
    cores: tuple[int, ...]
    """Cores that it starts on, as in `ProcessSettings`."""
    claim_cores: int = 0
    """Number of cores of its own node to claim, as in `ProcessSettings`."""
    bind_node: bool = False
    """Whether its channels are bound to its own node's address, as in `ProcessSettings`."""
    environment: dict[str, str] = {}
    """Environment variables, as in `ProcessSettings`."""


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the controller's actor."""

    config: ClusterConfig
    cores: tuple[int, ...]
    """Cores that it starts on, as in `ProcessSettings`."""
    is_private: bool
    """Whether Ray runs for this cluster only, on one machine."""
    twin_key: str = ""
    """API key of an admin for the twin; only where Ray is private, because Ray keeps it."""
    cpu_dtype: Dtype = "bfloat16"
    """Meaning of `model.dtype: auto`, as in `ClusterPlan`."""


class ControllerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the controller's start."""

    address: str = ""
    error: str = ""
    pid: int


def starts_key(name: str) -> str:
    """Key of a process's `backoff.Starts`."""
    return _STARTS + name


def gateway_spec_key(name: str) -> str:
    """Key of a gateway's `GatewaySpec`, which does not exist while its process is only prepared."""
    return _GATEWAY_SPEC + name


def failure_key(name: str) -> str:
    """Key of the reason why a process could not start the last time, as one line."""
    return _FAILURE + name


def leader_key(worker: str) -> str:
    """Key of the `rank_actors.Leader` of a worker of several ranks."""
    return _LEADER + worker


def following_key(process: str) -> str:
    """Key of the `rank_actors.Following` of one of its other ranks."""
    return _FOLLOWING + process


def load(key: str, kind: type[T]) -> T | None:
    """Load a value; None if there is none. Raises `msgspec.ValidationError` if it is of another kind, and errors of Ray
    when its head cannot be reached."""
    found = _kv()._internal_kv_get(key, namespace=NAMESPACE)
    return None if found is None else msgspec.json.decode(found, type=kind)


def cluster_secret() -> ClusterSecret:
    """The secret by which the cluster's processes authenticate each other. Raises `LaunchError` if there is no cluster
    of ours."""
    secret = load(SECRET, ClusterSecret)
    if secret is None:
        raise LaunchError("there is no disagg cluster in that Ray")
    return secret


def save(key: str, value: object) -> None:
    """Save a value under a key, in place of an earlier one."""
    _kv()._internal_kv_put(key, msgspec.json.encode(value), overwrite=True, namespace=NAMESPACE)


def delete(key: str) -> None:
    """Remove a value, if there is one."""
    _kv()._internal_kv_del(key, namespace=NAMESPACE)


def clear() -> None:
    """Delete all values of the cluster."""
    kv = _kv()
    for key in kv._internal_kv_list("", namespace=NAMESPACE):
        kv._internal_kv_del(key, namespace=NAMESPACE)


def _kv() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def find_actor(name: str) -> Any | None:
    """Find the actor of a process, unless Ray has given it up."""
    import ray

    try:
        return ray.get_actor(actor_name(name), NAMESPACE)
    except ValueError:
        return None
