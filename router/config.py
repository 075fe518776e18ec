"""The router's configuration, in the parts that the user's YAML has too: `placement`, a part of `recovery`, `metrics`.
`cluster/control/plan.py` makes a `RouterConfig` from them."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec

from disagg.proto.config import (
    Bytes,
    Count,
    Fraction,
    KvReserve,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    Seconds,
    Share,
    Watermark,
    check_bounds,
)

LocalPrefill = Literal["auto", "never"]
_DECODES: Final = r"spread|gather|split:[1-9][0-9]{0,3}"
Decodes = Annotated[str, msgspec.Meta(pattern=f"^({_DECODES})$")]
"""Where answers decode (policy `elastic`): `spread`, `gather`, or `split:2`, where two workers decode and take no
prompts. See `policies/elastic.py`."""
SPLIT: Final = "split"
PolicyName = Literal["auto", "joint", "elastic", "prefix", "least_loaded", "round_robin", "random"]

MAX_QUEUED: Final = 1024
"""Most requests that wait for a worker."""


class PlacementOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`placement`: how the router chooses workers."""

    local_prefill: LocalPrefill = "auto"
    """`auto`: a decode worker computes an uncached suffix itself where that is cheaper. `never`: every prompt goes
    through a prefill worker, but for an answer that has begun and outgrew all of them: a decode worker continues it
    alone, otherwise it would be lost."""
    policy: PolicyName = "auto"
    """`auto` is `elastic` in mode `elastic`, else `joint`: the pair of least cost in milliseconds. The others are for
    comparison. See `policies/`."""
    decodes: str = "spread"
    """Policy `elastic`: `spread` decodes answers on all workers, `gather` on as few as the TPOT targets allow, so that
    the others have more time for prompts; with `split:2` two workers decode and take no prompts, the others do both.
    `auto` begins with `spread`, and a twin (`disagg twin`) chooses by the latest requests."""
    admission: bool = True
    """Whether requests that are predicted to miss their TTFT target are refused at once. Requests without a target are
    never refused for that."""
    migrations: NonNegativeInt = 4
    """Most running sequences of a draining worker that move to others at a time. Of a worker that lacks KV blocks one
    moves at a time, instead of a preemption. 0 leaves them where they are. See `requests/migrations.py`."""


class FailureTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker with unbroken connections counts as unresponsive. `null` is never."""

    suspect_after_s: Seconds | None = 2.5
    """Seconds without a message of a worker after which gateways retry its requests elsewhere and place nothing on it
    until it sends one again."""
    stuck_after_s: Seconds | None = 30.0
    """Seconds of one step of a worker's engine after which gateways do the same, and the controller kills and restarts
    the worker. Six times the predicted time of the step, if that is more."""


class MetricsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics`: the contents of `/metrics` and `disagg explain`."""

    vllm_aliases: bool = True
    """Whether the numbers are also shown under the names of vLLM, for dashboards that read these."""
    num_traces: Count = 1000
    """Number of ended requests that can still be explained."""


class RecordingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.record_events`: recordings of all inputs of the router's decisions, for `disagg replay`."""

    folder: Name
    """Folder in which each gateway process makes a file, for its owner only. A relative path in the YAML is relative to
    the folder of the YAML."""
    max_bytes: Bytes = 256 << 20
    """Most bytes of all recordings in the folder together. The recording that reaches it ends there."""


class TracingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gateway.tracing`: spans of requests, sent by OTLP over HTTP once they have ended. Needs the extra `otel`."""

    endpoint: Annotated[str, msgspec.Meta(pattern=r"^https?://\S+$", max_length=2048)]
    """URL of the collector, such as `http://127.0.0.1:4318/v1/traces`. The exporter reads headers for it from the
    environment variable `OTEL_EXPORTER_OTLP_HEADERS`."""
    sample: Fraction = 0.01
    """Share of the requests that met their targets, or had none, that is sent. Requests that missed a target, failed or
    were refused are all sent, and so are those whose caller's `traceparent` says that it is recorded."""
    max_waiting: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 2048
    """Most ended requests that wait to be sent; further ones are dropped and counted."""
    timeout_s: Seconds = 5.0
    """Most seconds of one export."""


_TIMEOUTS = FailureTimeouts()
_RESERVE = KvReserve()


