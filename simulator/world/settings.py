"""The description of a simulated cluster: pools, links, overheads, faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from disagg.engine.config import WorkerConfig
from disagg.proto.ids import WorkerId
from disagg.proto.messages import KvLayout
from disagg.router.config import RouterConfig
from disagg.simulator.durations.overheads import NO_OVERHEADS, Overheads, Sharing
from disagg.simulator.durations.tier_times import DEFAULT_TIER_TIMES, TierTimes
from disagg.simulator.world.slow_times import SlowTime
from disagg.step_times.interface import LinkTimes, StagedTimes, StepTimes

EngineKind = Literal["exact", "fast"]
"""`exact`: the steps of the real scheduler. `fast`: a few numbers for each sequence; see
`simulator/fast/fast_worker.py`."""


DEFAULT_LINK = LinkTimes(bandwidth_bytes_per_s=1e10, latency_s=1e-4)


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Workers of one kind, named `<name>-0`, `<name>-1`, ..."""

    name: str
    size: int
    worker: WorkerConfig
    """Configuration of each worker; `worker_id` is replaced."""
    num_blocks: int
    """Number of KV blocks of each worker."""
    times: StepTimes
    expert_share: float = 0.0
    """The same as `WorkerInfo.expert_share`."""
    cold_start_s: float = 0.0
    """Seconds from the start of a worker to its first request. The workers of the beginning have started already."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"pools.{self.name}.size: expected at least 0; got {self.size}")
        if self.num_blocks < 1:
            raise ValueError(f"pools.{self.name}: its workers have no room for a single KV block; raise kv_cache_bytes")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The end of a worker's process, without a message; all that are connected to it see that at once."""

    at_s: float
    worker_id: str
    back_after_s: float | None = None
    """Seconds until a new process of the worker can be used; None for never."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster, and the faults and slow times of a run."""

    pools: Sequence[PoolSpec]
    kv_layout: KvLayout
    """Layout of one token's KV in all workers."""
    max_model_len: int
    router: RouterConfig = field(default_factory=RouterConfig)
    link: LinkTimes = DEFAULT_LINK
    overheads: Overheads = NO_OVERHEADS
    tier_times: TierTimes = DEFAULT_TIER_TIMES
    sharing: Sharing | None = None
    """How much workers on one machine slow each other down; None if each has its own machine."""
    gateway_neighbour: WorkerId | None = None
    """The worker on whose core the gateway runs."""
    engine: EngineKind = "exact"
    faults: Sequence[Fault] = ()
    slow_times: Sequence[SlowTime] = ()
    jump_s: float = 1.0
    """Exact engine: seconds for which similar decode steps are applied and reported together, at most until the router
    places a request. 0 applies and reports each on its own."""
    sample_s: float = 1.0
    """Seconds between two samples of the time series."""

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: two have one name; got {', '.join(names)}")
        if not any("decode" in pool.worker.roles and pool.size for pool in self.pools):
            raise ValueError(
                "pools: no worker decodes; a cluster needs a pool decode, colocated or workers of at least 1"
            )
        if self.engine == "fast" and any(pool.worker.fetch for pool in self.pools):
            raise ValueError("kv_cache.fetch: the fast engine fetches nothing; take the exact one")
        if self.engine == "fast" and any(pool.worker.tiers is not None for pool in self.pools):
            raise ValueError("kv_cache.tiers: the fast engine knows no tiers; take the exact one")
        for pool in self.pools:
            if isinstance(pool.times, StagedTimes):
                self._check_staged(pool.name)
        if not self.jump_s >= 0:
            raise ValueError(f"jump_s: expected a time of at least 0; got {self.jump_s}")
        if not self.sample_s > 0:
            raise ValueError(f"sample_s: expected a time above 0; got {self.sample_s}")

    def _check_staged(self, name: str) -> None:
        """Refuse what is not simulated of a pool whose workers have several stages."""
        if self.engine != "fast":
            raise ValueError(f"pools.{name}: the exact engine knows no stages; take the fast one")
        if self.sharing is not None or self.slow_times:
            raise ValueError(f"pools.{name}: workers of several stages share no machine and have no slow times")
