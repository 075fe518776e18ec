"""From a configuration to what each process is told. Pure: the machine's cores come as an argument.

plan_cores      which of the workers that come first run on which cores; warnings where cores are shared
worker_cores    the same for any worker, also for one that a pool grows by later
worker_config, router_config, gateway_config
check_ranks     whether a model can be shared by the ranks of each pool's workers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from disagg.cluster.config.cluster_config import ClusterConfig, PoolConfig, active_pools
from disagg.cluster.control.workers import worker_id
from disagg.engine.checkpoint.checkpoint import ModelConfig
from disagg.engine.config import TransportName, WorkerConfig
from disagg.engine.runner.model.sharding import rank_model
from disagg.engine.sharding.shards import Shard
from disagg.proto.control import PoolName
from disagg.proto.errors import ConfigError
from disagg.proto.messages import RoleName, WorkerInfo
from disagg.router.config import RouterConfig
from disagg.router.gateway.config import GatewayConfig

ROLES: dict[PoolName, tuple[RoleName, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "colocated": ("prefill", "decode"),
}

DEFAULT_SWAP_BYTES = 256 << 20

TAIL_TOKENS = 32
"""See `WorkerConfig.tail_tokens`. On a CPU; not measured on GPUs, and off there."""


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Who is pinned where; an empty tuple is not pinned."""

    workers: dict[str, tuple[int, ...]]
    """Worker id -> cores."""
    gateway: tuple[int, ...]
    """The gateway shares with the first prefill worker, never with a decode worker while there is a choice."""
    warnings: tuple[str, ...]


def plan_cores(config: ClusterConfig, available: Sequence[int]) -> CorePlan:
    """Give each worker with `cores: auto` on a CPU the next `num_cores` of the `available` cores, round and round."""
    workers = {
        str(worker_id(name, index)): worker_cores(config, name, index, available)
        for name, pool in active_pools(config)
        for index in range(pool.size)
    }
    first = next(iter(workers.values()))
    return CorePlan(workers, first[:1], (*_sharing_warnings(workers, available), *_crowding_warnings(config, workers)))


def worker_cores(config: ClusterConfig, name: PoolName, index: int, available: Sequence[int]) -> tuple[int, ...]:
    """The cores of one worker, whatever the size of its pool is now.

    Workers beyond the configured sizes go on round the cores, one of each pool in turn: with as many pools as cores
    they share with their own kind.
    """
    pools = active_pools(config)
    pool = dict(pools)[name]
    if not _is_pinned_by_us(pool):
        return pool.cores if isinstance(pool.cores, tuple) else ()
    counts = {other: min(num_cores(p), len(available)) for other, p in pools if _is_pinned_by_us(p)}
    sizes = {other: dict(pools)[other].size for other in counts}
    before = list(counts)[: list(counts).index(name)]
    if index < pool.size:
        first = sum(counts[other] * sizes[other] for other in before) + counts[name] * index
    else:
        rounds = index - pool.size
        first = sum(counts[other] * (sizes[other] + rounds) for other in counts) + sum(counts[o] for o in before)
    return tuple(available[(first + offset) % len(available)] for offset in range(counts[name]))


def num_cores(pool: PoolConfig) -> int:
    """Cores that one worker of a pool uses: one for each compute thread of each rank."""
    return pool.tp * pool.num_threads


def _is_pinned_by_us(pool: PoolConfig) -> bool:
    return pool.cores == "auto" and pool.device == "cpu"


def _sharing_warnings(workers: dict[str, tuple[int, ...]], available: Sequence[int]) -> tuple[str, ...]:
    users = Counter(core for cores in workers.values() for core in cores)
    warnings = []
    for core in sorted(users):
        names = [name for name, cores in workers.items() if core in cores]
        if core not in available:
            warnings.append(
                f"core {core} (for {', '.join(names)}) is not among this process's cores; they will not be pinned"
            )
        elif len(names) > 1:
            warnings.append(f"core {core} is shared by {', '.join(names)}: fine for trying out, not for timing")
    return tuple(warnings)


