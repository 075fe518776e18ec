"""Checks for values of a configuration that contradict each other, although each alone is allowed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from disagg.autoscaler.config import AutoscalerOptions
from disagg.cluster.config.model_pools import active_pools, models_of, path_prefix, pool_path
from disagg.cluster.config.schema import (
    MAX_MODELS,
    ClusterConfig,
    GatewaySection,
    ModelSection,
    PoolConfig,
    PoolsConfig,
)
from disagg.connections.addresses import is_loopback
from disagg.engine.config import (
    SPECULATION_DEFAULTS,
    check_attention,
    check_expert_parallelism,
    check_quantization,
    check_share_weights,
    check_speculation,
    check_transfer,
)
from disagg.engine.sharding.kv_routes import MAX_RANKS
from disagg.gateway.config import serves_page
from disagg.gateway.guardrails.config import check_guardrails
from disagg.proto.adapters import MAX_ADAPTERS, name_problem, path_problem
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.config import MAX_PORT
from disagg.proto.control import MAX_POOL_SIZE, PoolName
from disagg.proto.errors import ConfigError
from disagg.proto.ids import kind_of
from disagg.proto.wording import counted
from disagg.router.config import is_decodes, num_split

LEAST_TRACES = 40
"""Least number of requests that a twin compares (`LEAST` in `simulator/twin/twin.py`)."""
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
"""Form of a model's key, which is a part of names of processes and files, and of paths of keys."""


def check(config: ClusterConfig) -> None:
    """Raises `ConfigError`, naming the path of a key."""
    _check_models(config)
    for key, alone in models_of(config).items():
        _check_model(path_prefix(key), alone)
    if config.controller.twin == "on" and config.placement.decodes != "auto":
        raise ConfigError(f"controller.twin: on is for placement.decodes auto, not {config.placement.decodes}")
    if config.network.certificates is not None and config.network.encryption == "off":
        raise ConfigError("network.certificates: are not used with network.encryption off; remove one of them")
    _check_tiers(config)
    _check_adapters(config)
    _check_ports(config.gateway)
    _check_replicas(config)
    check_guardrails(config.gateway.guardrails, "gateway.guardrails")
    _check_exposure(config.gateway)


def check_keys(keys: Iterable[object]) -> None:
    """Check the keys of `models` before the values below them are read. Raises `ConfigError`."""
    keys = list(keys)
    if len(keys) > MAX_MODELS:
        raise ConfigError(f"models: at most {MAX_MODELS} in one cluster; got {len(keys)}")
    for key in keys:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ConfigError(
                f"models: a key has letters, digits, _ and -, at most 32, and begins with one of the first two; got "
                f"{key!r}; models.<key>.model.name is the name that requests use"
            )


def _check_speculation(path: str, name: PoolName, pool: PoolConfig) -> None:
    if name == "prefill" and pool.speculation != SPECULATION_DEFAULTS:
        raise ConfigError(f"{path}: is for pools that decode; set it in pools.decode")
    cache_is_set = pool.kv_cache_bytes != "auto" or pool.num_blocks is not None
    check_speculation(pool.speculation, pool.device, pool.num_ranks, cache_is_set=cache_is_set, path=f"{path}.")


def _check_tiers(config: ClusterConfig) -> None:
    tiers = config.kv_cache.tiers
    if tiers is None:
        return
    path = "kv_cache.tiers"
    if not tiers.host_bytes and tiers.disk is None:
        raise ConfigError(f"{path}: needs host_bytes or disk; leave it out for no tiers")
    for alone in models_of(config).values():
        for name, pool in active_pools(alone):
            if kind_of(name) == "decode" and not config.kv_cache.fetch:
                continue
            if pool.device != "cpu":
                raise ConfigError(f"{path}: is for workers on device cpu, not {pool.device}")
            if tiers.disk is not None and pool.num_ranks > 1:
                key, count = ("tp", pool.tp) if pool.tp > 1 else ("pp", pool.pp)
                why = ", and with kv_cache.fetch its workers have tiers, too" if kind_of(name) == "decode" else ""
                raise ConfigError(f"{path}.disk: is for workers of one rank; {pool_path(name)}.{key} is {count}{why}")


