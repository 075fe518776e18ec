"""The fields in which two configurations of a cluster differ, and the effect of each. Pure.

    in place            the controller, its gateways and later starts follow it; no process is restarted. So do models
                        come and go: their workers start or leave, and gateways serve them or do not
    replaces workers    see `rollout.py`
    no effect           it is about pools that the mode does not use
    refused             then nothing is changed

A field that is not listed here is refused: what it would need is not known.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection

import msgspec

from disagg.cluster.config.cluster_config import ClusterConfig, PoolsConfig, active_pools, models_of
from disagg.proto.control import FieldChange, PoolKind, PoolName
from disagg.proto.ids import join_name, model_of

IN_PLACE = (
    "adapters.models.*",
    "pools.*.size",
    "pools.*.min_size",
    "pools.*.max_size",
    "placement",
    "placement.*",
    "slo",
    "slo.*",
    "gateway.max_queued",
    "controller.drain_timeout_s",
    "autoscaler.*",
)
REPLACES_ALL = (
    "mode",
    "model.path",
    "model.dtype",
    "model.quantization",
    "model.kv_cache_dtype",
    "model.share_weights",
    "kernels.*",
    "transfer.*",
    "kv_cache.*",
    "adapters",
    "adapters.folder",
    "adapters.max_loaded",
    "adapters.max_rank",
    "gateway.token_interval_ms",
    "recovery.failpoints",
)
REFUSED = {
    "gateway.replicas": "gateways come and go with the cluster",
    "gateway.*": "the gateway reads it when it starts, and a restart breaks its streams",
    "metrics.*": "the gateway reads it when it starts, and a restart breaks its streams",
    "recovery.*": "gateway and controller read it when they start",
    "controller.*": "the controller reads it when it starts",
    "model.max_model_len": "the gateway checks prompts by it",
    "network.*": "all processes would have to change at once",
    "ray.*": "the cluster would have to move",
    "logging.*": "processes read it when they start",
}
"""Reasons of refusals by pattern; the first pattern that fits counts."""
_TO_THE_TWIN = "the twin sets it while it is auto"
_NAMES = "workers have the key of their model in their names where the file has `models`: start the cluster anew"
_COMES = "the model is served once its first workers are ready"
_GOES = "requests for it are refused, and its workers leave"
_ANEW = "it cannot be changed while the cluster runs: stop it and start it anew"


def values_of(config: ClusterConfig) -> dict[str, object]:
    """Values of a configuration by the dotted path of their keys in the file."""
    values: dict[str, object] = {}

    def visit(path: str, value: object) -> None:
        if isinstance(value, dict) and not path.endswith(".node_labels"):
            for key, inner in value.items():
                visit(f"{path}.{key}" if path else str(key), inner)
        else:
            values[path] = value

    visit("", msgspec.to_builtins(config))
    return values


def compare(running: ClusterConfig, wanted: ClusterConfig, replaced: Collection[PoolName] = ()) -> list[FieldChange]:
    """The fields in which two configurations differ, in the order of the file.

    Args:
        replaced: pools that are added or removed, or of which workers will be replaced. A field of other pools replaces
            nothing: what it stands for is the same.
    """
    coming = _coming_and_going(running, wanted)
    keys = {change.field.partition(".")[2] for change in coming}
    before, after = (
        {path: value for path, value in values_of(config).items() if split_path(path)[0] not in keys}
        for config in (running, wanted)
    )
    paths = [path for path in dict.fromkeys((*before, *after)) if before.get(path) != after.get(path)]
    used = {name for config in (running, wanted) for name, _ in active_pools(config)}
    return [*(_change(path, running, wanted, before, after, used, replaced) for path in paths), *coming]


def _coming_and_going(running: ClusterConfig, wanted: ClusterConfig) -> list[FieldChange]:
    """Models that only one of two configurations has, each as one field."""
    before, after = models_of(running), models_of(wanted)
    found = []
    for key in dict.fromkeys((*before, *after)):
        if key and (key in before) != (key in after):
            names = (json.dumps(side[key].model.served_name if key in side else None) for side in (before, after))
            is_refused = "" in before or "" in after
            found.append(
                FieldChange(
                    field=f"models.{key}",
                    before=next(names),
                    after=next(names),
                    how="refused" if is_refused else "in place",
                    detail=_NAMES if is_refused else _COMES if key in after else _GOES,
                )
            )
    return found


def split_path(path: str) -> tuple[str, str]:
    """Split a path into the key of its model, and the path in a file of that model alone. The key is empty for a path
    that belongs to no model among several."""
    section, _, rest = path.partition(".")
    if section != "models":
        return "", path
    key, _, rest = rest.partition(".")
    return key, rest


def _change(
    path: str,
    running: ClusterConfig,
    wanted: ClusterConfig,
    before: dict[str, object],
    after: dict[str, object],
    used: Collection[PoolName],
    replaced: Collection[PoolName],
) -> FieldChange:
    field = path

    def change(how: str, detail: str = "") -> FieldChange:
        text = {side: json.dumps(values.get(field)) for side, values in (("before", before), ("after", after))}
        return FieldChange(field=field, how=how, detail=detail, **text)  # type: ignore[arg-type]  # one of the four

    key, path = split_path(path)
    if key:
        running, wanted = models_of(running)[key], models_of(wanted)[key]
    kind: PoolKind | None = next((name for name in _POOLS if path.startswith(f"pools.{name}.")), None)
    pool = None if kind is None else join_name(key, kind)
    if path == "model.name":
        if running.model.served_name == wanted.model.served_name:
            return change("in place")
        return change("refused", f"requests use the name {running.model.served_name}; set model.path to serve others")
    if path == "model.path" and running.model.served_name != wanted.model.served_name:
        name = running.model.served_name
        return change("refused", f"requests use the name {name}: set model.name: {name} to serve this under it")
    if path == "placement.decodes" and "auto" in (running.placement.decodes, wanted.placement.decodes):
        return change("refused", _TO_THE_TWIN)
    if pool is not None and pool not in used:
        return change("no effect", "the mode does not use this pool")
    if _fits(path, IN_PLACE):
        return change("in place")
    if pool is not None or _fits(path, REPLACES_ALL):
        of = [name for name in replaced if (name == pool if pool else key in ("", model_of(name)))]
        return change("replaces workers", ", ".join(of)) if of else change("in place")
    reason = next((reason for pattern, reason in REFUSED.items() if fnmatch.fnmatchcase(path, pattern)), _ANEW)
    return change("refused", reason)


_POOLS: tuple[PoolKind, ...] = PoolsConfig.__struct_fields__  # type: ignore[assignment]  # one for each name


def _fits(path: str, patterns: Collection[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
