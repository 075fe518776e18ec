"""What gateways tell the autoscaler of the load, and what it decides. Counts and durations, no clock readings: clocks
differ between hosts."""

from __future__ import annotations

import msgspec

from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import Message, StepCoefficients

MAX_REQUEST_SAMPLES = 256
"""Of the latest requests in one report."""


class RequestSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the latest requests, refused ones among them."""

    age_s: float
    """Since its arrival."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, that no worker had to compute."""
    output_tokens: int | None
    """None where they are unknown: it runs, failed or was refused."""
    max_tokens: int
    """That it allows."""
    ttft_s: float | None = None
    """Its targets."""
    tpot_s: float | None = None


class WorkerSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One worker in a router's view; counts as in `WorkerInfo` and `Load`."""

    worker_id: WorkerId
    incarnation: Incarnation
    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    bytes_per_token: int
    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    """That sequences hold or are promised."""
    steps: StepCoefficients | None = None
    """Its step times, as placement has them; None before any was measured."""


class LoadReport(Message, frozen=True, kw_only=True, tag=True):
    """The load of one model at one gateway's door."""

    model: str = ""
    """Its key; empty where there is one."""
    num_arrived: int
    """Requests since it began, refused ones among them."""
    num_queued: int
    num_running: int
    num_met: int = 0
    """Of the requests of the last minute that had targets, those that met them."""
    num_judged: int = 0
    """Those that had targets."""
    requests: tuple[RequestSample, ...] = ()
    """The latest first."""
    workers: tuple[WorkerSample, ...] = ()
    """That requests are placed on."""
    link_latency_s: float = 1e-4
    link_byte_s: float = 1e-10


class PoolDecision(Message, frozen=True, kw_only=True):
    """What one pool should be."""

    name: str
    size: int
    """Desired size when it was decided."""
    wanted: int
    reason: str
    change: str
    """What would change it."""


class Decision(Message, frozen=True, kw_only=True):
    """One decision of a policy, about all pools."""

    pools: tuple[PoolDecision, ...]
    prompt_tokens_per_s: float = 0.0
    """That arrive and are not cached."""
    output_tokens_per_s: float = 0.0
    """That what arrives asks for."""
    requests_per_s: float = 0.0
    forecast_per_s: float = 0.0
    """Requests per second when a worker that is started now would serve."""

    @property
    def sizes(self) -> dict[str, int]:
        """What is wanted, by pool."""
        return {pool.name: pool.wanted for pool in self.pools}

    @property
    def is_change(self) -> bool:
        """Whether any pool is to be resized."""
        return any(pool.size != pool.wanted for pool in self.pools)


class AutoscalerState(Message, frozen=True, kw_only=True, tag=True):
    """The autoscaler, for operators."""

    policy: str
    dry_run: bool
    decision: Decision | None = None
    """The latest; None before the first."""
    age_s: float = 0.0
    """Since then."""
    changes: dict[str, int] = msgspec.field(default_factory=dict)
    """`<pool> up` and `<pool> down`: how often it was resized, or would have been in a dry run."""
