"""Assignment of workers to the cores and CUDA devices of one machine. Pure: the cores and devices are arguments.

plan_cores which of the workers that come first run on which cores; warnings where cores are shared worker_cores the
same for any worker, also for one that a pool grows by later worker_device the first device of any worker check_devices
finds workers that would share a device, or have none
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.cluster.config.cluster_config import ClusterConfig, PoolConfig, active_pools, pool_path
from disagg.cluster.config.model_pools import with_pool_fields
from disagg.cluster.core.workers import worker_id
from disagg.engine.device_environment import ONE_GPU_VARIABLE
from disagg.proto.control import PoolName
from disagg.proto.errors import ConfigError
from disagg.proto.wording import counted


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores of each process; a process with an empty tuple is not pinned."""

    workers: dict[str, tuple[int, ...]]
    """Cores by worker id."""
    gateways: tuple[tuple[int, ...], ...]
    """Cores of each gateway. The first one shares with the first prefill worker, and with a decode worker only if there
    is no other choice. The others get one core each of those that no worker has; without such a core they are not
    pinned."""
    warnings: tuple[str, ...]

    @property
    def gateway(self) -> tuple[int, ...]:
        """Cores of the first gateway."""
        return self.gateways[0]


def plan_cores(config: ClusterConfig, available: Sequence[int]) -> CorePlan:
    """Give each worker with `cores: auto` on a CPU the next `num_cores` of the `available` cores, round and round."""
    workers = {
        str(worker_id(name, index)): worker_cores(config, name, index, available)
        for name, pool in active_pools(config)
        for index in range(pool.size)
    }
    first = next(iter(workers.values()))
    taken = {core for cores in workers.values() for core in cores}
    free = iter([core for core in available if core not in taken] if first else [])
    others = [(core,) if (core := next(free, None)) is not None else () for _ in range(1, config.gateway.replicas)]
    return CorePlan(
        workers, (first[:1], *others), (*_sharing_warnings(workers, available), *_crowding_warnings(config, workers))
    )


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
    first = _first(counts, {other: p.size for other, p in pools}, name, index)
    return tuple(available[(first + offset) % len(available)] for offset in range(counts[name]))


def _first(counts: Mapping[PoolName, int], sizes: Mapping[PoolName, int], name: PoolName, index: int) -> int:
    """Index of the first of a worker's cores or devices, if the workers of the pools in `counts` take that many each:
    first those of the configured sizes, pool by pool, then one of each pool in turn."""
    before = list(counts)[: list(counts).index(name)]
    if index < sizes[name]:
        return sum(counts[other] * sizes[other] for other in before) + counts[name] * index
    rounds = index - sizes[name]
    return sum(counts[other] * (sizes[other] + rounds) for other in counts) + sum(counts[other] for other in before)


# ---------------------------------------------------------------- devices


def worker_device(config: ClusterConfig, name: PoolName, index: int) -> str:
    """The first device of one worker, whatever the size of its pool is now; its ranks take the next ones. Workers with
    `device: cuda` divide the devices from the first one on, those with `cuda:<index>` the devices from there on."""
    pools = active_pools(config)
    pool = dict(pools)[name]
    kind, _, given = pool.device.partition(":")
    if kind == "cpu":
        return pool.device
    if given:
        return f"{kind}:{int(given) + pool.num_ranks * index}"
    counts = {other: p.num_ranks for other, p in pools if p.device == kind}
    return f"{kind}:{_first(counts, {other: p.size for other, p in pools}, name, index)}"


def check_devices(config: ClusterConfig, num_devices: int | None, *, nccl_shares: bool = False) -> None:
    """Find out before anything is started that workers would share a CUDA device by mistake. One rule for all
    transports: workers share a device where all pools name theirs (`cuda:0`), and with nccl only where that is asked
    for besides (`nccl_shares`): it is slow there. `num_devices`: number of
    the machine's devices; None where that is unknown.

    Raises:
        ConfigError: naming the workers.
    """
    users: dict[int, str] = {}
    for name, pool in active_pools(config):
        for index in range(pool.size):
            worker = str(worker_id(name, index))
            _, _, first = worker_device(config, name, index).partition(":")
            for device in range(int(first), int(first) + pool.num_ranks) if first else ():
                if device in users:
                    sharing = f"{worker} would share CUDA device {device} with {users[device]}"
                    _check_sharing(config, f"{pool_path(name)}.device", sharing, nccl_shares=nccl_shares)
                    _check_shared_memory(config, device)
                users[device] = worker
    if users and num_devices is not None and max(users) >= num_devices:
        raise ConfigError(
            f"pools: {users[max(users)]} needs CUDA device {max(users)}; this machine has {num_devices}, and each rank "
            "of a worker takes one. Pools that name the same one, such as cuda:0, share it"
        )


def _check_sharing(config: ClusterConfig, path: str, sharing: str, *, nccl_shares: bool) -> None:
    if not all(":" in pool.device for _, pool in active_pools(config)):
        raise ConfigError(f"{path}: {sharing}; name the device in every pool, such as cuda:0, where that is meant")
    if config.transfer.transport == "nccl" and not nccl_shares:
        raise ConfigError(
            f"{path}: {sharing}, which NCCL refuses; use another transfer.transport, or set {ONE_GPU_VARIABLE}=1 in "
            "the environment: KV then goes through sockets, right but slowly"
        )


def _check_shared_memory(config: ClusterConfig, device: int) -> None:
    """Check that workers share one device only with given KV sizes: otherwise each would measure what the others have
    not taken yet."""
    for name, pool in active_pools(config):
        if pool.kv_cache_bytes == "auto" and pool.num_blocks is None:
            raise ConfigError(
                f"{pool_path(name)}.kv_cache_bytes: auto is for a CUDA device of its own; set a size where workers "
                f"share device {device}"
            )


# ---------------------------------------------------------------- cores


def num_cores(pool: PoolConfig) -> int:
    """Number of cores of one worker of a pool: one for each compute thread of each rank. `with_threads` has set the
    number of threads."""
    assert pool.num_threads != "auto"
    return pool.num_ranks * pool.num_threads


def with_threads(config: ClusterConfig, num_available: int) -> ClusterConfig:
    """The configuration with a number in place of each `num_threads: auto`: the workers that have it share the cores
    that the others leave of `num_available`. With `cores` of their own these count, and on a GPU it is one."""
    pools = active_pools(config)
    is_open = {name: pool.num_threads == "auto" for name, pool in pools}
    shares = [pool for name, pool in pools if is_open[name] and pool.device == "cpu" and pool.cores == "auto"]
    taken = sum(pool.size * num_cores(pool) for name, pool in pools if not is_open[name] and _is_pinned_by_us(pool))
    share = max(1, (num_available - taken) // max(1, sum(pool.size * pool.num_ranks for pool in shares)))
    return with_pool_fields(
        config, "num_threads", {name: _open_threads(pool, share) for name, pool in pools if is_open[name]}
    )


def _open_threads(pool: PoolConfig, share: int) -> int:
    if pool.device != "cpu":
        return 1
    return max(1, len(pool.cores) // pool.num_ranks) if isinstance(pool.cores, tuple) else share


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
    """Warnings for ranks that share cores with each other: every step waits for the slowest one."""
    return tuple(
        f"the {pool.num_ranks} ranks of {name} share {counted(len(cores), 'core')}: fine for trying out, not for timing"
        for pool_name, pool in active_pools(config)
        for name, cores in workers.items()
        if name.startswith(f"{pool_name}-") and 0 < len(cores) < pool.num_ranks
    )