def _check_models(config: ClusterConfig) -> None:
    if not config.models:
        return
    check_keys(config.models)
    for name, default in (
        ("model", ModelSection()),
        ("mode", "disaggregated"),
        ("pools", PoolsConfig()),
        ("adapters", None),
    ):
        if getattr(config, name) != default:
            raise ConfigError(f"{name}: is not used beside models; set models.<key>.{name} of each model")
    served: dict[str, str] = {}
    for key, alone in models_of(config).items():
        name = alone.model.served_name
        if name in served:
            raise ConfigError(f"models.{key}.model.name: {name} is the name of models.{served[name]} already")
        served[name] = key
        if alone.placement.decodes == "auto":
            path = f"models.{key}.placement" if config.models[key].placement is not None else "placement"
            raise ConfigError(f"{path}.decodes: auto is for a cluster of one model; choose spread, gather or split:N")


def _check_adapters(config: ClusterConfig) -> None:
    """Check the names and paths of all adapters in the file."""
    known = {alone.model.served_name: f"{path_prefix(key)}model.name" for key, alone in models_of(config).items()}
    num_adapters = 0
    for key, alone in models_of(config).items():
        if alone.adapters is None:
            continue
        num_adapters += len(alone.adapters.models)
        if num_adapters > MAX_ADAPTERS:
            raise ConfigError(f"{path_prefix(key)}adapters.models: at most {MAX_ADAPTERS} adapters in one cluster")
        for name, folder in alone.adapters.models.items():
            path = f"{path_prefix(key)}adapters.models.{name}"
            if problem := name_problem(name):
                raise ConfigError(f"{path_prefix(key)}adapters.models: the name of an adapter {problem}; got {name!r}")
            if problem := path_problem(folder):
                raise ConfigError(f"{path}: {problem}; got {folder!r}")
            if name in known:
                raise ConfigError(f"{path}: {name} is a name already, by {known[name]}")
            known[name] = path


def _check_model(path: str, config: ClusterConfig) -> None:
    """Check one model and its pools; `path` is the beginning of the paths of its keys."""
    model = config.model
    for name, pool in active_pools(config):
        _check_pool(f"{path}{pool_path(name)}", pool)
        _check_sizes(f"{path}{pool_path(name)}", pool, config.autoscaler)
        check_attention(config.kernels.attention, pool.device, "kernels.")
        num_ranks = pool.num_ranks
        check_quantization(
            model.quantization, model.dtype, pool.device, num_ranks, model.kv_cache_dtype, f"{path}model."
        )
        check_share_weights(model.share_weights, pool.device, num_ranks, f"{path}model.")
        check_expert_parallelism(pool.ep, pool.tp, f"{path}{pool_path(name)}.")
        _check_speculation(f"{path}{pool_path(name)}.speculation", name, pool)
        if name != "colocated" and pool.scheduling not in ("decode_first", "slack"):
            raise ConfigError(
                f"{path}pools.{name}.scheduling: {pool.scheduling} is for mode colocated; choose decode_first or slack"
            )
        if pool.max_itl_ms is not None and pool.scheduling != "slack":
            raise ConfigError(f"{path}pools.{name}.max_itl_ms: is for scheduling slack only, not {pool.scheduling}")
    devices = {pool.device.partition(":")[0] for _, pool in active_pools(config)}
    if len(devices) > 1:
        raise ConfigError(
            f"{path}pools.decode.device: all pools need the same kind of device; got {', '.join(sorted(devices))}"
        )
    placement = config.placement
    if placement.decodes != "auto" and not is_decodes(placement.decodes):
        raise ConfigError(
            f"{path}placement.decodes: must be spread, gather, auto or split:N (N workers that take no prompts); got "
            f"{placement.decodes!r}"
        )
    if placement.decodes != "spread" and (config.mode != "elastic" or placement.policy not in ("auto", "elastic")):
        raise ConfigError(
            f"{path}placement.decodes: {placement.decodes} is for mode elastic with policy auto or elastic; got mode "
            f"{config.mode}, policy {placement.policy}"
        )
    number = num_split(placement.decodes)
    if number and number >= config.pools.workers.size > 0:
        raise ConfigError(
            f"{path}placement.decodes: {placement.decodes} leaves none of {config.pools.workers.size} workers for "
            "prompts; see pools.workers.size"
        )
    if placement.decodes == "auto" and config.metrics.num_traces < LEAST_TRACES:
        raise ConfigError(
            f"metrics.num_traces: placement.decodes auto compares settings on {LEAST_TRACES} requests or more; got "
            f"{config.metrics.num_traces}"
        )
    transfer = config.transfer
    if transfer.transport == "nccl" and "cpu" in devices:
        raise ConfigError(
            "transfer.transport: nccl moves KV between CUDA devices only; use gloo or auto with device cpu"
        )
    check_transfer(transfer.limits(devices.pop()))


