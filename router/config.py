"""The knobs of the router. `cluster` makes this from the user's YAML."""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.proto.errors import ConfigError

LocalPrefill = Literal["auto", "never"]
PolicyName = Literal["joint", "prefix", "least_loaded", "round_robin", "random"]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One router."""

    local_prefill: LocalPrefill = "auto"
    """`auto`: a decode worker may compute an uncached suffix itself. `never`: every prompt goes through a prefill
    worker. An answer that has begun and outgrew every prefill worker is continued on a decode worker alone all the
    same: otherwise it would be lost."""
    policy: PolicyName = "joint"
    """How workers are chosen, see `policies/`."""
    admission: bool = True
    """Refuse at once what is predicted to miss its TTFT target."""
    ttft_slo_s: float | None = None
    """Target of requests that bring none; None is no target."""
    tpot_slo_s: float | None = None
    """Target of requests that bring none; None is no target."""
    queue_horizon_s: float = 10.0
    """Requests without a TTFT target are queued as if they had this one."""
    max_queued: int = 1024
    """Requests that wait for a worker; one more is refused as overload."""
    bypass_s: float = 0.5
    """A request that waits for room in the KV cache lets smaller ones pass for so long. From then on a worker is kept
    for it."""
    fair_quantum_tokens: int = 4096
    """Tokens of a tenant's turn in the queue, prompt and answer; see `queue`."""
    tenant_queue_share: float = 0.75
    """The most of `max_queued`, without those of others, that one of several tenants may have waiting."""
    tenant_place_share: float = 0.9
    """The most of the places to decode that one of several tenants has, so that one that comes need not wait for its
    answers to end; 1 keeps none free for that."""
    retry_after_s: float = 1.0
    """What a refused client is told to wait."""
    max_attempts: int = 5
    """Attempts of a request that may be lost to a fault, without progress (64 tokens of the answer) in between.
    Refusals and moves on purpose do not count."""
    max_losses: int = 3
    """Attempts of a request that may be lost with a whole worker, without progress in between; with it, twice as many.
    """
    max_refusals: int = 100
    """How often in a row workers that have nothing else may refuse a request before it fails. Where others have the
    room, it waits."""
    refusal_pause_s: float = 0.05
    """After its n-th refusal a request avoids the worker that refused for n times this long."""
    failure_pause_s: float = 0.2
    """After its n-th fault a request avoids the workers to blame for n times this long."""
    max_pause_s: float = 1.0
    """Longest of those pauses."""
    no_worker_grace_s: float = 2.5
    """How long a queued request waits for a worker that could take it at all to come (back)."""
    silent_after_s: float | None = 2.5
    """A worker that sent nothing for so long is suspected: what it had goes on elsewhere, and it gets nothing new until
    it speaks again. None for never."""
    stuck_after_s: float | None = 30.0
    """The same for one whose engine has been in one step for so long. None for never."""
    retry_share: float = 0.1
    """Attempts again that may be made for every request that comes; the first one after the loss of a worker does not
    count."""
    retry_burst: int = 256
    """How many of these may be made at once, after a while without any."""
    pair_timeout_s: float = 2.0
    """For how long an attempt waits for its pair of workers to be formed, at most; at most half of what is left of its
    TTFT target and of its deadline, and at least a quarter of a second. Then it goes elsewhere."""
    warm_pairs: int = 8
    """Pairs of each worker that are formed as soon as it comes. Any other is formed by the first request that is placed
    on it."""
    pair_setup_ms: float = 50.0
    """Policy `joint`: what a pair costs more that has to be formed first."""
    pair_idle_s: float = 60.0
    """A pair that no request was placed on for so long is taken to be closed, unless it is one of `warm_pairs`."""
    breaker_failures: int = 3
    """A worker or a pair that fails so often in a row in one leg (prefill, transfer, decode) is left out of it for a
    while; see `breaker`."""
    breaker_share: float = 0.5
    """The same for one of whose latest results so large a share failed."""
    breaker_pause_s: float = 0.5
    """After how long one request tries it again; doubles with each failure up to `breaker_max_pause_s`."""
    breaker_max_pause_s: float = 30.0
    """Longest of those pauses."""
    prefill_chunks: int = 2
    """A prefill slot is free while less than this many token budgets of uncomputed tokens are outstanding on the
    worker."""
    decode_reserve_tokens: int = 512
    """Output tokens whose blocks are assigned on the decode worker (less if the request may make less)."""
    watermark: float = 0.01
    """Share of a worker's blocks that the books leave free."""
    kv_barrier_ms: float = 20.0
    """Policy `joint`: what a worker costs when joining it fills half of its KV blocks; k / (1 - k) times that for a
    share k."""
    expected_output_tokens: int = 64
    """Output tokens of an answer, until the router has seen how long answers are."""
    num_traces: int = 1000
    """Ended requests that can still be explained."""
    outbox_frames: int = 4096
    """Frames that may wait for one worker; a worker that takes none for so long is treated as lost."""
    hello_timeout_s: float = 5.0
    """How long a worker may take to greet a new session."""
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
