"""What a cluster remembers in Ray's own store, so that actors that Ray starts again go on where they were.

The store lives in Ray's head process, as long as the Ray cluster does. Values are JSON. One cluster of ours per Ray
cluster: `NAMESPACE` is its name for actors, placement groups and these keys.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from disagg.cluster.on_ray.names import actor_name
from disagg.cluster.system.errors import LaunchError
from disagg.proto.cluster_secret import ClusterSecret

NAMESPACE: Final = "disagg"

T = TypeVar("T")

CONFIG: Final = "config"
"""`ClusterConfig` as it was started."""
SECRET: Final = "secret"
"""`ClusterSecret` of the cluster. Whoever Ray lets in can read it: Ray's token guards both."""
SIZES: Final = "sizes"
"""Pool name -> desired size, after the first `scale`."""
CONTROLLER_ADDRESS: Final = "controller"
"""host:port of the controller's present life."""
GATEWAY_PORT: Final = "gateway-port"
"""Where the gateway listened first, and so listens again."""
GATEWAY_HTTP_PORT: Final = "gateway-http-port"
"""The same of HTTP."""
_STARTS: Final = "starts/"
_FAILURE: Final = "failure/"
_LEADER: Final = "leader/"
_FOLLOWING: Final = "following/"


def starts_key(name: str) -> str:
    """The key of a process's `restart_pause.Starts`."""
    return _STARTS + name


def failure_key(name: str) -> str:
    """The key of why a process could not start, as one line, the last time."""
    return _FAILURE + name


def leader_key(worker: str) -> str:
    """The key of the `ray_ranks.Leader` of a worker of several ranks."""
    return _LEADER + worker


def following_key(process: str) -> str:
    """The key of the `ray_ranks.Following` of one of its other ranks."""
    return _FOLLOWING + process


def load(key: str, kind: type[T]) -> T | None:
    """A value, if there is one. Raises `msgspec.ValidationError` if it is of another kind, and what Ray raises when its
    head is away."""
    found = _kv()._internal_kv_get(key, namespace=NAMESPACE)
    return None if found is None else msgspec.json.decode(found, type=kind)


def cluster_secret() -> ClusterSecret:
    """What the cluster's processes know each other by. Raises `LaunchError` where there is no cluster of ours."""
    secret = load(SECRET, ClusterSecret)
    if secret is None:
        raise LaunchError("there is no cluster of ours in that Ray")
    return secret


def save(key: str, value: object) -> None:
    """Replace a value."""
    _kv()._internal_kv_put(key, msgspec.json.encode(value), overwrite=True, namespace=NAMESPACE)


def forget(key: str) -> None:
    """Remove a value, if there is one."""
    _kv()._internal_kv_del(key, namespace=NAMESPACE)


def clear() -> None:
    """Forget everything."""
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
