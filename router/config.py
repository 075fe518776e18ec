"""The configuration of the router. `cluster` makes it from the user's YAML."""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.proto.errors import ConfigError

LocalPrefill = Literal["auto", "never"]
PolicyName = Literal["joint", "prefix", "least_loaded", "round_robin", "random"]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one router."""

    local_prefill: LocalPrefill = "auto"
    """`auto`: a decode worker may compute an uncached suffix itself. `never`: every prompt goes through a prefill
    worker. An answer that has begun and outgrew every prefill worker is continued on a decode worker alone all the
    same: otherwise it would be lost."""
    policy: PolicyName = "joint"
    """How workers are chosen, see `placement/policies/`."""
    admission: bool = True
    """Refuse at once requests that are predicted to miss their TTFT target."""
    ttft_slo_s: float | None = None
    """Target of requests that bring none; None is no target."""
    tpot_slo_s: float | None = None
    """Target of requests that bring none; None is no target."""
    queue_horizon_s: float = 10.0
    """Requests without a TTFT target are queued as if they had this one."""
    max_queued: int = 1024
    """Requests that may wait for a worker; a further one is refused as overload."""
    bypass_s: float = 0.5
    """A request that waits for KV blocks lets smaller ones pass for so long. From then on a worker is held for it."""
    fair_quantum_tokens: int = 4096
    """Tokens of a tenant's turn in the queue, prompt and answer; see `queue`."""
    tenant_queue_share: float = 0.75
    """The largest share of `max_queued`, without the requests of others, that one of several tenants may have
    waiting."""
    tenant_place_share: float = 0.9
    """The largest share of the decode places that one of several tenants gets, so that a new tenant need not wait for
    its answers to end; 1 keeps none free."""
    retry_after_s: float = 1.0
    """Retry time that a refused client gets."""
    max_attempts: int = 5
    """Attempts of a request that may be lost to a fault, without progress (64 tokens of the answer) in between.
    Refusals and moves on purpose do not count."""
    max_losses: int = 3
    """Attempts of a request that may fail by the loss of a worker, without progress in between; with progress, twice as
    many."""
    max_refusals: int = 100
    """How often in a row workers without other sequences may refuse a request before it fails. Refused by others, it
    waits until they have room."""
    refusal_pause_s: float = 0.05
    """After its n-th refusal a request avoids the worker that refused for n times this long."""
    failure_pause_s: float = 0.2
    """After its n-th fault a request avoids the workers that may have caused it for n times this long."""
    max_pause_s: float = 1.0
    """Longest of those pauses."""
    no_worker_grace_s: float = 2.5
    """How long a queued request waits for a worker that could hold it at all to come up."""
    silent_after_s: float | None = 2.5
    """A worker that sent nothing for so long is suspected of hanging: its requests are requeued, and nothing is placed
    on it until it sends something. None for never."""
    stuck_after_s: float | None = 30.0
    """The same for a worker whose engine has been in one step for so long. None for never."""
    retry_share: float = 0.1
    """Retries per new request; the first one after the loss of a worker does not count."""
    retry_burst: int = 256
    """Retries that may be made at once, after a while without any."""
    pair_timeout_s: float = 2.0
    """For how long an attempt waits for its pair of workers to be formed, at most; at most half of what is left of its
    TTFT target and of its deadline, and at least a quarter of a second. Then it is placed again."""
    warm_pairs: int = 8
    """Pairs of each worker that are formed when it comes up. Any other is formed by the first request that is placed on
    it."""
    pair_setup_ms: float = 50.0
    """Policy `joint`: added cost of a pair that has to be formed first."""
    pair_idle_s: float = 60.0
    """A pair without a placement for so long is assumed to be closed, unless it is one of `warm_pairs`."""
    breaker_failures: int = 3
    """Failures in a row of a worker or a pair in one leg (prefill, transfer, decode) that open its circuit breaker; see
    `workers/circuit_breaker.py`."""
    breaker_share: float = 0.5
    """Share of failures among the latest results that opens it too."""
    breaker_pause_s: float = 0.5
    """Time before a trial with one request; doubles with each failure up to `breaker_max_pause_s`."""
    breaker_max_pause_s: float = 30.0
    """Longest of those pauses."""
    prefill_chunks: int = 2
    """A prefill slot is free while less than this many token budgets of uncomputed tokens are outstanding on the
    worker."""
    decode_reserve_tokens: int = 512
    """Output tokens whose blocks are assigned on the decode worker (fewer if `max_tokens` is less)."""
    watermark: float = 0.01
    """Share of a worker's KV blocks that placement leaves free."""
    kv_barrier_ms: float = 20.0
    """Policy `joint`: added cost of a worker with half of its KV blocks in use after joining; k / (1 - k) times that
    for a share k."""
    expected_output_tokens: int = 64
    """Output tokens of an answer, until answers were observed."""
    num_traces: int = 1000
    """Ended requests whose traces are kept."""
    outbox_frames: int = 4096
    """Frames that may wait for one worker; a worker with more is treated as lost."""
    hello_timeout_s: float = 5.0
    """How long a worker may take for its first frame of a session."""
    min_reconnect_s: float = 0.1
    """First pause after a lost session; it doubles up to `max_reconnect_s`."""
    max_reconnect_s: float = 2.0
    """Longest pause between two tries to reach a worker."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for values that cannot work."""
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"router.{name}: must be at least 1, not {getattr(self, name)}")
        for name in ("decode_reserve_tokens", "kv_barrier_ms", "bypass_s", "warm_pairs", "pair_setup_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"router.{name}: must not be negative, not {getattr(self, name)}")
        for name in _DURATIONS:
            if getattr(self, name) <= 0:
                raise ConfigError(f"router.{name}: must be positive, not {getattr(self, name)}")
        for name in ("ttft_slo_s", "tpot_slo_s", "silent_after_s", "stuck_after_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"router.{name}: must be positive, not {value}")
        if not 0 <= self.retry_share <= 1:
            raise ConfigError(f"router.retry_share: must be in [0, 1], not {self.retry_share}")
        if not 0 < self.breaker_share <= 1:
            raise ConfigError(f"router.breaker_share: must be in (0, 1], not {self.breaker_share}")
        for name in ("tenant_queue_share", "tenant_place_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"router.{name}: must be in (0, 1], not {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"router.watermark: must be in [0, 1), not {self.watermark}")


_COUNTS = (
    "max_queued",
    "fair_quantum_tokens",
    "max_attempts",
    "max_losses",
    "max_refusals",
    "retry_burst",
    "breaker_failures",
    "prefill_chunks",
    "expected_output_tokens",
    "num_traces",
    "outbox_frames",
)
_DURATIONS = (
    "queue_horizon_s",
    "retry_after_s",
    "refusal_pause_s",
    "failure_pause_s",
    "max_pause_s",
    "no_worker_grace_s",
    "pair_timeout_s",
    "pair_idle_s",
    "breaker_pause_s",
    "breaker_max_pause_s",
    "hello_timeout_s",
    "min_reconnect_s",
    "max_reconnect_s",
)