class RouterConfig(PlacementOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one router. Raises `ConfigError` for a value out of bounds."""

    decodes: Decodes = "spread"
    """Where answers decode at the beginning; the event `SetDecodes` changes it."""
    ttft_slo_s: Positive | None = None
    """TTFT target of requests that bring none; None is no target."""
    tpot_slo_s: Positive | None = None
    """TPOT target of requests that bring none; None is no target."""
    queue_horizon_s: Positive = 10.0
    """TTFT target in seconds by which requests that have none are queued."""
    max_queued: Count = MAX_QUEUED
    """Most requests that wait for a worker; one more is refused as overload."""
    bypass_s: NonNegative = 0.5
    """Seconds for which smaller requests are placed before one that waits for KV blocks. Then a worker is held for it:
    `WorkerHold` in `requests/waiting.py`."""
    fair_quantum_tokens: Count = 4096
    """Tokens of prompt and answer that each tenant gets in one round of the queue; see `queueing/queue.py`."""
    tenant_queue_share: Share = 0.75
    """With several tenants: the share of the part of `max_queued` left by the others that one tenant may take."""
    tenant_place_share: Share = 0.9
    """With several tenants: the largest share of the decode places that one tenant has. The rest lets requests of
    others start before its answers end; 1 keeps nothing free."""
    retry_after_s: Positive = 1.0
    """Seconds after which a refused client may retry."""
    starts_workers: bool = False
    """Whether a request without a worker makes the autoscaler start one, so that the refusal has another code."""
    max_attempts: Count = 5
    """Number of failed attempts that end a request, without progress (64 tokens of the answer) in between. Refusals and
    draining workers do not count; see `requests/retries.py`."""
    max_losses: Count = 3
    """Number of failures by the loss of a worker that end a request, without progress in between; with progress, twice
    as many."""
    max_refusals: Count = 100
    """Number of refusals in a row, by workers without other sequences, that end a request. Refusals by workers that
    have some do not count: their blocks become free."""
    refusal_pause_s: Positive = 0.05
    """Seconds, times the number of refusals so far, for which a request avoids the worker that refused it."""
    failure_pause_s: Positive = 0.2
    """Seconds, times the number of faults so far, for which a request avoids the workers on which it failed."""
    max_pause_s: Positive = 1.0
    """Longest of these pauses, in seconds."""
    no_worker_grace_s: Positive = 2.5
    """Seconds for which a queued request waits until a worker that can hold it comes (back)."""
    expected_worker_grace_s: Positive = 15.0
    """Seconds for which it waits if the controller says that such a worker is coming, and when."""
    silent_after_s: Seconds | None = _TIMEOUTS.suspect_after_s
    """`recovery.suspect_after_s` of the YAML: seconds without a message after which a worker is suspected. Its requests
    are requeued, and it gets nothing new until it sends a message again. None for never."""
    stuck_after_s: Seconds | None = _TIMEOUTS.stuck_after_s
    """`recovery.stuck_after_s` of the YAML: seconds of one step of its engine after which a worker is suspected, too.
    None for never."""
    retry_share: Fraction = 0.1
    """Retries allowed per incoming request, over all requests. The first retry after the loss of a worker does not
    count."""
    retry_burst: Count = 256
    """Most unused retries that are saved up."""
    pair_timeout_s: Positive = 2.0
    """Most seconds for which an attempt waits for its pair of workers to be formed; also at most half of the time left
    to its TTFT target and to its deadline, but at least a quarter of a second. Then it is placed elsewhere."""
    num_gateways: Count = 1
    """Number of routers that place on the same workers. With several, sequences of the others count in a worker's step
    times, as a mean over its reports, and each router settles ties differently."""
    warm_pairs: NonNegativeInt = 8
    """Most pairs of each worker that are formed as soon as the worker comes. Any other pair is formed by the first
    request that is placed on it."""
    pair_setup_ms: NonNegative = 50.0
    """Policy `joint`: the added cost of a pair that has to be formed first, which is the expected time to form it."""
    pair_idle_s: Positive = 60.0
    """Seconds without a placement after which a pair is assumed to be closed, unless it is one of `warm_pairs`."""
    breaker_failures: Count = 3
    """Number of failures in a row that open the circuit breaker of a worker or a pair for one leg (prefill, transfer,
    decode), so that it is excluded from that leg; see `workers/circuit_breaker.py`."""
    breaker_share: Share = 0.5
    """Share of failures among the latest results that opens a breaker, too."""
    breaker_pause_s: Positive = 0.5
    """Seconds from the opening of a breaker to its trial, one request; doubles with each failure up to
    `breaker_max_pause_s`."""
    breaker_max_pause_s: Positive = 30.0
    """Longest of these pauses, in seconds."""
    prefill_chunks: Count = 2
    """A prefill slot is free while less than this many token budgets of uncomputed tokens are outstanding on the
    worker."""
    decode_reserve_tokens: NonNegativeInt = _RESERVE.decode_reserve_tokens
    """Output tokens whose blocks are assigned on the decode worker (less if the request may make less)."""
    watermark: Watermark = _RESERVE.watermark
    """Share of a worker's blocks that placement leaves free."""
    kv_barrier_ms: NonNegative = 20.0
    """Policy `joint`: what a worker costs when joining it fills half of its KV blocks; k / (1 - k) times that for a
    share k."""
    expected_output_tokens: Count = 64
    """Output tokens of an answer, until the router has seen how long answers are."""
    num_traces: Count = MetricsOptions().num_traces
    """Ended requests that can still be explained."""
    outbox_frames: Count = 4096
    """Most frames that may wait to be sent to one worker; with more, the worker is treated as lost."""
    hello_timeout_s: Positive = 5.0
    """Seconds in which a worker must send its hello when a session is opened."""
    min_reconnect_s: Positive = 0.1
    """Seconds of the first pause after a lost session; it doubles up to `max_reconnect_s`."""
    max_reconnect_s: Positive = 2.0
    """Most seconds between two tries to reach a worker."""

    def __post_init__(self) -> None:
        check_bounds(self, "router")


def num_split(decodes: str | None) -> int:
    """Number of workers that decode and take no prompts, by a setting of `Decodes`; 0 if it is no split."""
    kind, _, number = (decodes or "").partition(":")
    return int(number) if kind == SPLIT else 0


def is_decodes(text: str) -> bool:
    """Whether it is a setting of `Decodes`."""
    return re.fullmatch(_DECODES, text, re.ASCII) is not None
