"""The interface between gateway and router: submit a request, read its tokens in order, cancel it; limits of tenants;
views for operators. Plain data and one protocol, so that each side can be tested with a fake of the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from disagg.proto.ids import BlockHash, RequestId, WorkerId
from disagg.proto.messages import (
    Adapter,
    Fetched,
    Load,
    Pooling,
    Sampling,
    StepCoefficients,
    TierCounts,
    TierName,
    TokenLogprobs,
    WorkerInfo,
    WorkerMetrics,
)
from disagg.proto.token_ids import PackedTokenIds, num_token_ids
from disagg.router.config import Decodes
from disagg.router.statistics import Rates, RouterStats


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Limits of one tenant, whatever key it uses. None is no limit. From the gateway's key file, see
    `gateway/auth/shell/api_keys.py`."""

    requests_per_minute: int | None = None
    """Answers per minute. Each of the `n` answers to each prompt counts."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens per minute. An answer is charged `max_tokens`; unused tokens are refunded."""
    running: int | None = None
    """Most answers that run on workers; further ones wait."""
    queued: int | None = None
    """Most answers that wait for a worker."""
    weight: float = 1.0
    """Share of the tokens while other tenants wait, relative to their weights."""
    max_priority: int | None = None
    """Highest priority of a request; a higher one is reduced to it."""
    min_ttft_s: float = 0.0
    """Least TTFT target in seconds by which requests are queued."""
    boosted: int | None = None
    """Most requests at a time that are queued by a target of their own; further ones are queued as if they had none."""
    is_sole: bool = True
    """Whether there is no other tenant. Else the tenant gets at most a share of the queue and of the decode places, so
    that there is always room for others."""


NO_LIMITS = TenantLimits()
"""The limits if no keys are configured."""


class CallDemand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The demand of one call, as far as it is known before tokenizing."""

    tenant: str
    limits: TenantLimits
    num_answers: int
    """Number of answers to all prompts of the call together."""
    num_tokens: int
    """Lower limit of the tokens of these answers, charged to the tenant."""


class RateCharge(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one router charged to a tenant's limits per minute. Negative for a refund."""

    tenant: str
    limits: TenantLimits
    num_answers: int
    num_tokens: int


class RateView(NamedTuple):
    """One limit per minute, as its tenant sees it."""

    limit: int
    remaining: int
    """Number of answers or tokens that may be taken now."""
    reset_s: float
    """Seconds until the limit is fully available again, if nothing more is taken."""


class Quota(NamedTuple):
    """The limits per minute of a tenant; None where there is no limit."""

    requests: RateView | None = None
    tokens: RateView | None = None


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A validated, tokenized request. It and the objects made of it are in no reference cycle, so the garbage collector
    does not track them: a router has thousands."""

    request_id: RequestId
    prompt_token_ids: PackedTokenIds
    block_hashes: tuple[BlockHash, ...]
    root_hash: BlockHash
    sampling: Sampling
    deadline: float | None = None
    """Deadline on the gateway's monotonic clock."""
    priority: int = 0
    ttft_slo_s: float | None = None
    """Target for the time from arrival to the first token; None takes the configured one."""
    tpot_slo_s: float | None = None
    """Target for the mean time between output tokens; None takes the configured one."""
    pair: tuple[WorkerId, WorkerId] | None = None
    """The prefill and the decode worker that must run the request, for an operator's probe; None for placement."""
    trace_parent: str = ""
    """The W3C `traceparent` of the gateway's own span, under which the request runs; empty without one."""
    parent_span: str = ""
    """Id of the caller's span; empty where there is none."""
    tenant: str = ""
    """Name of the tenant; empty if no keys are configured."""
    limits: TenantLimits = NO_LIMITS
    """Limits of the tenant."""
    prepaid_tokens: int | None = None
    """Tokens that the call was charged for the request; None if the call was not charged."""
    tokenize_queue_s: float = 0.0
    """Seconds for which the prompt waited for the tokenizer."""
    resumed_token_ids: tuple[int, ...] = ()
    """Output tokens that the client has from another gateway. The answer continues after them, and `block_hashes` are
    those of the prompt and of these. They do not end the answer."""
    response_id: str = ""
    """Id of the response that the answer is in, as its client knows it; empty where that is `request_id`."""
    is_chat: bool = False
    """Whether the prompt is a conversation."""
    model_version: str = ""
    """Version of the model that made `resumed_token_ids`; only workers of that version continue the answer. Empty if
    unknown, or without such tokens."""
    speculation: bool = True
    """Whether drafts may be computed for the answer."""
    in_session: bool = False
    """Whether it is a turn of a conversation that its client named."""
    pooling: Pooling | None = None
    """Set for a request that ends with a vector of its prompt instead of an answer: one worker that computes prompts
    runs it."""
    adapter: Adapter | None = None
    """The adapter that it is computed with; None for the base model. `root_hash` covers its fingerprint."""
    adapter_bytes: int = 0
    """Bytes of the adapter, from which the time to load it is predicted; 0 where they are not known."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; the ids are packed, so this decodes nothing."""
        return num_token_ids(self.prompt_token_ids)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of workers, or one alone, on which a request could run. Times are predictions; None if the policy makes
    none."""

    prefill_worker: WorkerId | None
    """None if the decode worker would compute the prompt."""
    decode_worker: WorkerId
    num_misses: int
    """Number of targets of the request that it would miss."""
    ttft_ms: float | None
    """Milliseconds from the placement to the first token."""
    tpot_ms: float | None
    cost: float
    """The sum of the parts below if the policy predicts times, else in units of its own."""
    wait_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    delay_ms: float
    """Sum of the milliseconds that it adds to other sequences."""
    barrier_ms: float
    """The barrier term of the KV utilization."""
    adapter_ms: float = 0.0
    """Part of the cost: milliseconds to load the request's adapter, of both workers."""


