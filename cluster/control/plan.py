"""Derivation of each process's configuration from the cluster's.

worker_config, router_config, gateway_config the three derivations, pure ClusterPlan all of a cluster that is fixed
before its first process starts plan_cluster, check_gateway find mistakes before a model is loaded
"""

from __future__ import annotations

import errno
import secrets
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from disagg.cluster.config.cluster_config import (
    ClusterConfig,
    NetworkConfig,
    PoolConfig,
    active_pools,
    models_of,
    pool_path,
)
from disagg.cluster.config.core_layout import CorePlan, plan_cores, with_threads, worker_cores, worker_device
from disagg.cluster.config.memory import (
    ELEMENT_BYTES,
    PoolCache,
    check_block,
    check_fits,
    check_no_windows,
    check_tiers_hold,
    expert_weight_bytes,
    memory_notes,
)
from disagg.cluster.config.model_pools import with_sizes
from disagg.cluster.core.gateways import GATEWAY, gateway_names
from disagg.cluster.core.workers import worker_id
from disagg.cluster.models.catalog import FAKE_MODEL, resolve_model
from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.cores import available_cores
from disagg.connections.cluster_secret import NUM_BYTES, ClusterSecret
from disagg.engine.cache_groups import check_kv_dtype
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.checkpoint.model_config import ModelConfig
from disagg.engine.checkpoint.vocabulary import check_draft_vocabulary
from disagg.engine.config import (
    AdapterOptions,
    Dtype,
    EngineLimits,
    KernelOptions,
    ModelOptions,
    SpeculationOptions,
    TierOptions,
    TransportName,
    WorkerConfig,
    device_defaults,
    resolved_dtype,
    resolved_speculation,
)
from disagg.engine.kv_transfer.transports.nixl_agent import check_installed
from disagg.engine.sharding.model_shards import rank_model, with_whole_experts
from disagg.engine.sharding.shards import Shard
from disagg.engine.sharding.stages import stage_ends, stage_ranges
from disagg.gateway.config import GatewayConfig, GatewayOptions, ModelSource
from disagg.proto.config import KvReserve
from disagg.proto.control import PoolKind, PoolName, ServedAdapter
from disagg.proto.errors import ConfigError
from disagg.proto.ids import GatewayId, kind_of, model_of
from disagg.proto.messages import RoleName, WorkerInfo
from disagg.router.config import PlacementOptions, RecordingOptions, RouterConfig

