"""What gateways tell the autoscaler of the load, and what it decides. Counts and durations, no clock readings: clocks
differ between hosts."""

from __future__ import annotations

import msgspec

from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import KvLayout, Message, StepCoefficients

MAX_REQUEST_SAMPLES = 256
"""Largest number of requests in one report: the latest ones."""


class RequestSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One of the latest requests, refused ones among them."""

    age_s: float
    """Time since the request's arrival, in seconds."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that no worker had to compute."""
    output_tokens: int | None
    """Output tokens of the answer; None where the request still runs, failed or was refused."""
    max_tokens: int
    """Largest number of output tokens that the request allows."""
    ttft_s: float | None = None
    """Target of the time to the first token, in seconds; None without one."""
    tpot_s: float | None = None


class WorkerSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One worker in a router's view; counts as in `WorkerInfo` and `Load`."""

    worker_id: WorkerId
    incarnation: Incarnation
    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    kv_layout: KvLayout
    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    """KV blocks that sequences hold or that are reserved for them."""
    steps: StepCoefficients | None = None
    """Coefficients of its step times, as placement uses them; None before any was measured."""


class LoadReport(Message, frozen=True, kw_only=True, tag=True):
    """Load of one model, as one gateway sees it."""

    model: str = ""
    """Key of the model; empty where the cluster serves only one."""
    num_arrived: int
    """Requests that arrived since the router of the model started, refused ones included."""
    num_queued: int
    num_running: int
    num_met: int = 0
    """Requests of the last minute that met their targets."""
    num_judged: int = 0
    """Requests of the last minute that had targets."""
    requests: tuple[RequestSample, ...] = ()
    """The latest requests, the latest one first."""
    workers: tuple[WorkerSample, ...] = ()
    """Workers on which requests are placed."""
    link_latency_s: float = 1e-4
    link_byte_s: float = 1e-10


class PoolDecision(Message, frozen=True, kw_only=True):
    """Size that the policy wants for one pool."""

    name: str
    size: int
    """Desired size of the pool when this was decided."""
    wanted: int
    reason: str
    change: str
    """The condition under which the decision would change, as text."""


class Decision(Message, frozen=True, kw_only=True):
    """One decision of a policy, about all pools."""

    pools: tuple[PoolDecision, ...]
    prompt_tokens_per_s: float = 0.0
    """Rate of prompt tokens that arrive and are not cached."""
    output_tokens_per_s: float = 0.0
    """Rate of output tokens that the arriving requests ask for."""
    requests_per_s: float = 0.0
    forecast_per_s: float = 0.0
    """Expected requests per second at the time when a worker that is started now would serve."""

    @property
    def sizes(self) -> dict[str, int]:
        """Wanted sizes by pool."""
        return {pool.name: pool.wanted for pool in self.pools}

    @property
    def is_change(self) -> bool:
        """Whether the decision resizes any pool."""
        return any(pool.size != pool.wanted for pool in self.pools)


class AutoscalerState(Message, frozen=True, kw_only=True, tag=True):
    """State of the autoscaler, for operators."""

    policy: str
    dry_run: bool
    decision: Decision | None = None
    """The latest decision; None before the first one."""
    age_s: float = 0.0
    """Time since the latest decision, in seconds."""
    changes: dict[str, int] = msgspec.field(default_factory=dict)
    """`<pool> up` and `<pool> down`: how often it was resized, or would have been in a dry run."""