class Decision(Option, frozen=True, kw_only=True):
    """The option that was chosen: the one of least cost."""

    policy: str
    num_options: int
    """Number of pairs and single workers that were compared."""


class Way(NamedTuple):
    """One way in which the worker that computes the prompt could get what it has not cached."""

    kind: Literal["compute", TierName, "peer"]
    source: WorkerId | None
    """The worker that a fetch is from."""
    tokens: int
    """Number of leading tokens that need not be computed then."""
    get_ms: float
    """Predicted milliseconds of the load or the fetch; infinite where it was not possible just then."""
    prefill_ms: float
    """Predicted milliseconds to compute the rest."""
    delay_ms: float
    """Sum of the milliseconds that it adds to the sequences of the source."""
    is_chosen: bool


class Placement(Protocol):
    """One placement, with its options for `explain`."""

    @property
    def ttft_ms(self) -> float | None:
        """Predicted milliseconds from the placement to the first token; None if the policy predicts no times."""
        ...

    @property
    def tpot_ms(self) -> float | None:
        """Predicted milliseconds per output token; None if the policy predicts no times."""
        ...

    @property
    def transfer_ms(self) -> float:
        """Predicted exposed time of the transfer, in milliseconds."""
        ...

    def decision(self) -> Decision:
        """The option that was chosen."""
        ...

    def options(self) -> list[Option]:
        """All options that were compared, least cost first."""
        ...

    def ways(self) -> list[Way]:
        """How the chosen worker could get the prompt's KV, computing it first; empty where no other way could pay."""
        ...


RUNNING = "running"
"""The outcome of a request that has not ended."""

MAX_MOVES = 16
"""Most moves of an attempt that are kept in its trace."""
Path = Literal["pd", "local", "colocated", "pooled"]
"""Which workers compute an answer: a pair; a decode worker alone; a worker with both roles. `pooled`: one that computes
prompts, and there is no answer."""


class MoveMarks(msgspec.Struct, gc=False):
    """A move of a decoding attempt from one worker to another."""

    source: WorkerId
    target: WorkerId
    began: float
    ended: float | None = None
    """When the move had arrived, or was given up."""
    has_arrived: bool = False


class AttemptMarks(msgspec.Struct, kw_only=True, gc=False):
    """The progress of one attempt: times on the gateway's monotonic clock, durations as its workers measured them. None
    for steps that have not happened, or are not known yet."""

    path: Path
    prefill_worker: WorkerId | None
    decode_worker: WorkerId
    queued: float
    """When the request began to wait for a placement."""
    placed: float
    computed: float | None = None
    """When the prompt was computed."""
    handed_over: float | None = None
    ended: float | None = None
    alloc_wait_s: float | None = None
    """Seconds from the dispatch until the decode worker had reserved room."""
    queue_s: float | None = None
    """Seconds from then until the first step with some of the prompt."""
    transfer_s: float | None = None
    """Seconds from the first chunk until all KV was in place."""
    decode_queue_s: float | None = None
    """Seconds from the hand-over until the first decode step."""
    fetched: Fetched | None = None
    """The end of the fetch of KV that it began with."""
    moves: tuple[MoveMarks, ...] = ()

    def note_move(self, source: WorkerId, target: WorkerId, now: float) -> None:
        """Note that the attempt begins to move."""
        self.moves = (*self.moves[-MAX_MOVES + 1 :], MoveMarks(source, target, now))


