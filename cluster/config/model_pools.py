"""The models of a configuration and their pools: one model with the pools at the top of the file, or several.

    models_of       each model as a configuration of its own, as if it were alone in the cluster
    active_pools    the pools of all of them, by name: `decode`, or `qwen/decode` where the file has `models`
    pool_path       where the file has a pool: `pools.decode`, `models.qwen.pools.decode`

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from disagg.cluster.config.schema import ClusterConfig, PoolConfig, PoolsConfig, ServedModelSection
from disagg.proto.control import PoolKind, PoolName
from disagg.proto.ids import join_name, kind_of, model_of


def models_of(config: ClusterConfig) -> Mapping[str, ClusterConfig]:
    """Configuration of each model as if it were alone, by key. The key is empty where the file has no `models`."""
    if not config.models:
        return {"": config}
    return {key: _alone(config, key, entry) for key, entry in config.models.items()}


def _alone(config: ClusterConfig, key: str, entry: ServedModelSection) -> ClusterConfig:
    return msgspec.structs.replace(
        config,
        models={},
        model=msgspec.structs.replace(entry.model, name=entry.model.name or key),
        mode=entry.mode,
        pools=entry.pools,
        adapters=entry.adapters,
        placement=entry.placement or config.placement,
        slo=entry.slo or config.slo,
    )


def active_pools(config: ClusterConfig) -> list[tuple[PoolName, PoolConfig]]:
    """The pools that the modes use, model by model, prefill first."""
    return [
        (join_name(key, kind), pool) for key, alone in models_of(config).items() for kind, pool in _pools_used(alone)
    ]


def _pools_used(alone: ClusterConfig) -> list[tuple[PoolKind, PoolConfig]]:
    if alone.mode == "colocated":
        return [("colocated", alone.pools.colocated)]
    if alone.mode == "elastic":
        return [("workers", alone.pools.workers)]
    return [("prefill", alone.pools.prefill), ("decode", alone.pools.decode)]


def with_sizes(config: ClusterConfig, sizes: Mapping[PoolName, int]) -> ClusterConfig:
    """The configuration with other sizes of some pools; sizes of pools that it does not have are left out."""
    return with_pool_fields(config, "size", sizes)


def with_pool_fields(config: ClusterConfig, field: str, values: Mapping[PoolName, int]) -> ClusterConfig:
    """The configuration with other values of a field of some pools; values of pools that it does not have are left
    out."""
    entries = dict(config.models)
    pools = config.pools
    for name, value in values.items():
        key, kind = model_of(name), kind_of(name)
        if not key:
            pools = _with(pools, kind, field, value)
        elif key in entries:
            entries[key] = msgspec.structs.replace(entries[key], pools=_with(entries[key].pools, kind, field, value))
    return msgspec.structs.replace(config, pools=pools, models=entries)


def _with(pools: PoolsConfig, kind: str, field: str, value: int) -> PoolsConfig:
    return msgspec.structs.replace(pools, **{kind: msgspec.structs.replace(getattr(pools, kind), **{field: value})})


def path_prefix(key: str) -> str:
    """The beginning of the paths of a model's keys: nothing, or `models.qwen.`."""
    return f"models.{key}." if key else ""


def pool_path(name: PoolName) -> str:
    """The path of a pool of that name."""
    return f"{path_prefix(model_of(name))}pools.{kind_of(name)}"


def unused_pools(config: ClusterConfig) -> tuple[str, ...]:
    """A note for each model with pools that its mode does not use: no error, because `--elastic` and `--colocated` may
    be given on top of a file."""
    return tuple(note for key, alone in models_of(config).items() if (note := _unused(path_prefix(key), alone)))


def _unused(path: str, alone: ClusterConfig) -> str:
    used = [kind for kind, _ in _pools_used(alone)]
    default = PoolsConfig()
    unused = [
        f"{path}pools.{name}"
        for name in PoolsConfig.__struct_fields__
        if name not in used and getattr(alone.pools, name) != getattr(default, name)
    ]
    if not unused:
        return ""
    of_mode = " and ".join(f"{path}pools.{name}" for name in used)
    return f"{', '.join(unused)}: not used in mode {alone.mode}, which has {of_mode}"