def _crowding_warnings(config: ClusterConfig, workers: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Of ranks that share cores with each other: every step waits for the slowest."""
    return tuple(
        f"the {pool.tp} ranks of {name} share {len(cores)} cores: fine for trying out, not for timing"
        for pool_name, pool in active_pools(config)
        for name, cores in workers.items()
        if name.startswith(f"{pool_name}-") and 0 < len(cores) < pool.tp
    )


def worker_config(
    config: ClusterConfig, name: PoolName, index: int, model_path: str, available: Sequence[int]
) -> WorkerConfig:
    """What a worker process is told. `model_path` is the resolved checkpoint folder, or `fake`."""
    pool = dict(active_pools(config))[name]
    transfer = config.transfer
    return WorkerConfig(
        worker_id=worker_id(name, index),
        roles=ROLES[name],
        model_path=model_path,
        device=pool.device,
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        share_weights=config.model.share_weights,
        kv_cache_dtype=config.model.kv_cache_dtype,
        cores=worker_cores(config, name, index, available),
        num_threads=pool.num_threads,
        tp=pool.tp,
        block_size=pool.tokens_per_block,
        kv_cache_bytes=pool.kv_cache_bytes,
        num_blocks=pool.num_blocks,
        max_num_seqs=pool.max_num_seqs,
        token_budget=pool.token_budget,
        step_ahead=pool.step_ahead,
        scheduling=pool.scheduling,
        tail_tokens=TAIL_TOKENS if pool.device == "cpu" else 0,
        max_model_len=config.model.max_model_len,
        decode_reserve_tokens=pool.decode_reserve_tokens,
        watermark=pool.watermark,
        cached_share=pool.cached_share,
        cached_keep_s=pool.cached_keep_s,
        swap_bytes=swap_bytes(pool),
        transport=transport_name(config),
        plaintext_kv=config.network.plaintext_kv,
        chunk_bytes=transfer.chunk_bytes,
        staging_bytes=transfer.staging_bytes,
        max_pairs=transfer.max_pairs,
        lease_timeout_s=transfer.lease_timeout_s,
        heartbeat_s=transfer.heartbeat_s,
        transfer_timeout_s=transfer.timeout_s,
        failpoints=config.recovery.failpoints,
        token_interval_s=config.gateway.token_interval_ms / 1000,
    )


def swap_bytes(pool: PoolConfig) -> int:
    """What was asked for, or the default of the device."""
    if pool.swap_bytes is not None:
        return pool.swap_bytes
    return DEFAULT_SWAP_BYTES if pool.device == "cpu" else 0


def check_ranks(config: ClusterConfig, model: ModelConfig) -> None:
    """Find out before anything is started that the ranks of a pool's workers cannot share a model.

    Raises:
        ConfigError: naming the pool's `tp` and the size that cannot be divided.
    """
    for name, pool in active_pools(config):
        try:
            rank_model(model, Shard(0, pool.tp))
        except ConfigError as error:
            raise ConfigError(f"pools.{name}.tp: {error}") from None


def transport_name(config: ClusterConfig) -> TransportName:
    """The transport that `auto` stands for, or the one asked for."""
    if config.transfer.transport != "auto":
        return config.transfer.transport
    if active_pools(config)[0][1].device != "cpu":
        return "nccl"
    return "shm" if config.network.bind == "loopback" else "gloo"


def gateway_config(config: ClusterConfig, model_path: str, infos: Sequence[WorkerInfo]) -> GatewayConfig:
    """What the gateway is told. `infos` are the workers, which must all have the same fingerprint."""
    return GatewayConfig(
        model_name=config.model.served_name,
        model_path=model_path,
        fingerprint=infos[0].fingerprint,
        host=config.gateway.host,
        port=config.gateway.port,
        http_port=config.gateway.chosen_http_port,
        api_keys=config.gateway.api_keys,
        tls=config.gateway.tls,
        allowed_hosts=config.gateway.allowed_hosts,
        allowed_origins=config.gateway.allowed_origins,
        max_connections=config.gateway.max_connections,
        max_grpc_connections=config.gateway.max_grpc_connections,
        max_model_len=min(info.max_model_len for info in infos),
        vllm_aliases=config.metrics.vllm_aliases,
    )


def router_config(config: ClusterConfig) -> RouterConfig:
    """What the router is told."""
    decode_pool = active_pools(config)[-1][1]
    return RouterConfig(
        local_prefill=config.placement.local_prefill,
        policy=config.placement.policy,
        admission=config.placement.admission,
        ttft_slo_s=seconds(config.slo.ttft_ms),
        tpot_slo_s=seconds(config.slo.tpot_ms),
        max_queued=config.gateway.max_queued,
        silent_after_s=config.recovery.suspect_after_s,
        stuck_after_s=config.recovery.stuck_after_s,
        decode_reserve_tokens=decode_pool.decode_reserve_tokens,
        watermark=decode_pool.watermark,
        num_traces=config.metrics.num_traces,
    )


def seconds(millis: float | None) -> float | None:
    """Milliseconds of the user's YAML as seconds."""
    return None if millis is None else millis / 1000