class RequestTrace(msgspec.Struct, kw_only=True, gc=False):
    """Where a request ran and what was transferred; filled while it runs, kept in a ring afterwards. A request that was
    refused has an outcome and no attempts."""

    request_id: RequestId
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    transport: str = ""
    kv_bytes: int = 0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    attempts: int = 0
    placement: Placement | None = None
    """The placement of the latest attempt."""
    arrival: float = 0.0
    """Time of arrival on the gateway's monotonic clock."""
    tokenize_queue_s: float = 0.0
    """Seconds from the arrival for which the prompt waited for the tokenizer."""
    stages: dict[str, float] = {}
    """Stage name -> time at which the stage ended, on the same clock, in order: tokenize, route, first_token,
    kv_transfer, end."""
    outcome: str = RUNNING
    """`stop`, `length`, or the code of the error that ended it."""
    detail: str = ""
    """Message of that error, for operators."""
    tenant: str = ""
    adapter: str = ""
    """Name of its adapter; empty for the model itself."""
    model: str = ""
    """Name of the model, or of the adapter. Filled by the gateway when operators look: a router does not know what its
    model is called."""
    trace_parent: str = ""
    parent_span: str = ""
    response_id: str = ""
    is_chat: bool = False
    is_probe: bool = False
    """Whether it is an operator's test of one pair, which statistics do not count."""
    is_background: bool = False
    """Whether the priority is below 0, as for a line of a batch. The statistics of targets do not count such
    requests."""
    model_version: str = ""
    """Version of the model that makes the answer, see `placement.Version`; empty before the first token."""
    num_prompt_tokens: int = 0
    prefix_marks: tuple[BlockHash, ...] = ()
    """Some hashes of the prompt's blocks, see `telemetry/prefix_marks.py`."""
    num_output_tokens: int = 0
    most_output_tokens: int = 0
    """Most output tokens that the request allows."""
    drafted_tokens: int = 0
    """Drafts that were computed, by workers on which an attempt ended or from which it moved."""
    accepted_tokens: int = 0
    """Output tokens that had been such drafts."""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    trial: str = ""
    """Why it is a trial, or empty: a prediction by which the request would have been refused or placed elsewhere, and
    which no recent measurement confirmed."""
    last_token_at: float | None = None
    max_itl_s: float = 0.0
    """Longest time between two output tokens, in seconds."""
    detokenize_s: float = 0.0
    """Total seconds of detokenizing."""
    guardrails: Mapping[tuple[str, str, str, str, str], int] = {}
    """Number of results of guardrails, by guardrail, rule, `prompt` or `answer`, action, reason. Filled by the
    gateway."""
    marks: list[AttemptMarks] = []
    """The progress of each attempt, in order."""

    @property
    def decision(self) -> Decision | None:
        """The placement decision of the latest attempt."""
        return None if self.placement is None else self.placement.decision()


class Completion(msgspec.Struct, frozen=True, gc=False):
    """The end of an answer."""

    reason: Literal["stop", "length"]
    num_output_tokens: int
    cached_tokens: int
    """Number of prompt tokens that no worker had to compute."""
    vector: bytes = b""
    """Vector of a pooled request, in the form of `End.vector`."""