def _check_exposure(gateway: GatewaySection) -> None:
    serves_page(gateway)
    if gateway.insecure or is_loopback(gateway.host):
        return
    missing = []
    if gateway.tls is None:
        missing.append("gateway.tls, because keys, prompts and answers would travel in clear text")
    if gateway.api_keys is None and (gateway.tls is None or gateway.tls.client_ca is None):
        missing.append("gateway.api_keys or gateway.tls.client_ca, because every caller would be admitted")
    if missing:
        raise ConfigError(
            f"gateway.host: {gateway.host} can be reached by others; set {'; and '.join(missing)}; "
            "or bind to 127.0.0.1; or set gateway.insecure: true"
        )


def _check_replicas(config: ClusterConfig) -> None:
    gateway = config.gateway
    if gateway.replicas > 1 and config.placement.decodes == "auto":
        raise ConfigError(
            f"gateway.replicas: {gateway.replicas} gateways need placement.decodes spread, gather or split:N; auto "
            "changes the setting of one gateway only"
        )
    first = gateway.replica_http_port
    if not first:
        return
    last = first + gateway.replicas - 1
    if last > MAX_PORT:
        raise ConfigError(f"gateway.replica_http_port: {gateway.replicas} ports from {first} on end after {MAX_PORT}")
    for name, port in (("port", gateway.port), ("http_port", gateway.chosen_http_port)):
        if port and first <= port <= last:
            raise ConfigError(f"gateway.replica_http_port: {first} to {last} include gateway.{name}, {port}")


def _check_ports(gateway: GatewaySection) -> None:
    http_port = gateway.chosen_http_port
    if http_port is None:
        return
    if http_port > MAX_PORT:
        raise ConfigError(f"gateway.http_port: there is no port after {gateway.port}; set one, or null")
    if http_port and http_port == gateway.port:
        raise ConfigError(f"gateway.http_port: {http_port} is gateway.port already; gRPC and HTTP need one each")


def _check_sizes(path: str, pool: PoolConfig, autoscaler: AutoscalerOptions) -> None:
    if pool.max_size is None:
        if autoscaler.enabled:
            raise ConfigError(f"{path}.max_size: autoscaler.enabled needs the most workers that it may start")
        return
    if pool.max_size > MAX_POOL_SIZE:
        raise ConfigError(f"{path}.max_size: expected at most {MAX_POOL_SIZE} workers; got {pool.max_size}")
    if pool.min_size > pool.max_size:
        raise ConfigError(f"{path}.min_size: {pool.min_size} is more than max_size, {pool.max_size}")
    if not pool.min_size <= pool.size <= pool.max_size:
        raise ConfigError(
            f"{path}.size: expected min_size to max_size, {pool.min_size} to {pool.max_size}; got {pool.size}"
        )


def _check_pool(path: str, pool: PoolConfig) -> None:
    if not _DEVICE.fullmatch(pool.device):
        raise ConfigError(f"{path}.device: expected cpu, cuda or cuda:<index>; got {pool.device!r}")
    if pool.tokens_per_block % HASH_BLOCK_TOKENS:
        raise ConfigError(f"{path}.block_size: {pool.block_size} is not a multiple of {HASH_BLOCK_TOKENS}")
    num_ranks, key = pool.num_ranks, "tp" if pool.pp == 1 else "pp"
    if num_ranks > MAX_RANKS:
        raise ConfigError(f"{path}.{key}: a worker has at most {MAX_RANKS} ranks; got {num_ranks}")
    if isinstance(pool.cores, tuple):
        if len(set(pool.cores)) != len(pool.cores) or not pool.cores:
            raise ConfigError(
                f"{path}.cores: expected auto, none, or a list of different cores; got {list(pool.cores)}"
            )
        cores = counted(len(pool.cores), "core")
        if num_ranks > len(pool.cores):
            raise ConfigError(f"{path}.{key}: {num_ranks} ranks do not fit on {cores}")
        if pool.num_threads != "auto" and pool.num_threads * num_ranks > len(pool.cores):
            of_ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
            threads = counted(pool.num_threads, "thread")
            do = "does" if pool.num_threads == 1 else "do"
            raise ConfigError(f"{path}.num_threads: {threads}{of_ranks} {do} not fit on {cores}")