ROLES: dict[PoolKind, tuple[RoleName, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "colocated": ("prefill", "decode"),
    "workers": ("prefill", "decode"),
}


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a gateway process needs at its start."""

    gateway: GatewayConfig
    routers: dict[str, RouterConfig]
    """Router configurations by the key of the model; see `ModelSource.key`."""
    gateway_id: GatewayId
    name: str = GATEWAY
    """Name of the gateway's process."""
    workers: tuple[WorkerInfo, ...]
    """Ready workers of its models at its start; afterwards it follows the controller, which also announces the workers
    of models that are added."""
    cores: tuple[int, ...] = ()
    recording: RecordingOptions | None = None
    load_every_s: float | None = None
    """Seconds between two load reports for the autoscaler; None without one."""
    restarts: int = 0
    """Number of requests to replace workers, as in `ClusterPlan`."""
    adapters: tuple[ServedAdapter, ...] = ()
    """Adapters that are served at its start; afterwards it follows the controller."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Everything about a cluster that is fixed before the first process starts."""

    config: ClusterConfig
    model_paths: Mapping[str, str]
    """Checkpoint folders, or `fake`, by the key of the model (empty where there is one)."""
    available: tuple[int, ...]
    """Cores on which workers are laid out."""
    layout: Mapping[PoolName, int] | None = None
    """Sizes by which cores and devices are laid out: those that the cluster began with, so that other sizes move no
    worker. None for the configured ones."""
    restarts: int = 0
    """Number of requests to replace workers although nothing differs."""
    cpu_dtype: Dtype = "bfloat16"
    """Meaning of `model.dtype: auto` on its CPUs."""
    memory_bytes: int | None = None
    """Memory of the machine of all workers; None where they may be on several."""
    memory: tuple[str, ...] = ()
    """What the ranks of pools keep in memory whose model has windows or experts, one line a pool."""

    @property
    def cores(self) -> CorePlan:
        """Cores of the first workers, and of the gateways."""
        return plan_cores(with_threads(self.config, len(self.available)), self.available)

    @property
    def sizes(self) -> dict[PoolName, int]:
        """The configured size of each pool, prefill first."""
        return {name: pool.size for name, pool in active_pools(self.config)}

    @property
    def workers(self) -> list[WorkerConfig]:
        """Configurations of the first workers, prefill workers before others."""
        return [self.worker(name, index) for name, size in self.sizes.items() for index in range(size)]

    @property
    def load_every_s(self) -> float | None:
        """Seconds between two reports of a gateway to the autoscaler; None without one."""
        return self.config.autoscaler.interval_s / 2.0 if self.config.autoscaler.enabled else None

    def worker(self, pool: PoolName, index: int) -> WorkerConfig:
        """Configuration of any worker of a pool, also beyond its configured size."""
        config = worker_config(
            self._laid_out(), pool, index, self.model_paths[model_of(pool)], self.available, self.cpu_dtype
        )
        return msgspec.structs.replace(
            config,
            restarts=self.restarts,
            threads_are_open=config.num_threads > 1 and dict(active_pools(self.config))[pool].num_threads == "auto",
        )

    def pool(self, name: PoolName) -> PoolConfig:
        """The section of a pool, with `auto` resolved."""
        return dict(active_pools(self._laid_out()))[name]

    def _laid_out(self) -> ClusterConfig:
        return with_threads(with_sizes(self.config, self.layout or {}), len(self.available))

    def gateway(
        self,
        infos: Sequence[WorkerInfo],
        port: int | None = None,
        http_port: int | None = None,
        name: str = GATEWAY,
    ) -> GatewaySpec:
        """The specification of the gateway of that name when these workers are ready, some of each model. `port`,
        `http_port`: ports at which an earlier process of it listened, or another gateway listens."""
        index = gateway_names(self.config.gateway.replicas).index(name)
        config = gateway_config(self.config, self.model_paths, infos, index)
        return GatewaySpec(
            gateway=with_ports(config, port, http_port),
            routers=router_configs(self.config),
            gateway_id=GatewayId(f"{name}-{uuid.uuid4().hex[:8]}"),
            name=name,
            workers=tuple(info for info in infos if model_of(info.worker_id) in self.model_paths),
            cores=self.cores.gateways[index],
            restarts=self.restarts,
            recording=self.config.gateway.record_events,
            load_every_s=self.load_every_s,
        )


def worker_config(
    config: ClusterConfig,
    name: PoolName,
    index: int,
    model_path: str,
    available: Sequence[int],
    cpu_dtype: Dtype = "bfloat16",
) -> WorkerConfig:
    """The configuration of one worker. `model_path` is the resolved checkpoint folder, or `fake`; `cpu_dtype` as in
    `ClusterPlan`."""
    pool, alone = dict(active_pools(config))[name], models_of(config)[model_of(name)]
    limits = _fields(EngineLimits, pool) | {
        "device": worker_device(config, name, index),
        "speculation": resolved_speculation(
            _with_folder(pool.speculation), pool.device, is_fake=model_path == FAKE_MODEL
        ),
    }
    return WorkerConfig(
        **_fields(ModelOptions, alone.model) | {"dtype": resolved_dtype(alone.model, pool.device, cpu_dtype)},
        **_fields(KernelOptions, config.kernels),
        **limits,
        transfer=config.transfer.limits(pool.device),
        worker_id=worker_id(name, index),
        roles=ROLES[kind_of(name)],  # type: ignore[index]  # the kinds are those of `active_pools`
        is_elastic=alone.mode == "elastic",
        model_path=model_path,
        cores=worker_cores(config, name, index, available),
        block_size=pool.tokens_per_block,
        token_budget=pool.tokens_per_step,
        tail_tokens=device_defaults(pool.device).tail_tokens,
        swap_bytes=swap_bytes(pool),
        tiers=worker_tiers(config, name, index),
        adapters=worker_adapters(alone),
        fake_layers=fake_layers(alone) if model_path == FAKE_MODEL else 1,
        fetch=config.kv_cache.fetch,
        transport=transport_name(alone),
        plaintext_kv=config.network.plaintext_kv,
        failpoints=config.recovery.failpoints,
        token_interval_s=config.gateway.token_interval_ms / 1000,
    )


def _with_folder(options: SpeculationOptions) -> SpeculationOptions:
    """With the folder of the draft model, where there is one."""
    if options.model is None:
        return options
    return msgspec.structs.replace(options, model=str(resolve_model(options.model)))


def _fields(base: type[msgspec.Struct], section: msgspec.Struct) -> dict[str, Any]:
    """Values that a section of the YAML inherits from `base`, to be used as they are."""
    return {name: getattr(section, name) for name in base.__struct_fields__}


def swap_bytes(pool: PoolConfig) -> int:
    """Configured swap size, or the default of the device."""
    return device_defaults(pool.device).swap_bytes if pool.swap_bytes is None else pool.swap_bytes


def worker_tiers(config: ClusterConfig, name: PoolName, index: int) -> TierOptions | None:
    """Tiers of a worker, with a folder of its own; None for one from which nobody would get what they have: it computes
    no prompts from the queue, and others do not fetch from it."""
    tiers = config.kv_cache.tiers
    if tiers is None or (kind_of(name) == "decode" and not config.kv_cache.fetch):
        return None
    if tiers.disk is None or tiers.disk.shared:
        return tiers
    path = f"{tiers.disk.path}/{worker_id(name, index)}"
    return msgspec.structs.replace(tiers, disk=msgspec.structs.replace(tiers.disk, path=path))


def fake_layers(alone: ClusterConfig) -> int:
    """Layers of the fake model, which is the same in all pools: each stage needs one."""
    return max(pool.pp for _, pool in active_pools(alone))


def worker_adapters(alone: ClusterConfig) -> AdapterOptions | None:
    """Adapters of the workers of a model, which `alone` has."""
    section = alone.adapters
    return None if section is None else AdapterOptions(**_fields(AdapterOptions, section))


def check_ranks(pools: Sequence[tuple[PoolName, PoolConfig]], model: ModelConfig) -> None:
    """Check before anything is started that the ranks of a pool's workers can share their model.

    Raises:
        ConfigError: naming the pool's `tp` and the size that cannot be divided, its `pp` where there are fewer layers,
            its `ep` where there are no experts; `tp` or `pp` of an encoder, which has one rank.
    """
    for name, pool in pools:
        if model.encoder is not None and pool.num_ranks > 1:
            key, count = ("tp", pool.tp) if pool.tp > 1 else ("pp", pool.pp)
            raise ConfigError(f"{pool_path(name)}.{key}: {model.architecture} runs on one rank; {key} is {count}")
        stage_ends(model, pool.pp, f"{pool_path(name)}.pp: ")
        key = "ep"
        try:
            whole = with_whole_experts(model) if pool.ep else model
            key = "tp"
            rank_model(whole, Shard(0, pool.tp))
        except ConfigError as error:
            raise ConfigError(f"{pool_path(name)}.{key}: {error}") from None


def transport_name(config: ClusterConfig) -> TransportName:
    """The configured transport, with `auto` resolved: on CUDA each pair chooses."""
    if config.transfer.transport != "auto" or active_pools(config)[0][1].device != "cpu":
        return config.transfer.transport
    return "shm" if config.network.bind == "loopback" else "gloo"


def gateway_config(
    config: ClusterConfig, model_paths: Mapping[str, str], infos: Sequence[WorkerInfo], index: int = 0
) -> GatewayConfig:
    """The configuration of one of the gateways. `infos`: the workers."""
    own_port = config.gateway.replica_http_port
    return GatewayConfig(
        **_fields(GatewayOptions, config.gateway),
        models=tuple(
            ModelSource(
                key=key,
                name=alone.model.served_name,
                path=model_paths[key],
                prefix_root=alone.model.served_name,
                max_model_len=_shortest(infos, key) or alone.model.max_model_len,
            )
            for key, alone in models_of(config).items()
        ),
        port=config.gateway.port,
        http_port=config.gateway.chosen_http_port,
        vllm_aliases=config.metrics.vllm_aliases,
        name=gateway_names(config.gateway.replicas)[index],
        shares_ports=config.gateway.replicas > 1,
        own_http_port=own_port + index if own_port else 0,
        shows_workers=index == 0,
        ttft_target_s=_strictest(alone.slo.ttft_ms for alone in models_of(config).values()),
        tpot_target_s=_strictest(alone.slo.tpot_ms for alone in models_of(config).values()),
    )


def _strictest(targets_ms: Iterable[float | None]) -> float | None:
    """The smallest target in seconds; None where there is none."""
    return seconds(min((target for target in targets_ms if target is not None), default=None))


def _shortest(infos: Sequence[WorkerInfo], key: str) -> int | None:
    """The smallest limit of a model's workers; None without workers: then the router checks it."""
    return min((info.max_model_len for info in infos if model_of(info.worker_id) == key), default=None)


def router_configs(config: ClusterConfig) -> dict[str, RouterConfig]:
    """Configurations of the routers by the key of the model."""
    return {key: router_config(alone) for key, alone in models_of(config).items()}


def router_config(config: ClusterConfig) -> RouterConfig:
    """The configuration of the router of a cluster of one model."""
    decode_pool = active_pools(config)[-1][1]
    placement = _fields(PlacementOptions, config.placement)
    if placement["policy"] == "auto":
        placement["policy"] = "elastic" if config.mode == "elastic" else "joint"
    if placement["decodes"] == "auto":
        placement["decodes"] = "spread"
    return RouterConfig(
        **placement,
        **_fields(KvReserve, decode_pool),
        ttft_slo_s=seconds(config.slo.ttft_ms),
        tpot_slo_s=seconds(config.slo.tpot_ms),
        max_queued=config.gateway.max_queued,
        starts_workers=starts_from_zero(config),
        num_gateways=config.gateway.replicas,
        silent_after_s=config.recovery.suspect_after_s,
        stuck_after_s=config.recovery.stuck_after_s,
        num_traces=config.metrics.num_traces,
    )


def starts_from_zero(config: ClusterConfig) -> bool:
    """Whether the autoscaler empties pools, and starts workers for the requests that come then."""
    scaler = config.autoscaler
    return scaler.enabled and not scaler.dry_run and any(pool.min_size == 0 for _, pool in active_pools(config))


def seconds(millis: float | None) -> float | None:
    """Convert milliseconds of the user's YAML to seconds."""
    return None if millis is None else millis / 1000


def with_ports(config: GatewayConfig, port: int | None, http_port: int | None) -> GatewayConfig:
    """The configuration with the ports that are given."""
    ports = {"port": port, "http_port": http_port}
    return msgspec.structs.replace(config, **{name: value for name, value in ports.items() if value is not None})


def port_of(address: str) -> int | None:
    """Port in host:port; None for an empty address."""
    return int(address.rpartition(":")[2]) if address else None


def plan_cluster(
    config: ClusterConfig,
    available: tuple[int, ...] | None = None,
    cpu_dtype: Dtype = "bfloat16",
    memory_bytes: int | None = None,
) -> ClusterPlan:
    """Find the models, and check that they can be served.

    Args:
        config: the cluster's configuration.
        available: the cores to lay out processes on; None for all that this process may use.
        cpu_dtype: as in `ClusterPlan`.
        memory_bytes: memory of the machine of all workers; None where they may be on several.

    Raises:
        ConfigError: naming a field.
    """
    check_installed(config.transfer.transport)
    paths = {key: _find_model(alone) for key, alone in models_of(config).items()}
    caches: list[PoolCache] = []
    for key, alone in models_of(config).items():
        if paths[key] == FAKE_MODEL:
            continue
        model, options = read_model_config(paths[key]), alone.model
        pools = [(name, pool) for name, pool in active_pools(config) if model_of(name) == key]
        check_ranks(pools, model)
        for name, pool in pools:
            dtype = resolved_dtype(options, pool.device, cpu_dtype)
            kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
            check_kv_dtype(model, kv_dtype, f"models.{key}.model." if config.models else "model.")
            draft = _draft_of(name, pool, paths[key])
            if draft is not None:
                check_kv_dtype(draft, kv_dtype, f"{pool_path(name)}.speculation.model: model.")
            tiers = worker_tiers(config, name, 0)
            caches.append(
                PoolCache(
                    name,
                    pool,
                    model,
                    stage_ranges(stage_ends(model, pool.pp)),
                    kv_dtype,
                    ELEMENT_BYTES[dtype],
                    expert_weight_bytes(model, options.quantization, dtype),
                    draft,
                    0 if tiers is None else tiers.host_bytes,
                    has_folder=tiers is not None and tiers.disk is not None,
                    adapters=worker_adapters(alone),
                )
            )
            if tiers is not None:
                check_no_windows(caches[-1], "kv_cache.tiers")
                check_tiers_hold(caches[-1], tiers, options.max_model_len)
            if config.kv_cache.fetch:
                check_no_windows(caches[-1], "kv_cache.fetch")
    for cache in caches:
        check_block(cache)
    if memory_bytes is not None:
        check_fits(caches, memory_bytes)
    cores = available_cores() if available is None else available
    return ClusterPlan(
        config, paths, cores, cpu_dtype=cpu_dtype, memory_bytes=memory_bytes, memory=memory_notes(caches)
    )


def _draft_of(name: PoolName, pool: PoolConfig, model_path: str) -> ModelConfig | None:
    """The draft model of a pool that decodes, whose vocabulary is compared with the model's."""
    draft = _with_folder(pool.speculation).model
    if draft is None or kind_of(name) == "prefill":
        return None
    check_draft_vocabulary(model_path, draft, f"{pool_path(name)}.speculation.model")
    return read_model_config(draft)


def _find_model(alone: ClusterConfig) -> str:
    path = alone.model.path
    return FAKE_MODEL if path == FAKE_MODEL else str(resolve_model(path or alone.model.served_name))


def check_gateway(config: ClusterConfig) -> None:
    """Check before models are loaded that the ports of the gateway are free, and that keys, certificates and folders
    can be used; raises `LaunchError` or `ConfigError`."""
    from disagg.connections.shell.channels import check_given  # loads gRPC, as the next one
    from disagg.gateway.security import check_files
    from disagg.gateway.stores import check_stores

    gateway = config.gateway
    check_files(gateway.api_keys, gateway.tls)
    check_stores(gateway, gateway.record_events)
    if config.network.certificates is not None:
        check_given(config.network.certificates)
    _check_port(gateway.host, gateway.port, "--port 0 takes any free one")
    if (http_port := gateway.chosen_http_port) is not None:
        _check_port(gateway.host, http_port, "set gateway.http_port; --port 0 takes any free ones")
        if gateway.replicas > 1 and (first := gateway.replica_http_port):
            for port in range(first, first + gateway.replicas):
                _check_port(gateway.host, port, "set gateway.replica_http_port")


def _check_port(host: str, port: int, advice: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            hint = f"; {advice}" if error.errno == errno.EADDRINUSE else ""
            raise LaunchError(f"gateway: cannot listen on {host}:{port} ({error.strerror}){hint}") from None


def new_secret(network: NetworkConfig) -> ClusterSecret:
    """Make the secret by which the processes of a new cluster authenticate each other; it says whether they encrypt."""
    return ClusterSecret(
        secrets.token_bytes(NUM_BYTES), encrypted=network.is_encrypted, certificates=network.certificates
    )