class TokenBatch(msgspec.Struct, frozen=True, gc=False):
    """Consecutive output tokens of one answer."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """The logprobs of each token; empty if the request wants none."""


class RequestHandle(Protocol):
    """One running request, read by one consumer."""

    request_id: RequestId
    completion: Completion | None
    """Set when the iteration has ended normally."""
    num_answered: int | None
    """Number of tokens of an answer that is already complete (by a stop string), to be set before `cancel`. None for a
    request that is given up."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        """New output tokens in index order, several at once where the consumer was slow. Ends after the last
        token; raises a `DisaggError` when the request failed, was refused, or ran out of time."""
        ...

    def cancel(self) -> None:
        """Cancel the request, in any phase; idempotent. The iteration ends with `RequestCancelledError`. Must be
        called whenever the consumer stops reading before the end."""
        ...


QUARANTINED = "quarantined"
"""Prefix of the detail of a worker with an open circuit breaker, as `disagg status` shows it."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker in the router's view."""

    info: WorkerInfo
    load: Load
    is_draining: bool = False
    report_age_s: float = 0.0
    """Seconds since the latest report, or since the worker came up."""
    is_suspected: bool = False
    """Whether the worker seems to hang. Nothing is placed on it until it is responsive again."""
    open_breakers: tuple[str, ...] = ()
    """One line for each circuit breaker of the worker that is not closed: leg, since when, next trial."""
    steps: StepCoefficients | None = None
    """The times that placement assumes, of prompts and of one token of each sequence that decodes; None before any was
    measured. Without drafts they are those of a step."""
    tiers: tuple[TierCounts, ...] = ()
    """The tiers of KV that it has, as it reported last."""

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be placed on the worker."""
        return not self.is_draining and not self.is_suspected


STAGES = ("queued", "prefill", "transfer", "decode")
"""The stages in which a request in flight can be."""


class PlacementView(NamedTuple):
    """The settings and the link times by which requests are placed."""

    policy: str = ""
    decodes: Decodes | None = None
    """The present setting; None if the policy has none."""
    admission: bool = True
    link_latency_s: float = 0.0
    link_byte_s: float = 0.0
    """Seconds for each byte. With `link_latency_s` it gives the exposed time of a transfer, fitted over all pairs."""


class BackgroundView(NamedTuple):
    """Requests of a priority below 0, such as lines of batches, whose prompt is not computed yet."""

    num_queued: int = 0
    num_prefill: int = 0
    """Number of these requests that a worker has."""
    prompt_tokens: int = 0
    """Prompt tokens of the queued ones and of those on workers."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster in the router's view."""

    workers: tuple[WorkerView, ...]
    num_queued: int
    num_running: int
    background: BackgroundView = field(default_factory=BackgroundView)
    unreachable: tuple[WorkerInfo, ...] = ()
    """Workers of the cluster that have no session with this router."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Number of requests in each stage, see `STAGES`."""
    rates: Rates = field(default_factory=Rates)
    slos: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Targets in the last minute: "ttft", "tpot" and "both" (all targets of a request) -> (requests that met it,
    requests that had it)."""
    stats: RouterStats = field(default_factory=RouterStats)
    """Sums over all requests since the router's start."""
    exported_traces: Mapping[str, int] = field(default_factory=dict)
    """Number of ended requests by the fate of their spans for an OpenTelemetry collector; empty if none are sent."""
    counters: Mapping[WorkerId, WorkerMetrics] = field(default_factory=dict)
    """Counters of every worker so far, summed over its incarnations; they never fall."""
    restarts: Mapping[WorkerId, int] = field(default_factory=dict)
    """Number of restarts of every worker so far: processes that replaced an earlier one."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Counts of failures and dropped messages, by name."""
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For each tenant: the number of its requests that wait for a worker, and of those that run."""
    placement: PlacementView = field(default_factory=PlacementView)
    notes: tuple[str, ...] = ()
    """Notes for operators on the configuration, such as a target that no worker can meet."""


class RouterViews(Protocol):
    """The views of operators on a gateway's requests, and the setting that they may change."""

    def view(self) -> ClusterView:
        """The present state of the cluster."""
        ...

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        """The trace of a running or recent request; None without one."""
        ...

    def recent(self, limit: int) -> list[RequestTrace]:
        """At most `limit` traces of running and recent requests, the latest arrival first."""
        ...

    def set_decodes(self, decodes: Decodes) -> None:
        """Set where answers decode from now on; see `events.SetDecodes`."""
        ...

    def forget(self, tenant: str) -> dict[WorkerId, bool]:
        """Have all workers drop the KV that they keep of a tenant; of each, whether it could be told."""
        ...


class Router(RouterViews, Protocol):
    """The interface of a router for the gateway."""

    def admit(self, call: CallDemand) -> None:
        """Charge a call to its tenant before anything is done for it. Raises `LimitError` where all of it is refused;
        then nothing is charged. What is not submitted must be refunded."""
        ...

    def refund(self, tenant: str, num_tokens: int, num_answers: int) -> None:
        """Return the unused part of what a call was charged: tokens that no submitted request has as its
        `prepaid_tokens`, and answers that were not submitted."""
        ...

    def remaining_quota(self, tenant: str, limits: TenantLimits) -> Quota:
        """What is left now to a tenant whose calls bring `limits`."""
        ...

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replace the limits of all tenants. Waiting requests that may run under them are placed at once."""
        ...

    def remove_adapter(self, adapter: Adapter) -> None:
        """End the requests that wait for a worker and named this adapter, by `AdapterRemovedError`. Others continue."""
        ...

    def submit(self, request: RoutedRequest, arrival: float) -> RequestHandle:
        """Queue the request. Raises `OverloadedError`, `UnavailableError`, `DeadlineError` or `ContextLengthError` at
        once where the request cannot be served; then nothing is held."""
        ...

    def check_queue_capacity(self) -> None:
        """Raise what `submit` would raise for any request, whatever its prompt: `OverloadedError` or
        `UnavailableError`. Cheap; called before a prompt is tokenized."""
        ...
