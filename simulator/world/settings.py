"""What is simulated: pools, links, overheads, faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from disagg.engine.config import WorkerConfig
from disagg.proto.ids import WorkerId
from disagg.proto.messages import KvLayout
from disagg.router.config import RouterConfig
from disagg.simulator.durations.overheads import NO_OVERHEADS, Overheads, Sharing
from disagg.simulator.world.slow_times import SlowTime
from disagg.step_times.interface import LinkTimes, StepTimes

EngineKind = Literal["exact", "fast"]
"""`exact`: the steps of the real scheduler. `fast`: a few numbers a sequence; see `workers/fast_worker.py`."""


DEFAULT_LINK = LinkTimes(bandwidth_bytes_per_s=1e10, latency_s=1e-4)


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """Workers of one kind, named `<name>-0`, `<name>-1`, ..."""

    name: str
    size: int
    worker: WorkerConfig
    """Of each of them; `worker_id` is replaced."""
    num_blocks: int
    """KV blocks of each."""
    times: StepTimes
    cold_start_s: float = 0.0
    """From the start of a worker to its first request. Those that are there at the beginning have started."""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"pools.{self.name}.size: expected at least 0; got {self.size}")
        if self.num_blocks < 1:
            raise ValueError(f"pools.{self.name}: its workers have no room for a single KV block; raise kv_cache_bytes")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A worker's process ends without a word; everybody connected to it sees that at once."""

    at_s: float
    worker_id: str
    back_after_s: float | None = None
    """When a new process of it can be used; None for never."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """A cluster and what happens to it."""

    pools: Sequence[PoolSpec]
    kv_layout: KvLayout
    """Of one token, in all workers."""
    max_model_len: int
    router: RouterConfig = field(default_factory=RouterConfig)
    link: LinkTimes = DEFAULT_LINK
    overheads: Overheads = NO_OVERHEADS
    sharing: Sharing | None = None
    """Of workers that run on one machine; None where each has its own."""
    gateway_neighbour: WorkerId | None = None
    """The worker whose core the gateway has, too."""
    engine: EngineKind = "exact"
    faults: Sequence[Fault] = ()
    slow_times: Sequence[SlowTime] = ()
    jump_s: float = 1.0
    """Exact engine: decode steps that are alike are taken together for so long, and told together, before the router
    places a request at the latest. 0 takes and tells each by itself."""
    sample_s: float = 1.0
    """Between two samples of the time series."""

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pools: two have one name; got {', '.join(names)}")
        if not any("decode" in pool.worker.roles and pool.size for pool in self.pools):
            raise ValueError(
                "pools: no worker decodes; a cluster needs a pool decode, colocated or workers of at least 1"
            )
        if not self.jump_s >= 0:
            raise ValueError(f"jump_s: expected a time of at least 0; got {self.jump_s}")
        if not self.sample_s > 0:
            raise ValueError(f"sample_s: expected a time above 0; got {self.sample_s}")
