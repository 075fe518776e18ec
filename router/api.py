"""The interface between gateway and router: submit a request, read its tokens in order, cancel it; limits of tenants;
views for operators. Plain data and one protocol, so that each side can be tested with a fake of the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import msgspec

from disagg.proto.ids import BlockHash, RequestId, WorkerId
from disagg.proto.messages import Load, Sampling, StepCoefficients, TokenLogprobs, WorkerInfo, WorkerMetrics
from disagg.proto.token_ids import PackedTokenIds, num_token_ids
from disagg.router.config import Decodes
from disagg.router.statistics import Rates, RouterStats


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Limits of one tenant, whatever key it uses. None is no limit. From the gateway's key file, see
    `gateway/auth/api_keys.py`."""

    requests_per_minute: int | None = None
    """Answers a minute: each of the `n` of each prompt is one."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens a minute. An answer is charged `max_tokens`; what it did not use is given back."""
    running: int | None = None
    """Answers that run on workers; further ones wait."""
    queued: int | None = None
    """Answers that wait for a worker."""
    weight: float = 1.0
    """Its share of tokens while others wait, relative to theirs."""
    max_priority: int | None = None
    """Requests of a higher priority get this one."""
    min_ttft_s: float = 0.0
    """Requests with a tighter target for the first token are queued as if they had this one."""
    boosted: int | None = None
    """Requests at a time that are queued by a target of their own; further ones are queued as if they had none."""
    is_sole: bool = True
    """Whether there is no other tenant. Else it gets at most a share of the queue and of the decode places, so that
    there is always room for others."""


NO_LIMITS = TenantLimits()
"""Where there are no keys."""


class CallDemand(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The demand of one call, as far as it is known before tokenizing."""

    tenant: str
    limits: TenantLimits
    num_answers: int
    """Of all its prompts together."""
    num_tokens: int
    """Lower limit of their tokens, charged to the tenant."""


class RateCharge(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one router charged to a tenant's limits for a minute. Negative where it was given back."""

    tenant: str
    limits: TenantLimits
    num_answers: int
    num_tokens: int


class RateView(NamedTuple):
    """One limit of a minute, as its tenant sees it."""

    limit: int
    remaining: int
    """That may be taken now."""
    reset_s: float
    """Until nothing is missing, where nothing is taken meanwhile."""


class Quota(NamedTuple):
    """The limits of a tenant for a minute; None for those that it has not."""

    requests: RateView | None = None
    tokens: RateView | None = None


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A validated, tokenized request. It and what is made of it are in no reference cycle, so the garbage collector
    does not track them: a router has thousands."""

    request_id: RequestId
    prompt_token_ids: PackedTokenIds
    block_hashes: tuple[BlockHash, ...]
    root_hash: BlockHash
    sampling: Sampling
    deadline: float | None = None
    """On the gateway's monotonic clock."""
    priority: int = 0
    ttft_slo_s: float | None = None
    """Target for the time from arrival to the first token; None takes the configured one."""
    tpot_slo_s: float | None = None
    """Target for the mean time between output tokens; None takes the configured one."""
    pair: tuple[WorkerId, WorkerId] | None = None
    """The prefill and the decode worker that must run it, for an operator's probe; None for placement."""
    trace_parent: str = ""
    """The W3C `traceparent` under which this request runs, of the gateway's own span; empty without one."""
    parent_span: str = ""
    """Id of the caller's span; empty where there is none."""
    tenant: str = ""
    """Its tenant; empty where there are no keys."""
    limits: TenantLimits = NO_LIMITS
    """Of the tenant."""
    prepaid_tokens: int | None = None
    """What its call was charged for it; None where its call was not charged."""
    tokenize_queue_s: float = 0.0
    """How long its prompt waited for the tokenizer."""
    resumed_token_ids: tuple[int, ...] = ()
    """Output tokens that its client has from another gateway: the answer continues after them, and `block_hashes` are
    of prompt and these. They do not end the answer."""
    model_version: str = ""
    """Of the model that made these: only workers of it continue the answer. Empty where that is not known, or there are
    none."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; the ids are packed, so this decodes nothing."""
        return num_token_ids(self.prompt_token_ids)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A pair of workers, or one alone, that a request could go to. Times are predictions; None where the policy makes
    none."""

    prefill_worker: WorkerId | None
    """None where the decode worker would compute the prompt."""
    decode_worker: WorkerId
    num_misses: int
    """Targets of the request that it would miss."""
    ttft_ms: float | None
    """From the placement on."""
    tpot_ms: float | None
    cost: float
    """The sum of the parts below where the policy predicts times, else in units of its own."""
    wait_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    delay_ms: float
    """Added time of other sequences, summed."""
    barrier_ms: float
    """The barrier term of the KV utilization."""


class Decision(Option, frozen=True, kw_only=True):
    """The option that was taken: the one of least cost."""

    policy: str
    num_options: int
    """Pairs and single workers that were compared."""


class Placement(Protocol):
    """One placement, with its options for `explain`."""

    @property
    def ttft_ms(self) -> float | None:
        """Predicted, from the placement on; None where the policy predicts no times."""
        ...

    @property
    def tpot_ms(self) -> float | None:
        """Predicted; None where the policy predicts no times."""
        ...

    @property
    def transfer_ms(self) -> float:
        """Predicted exposed time of the transfer."""
        ...

    def decision(self) -> Decision:
        """The option that was taken."""
        ...

    def options(self) -> list[Option]:
        """All options that were compared, least cost first."""
        ...


RUNNING = "running"
"""The outcome of a request that has none yet."""

MAX_MOVES = 16
"""Of an attempt, that are kept in its trace."""
Path = Literal["pd", "local", "colocated"]
"""Which workers compute an answer: a pair; a decode worker alone; a worker with both roles."""


class MoveMarks(msgspec.Struct, gc=False):
    """A move of an attempt from one worker to another while it decoded."""

    source: WorkerId
    target: WorkerId
    began: float
    ended: float | None = None
    """When it had arrived, or was given up."""
    has_arrived: bool = False


class AttemptMarks(msgspec.Struct, kw_only=True, gc=False):
    """The progress of one attempt: times on the gateway's monotonic clock, durations as its workers measured them. None
    for what did not happen, or is not known yet."""

    path: Path
    prefill_worker: WorkerId | None
    decode_worker: WorkerId
    queued: float
    """Since when the request waited for a placement."""
    placed: float
    computed: float | None = None
    """When the prompt was computed."""
    handed_over: float | None = None
    ended: float | None = None
    alloc_wait_s: float | None = None
    """From the dispatch until the decode worker had reserved room."""
    queue_s: float | None = None
    """From then until the first step with some of the prompt."""
    transfer_s: float | None = None
    """From the first chunk until all KV was in place."""
    decode_queue_s: float | None = None
    """From the hand-over until the first decode step."""
    moves: tuple[MoveMarks, ...] = ()

    def note_move(self, source: WorkerId, target: WorkerId, now: float) -> None:
        """The attempt begins to move."""
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
    """Of the latest attempt."""
    arrival: float = 0.0
    """On the gateway's monotonic clock."""
    tokenize_queue_s: float = 0.0
    """From the arrival on, for how long its prompt waited for the tokenizer."""
    stages: dict[str, float] = {}
    """Stage name -> time at which it ended, same clock, in order: tokenize, route, first_token, kv_transfer, end."""
    outcome: str = RUNNING
    """`stop`, `length`, or the code of the error that ended it."""
    detail: str = ""
    """Of that error, for operators."""
    tenant: str = ""
    trace_parent: str = ""
    parent_span: str = ""
    is_probe: bool = False
    """An operator's test of one pair: no part of what is counted."""
    is_background: bool = False
    """Of a priority below 0, such as a line of a batch: no part of which targets were met."""
    model_version: str = ""
    """Of the model that makes the answer, see `placement.Version`; empty before the first token."""
    num_prompt_tokens: int = 0
    prefix_marks: tuple[BlockHash, ...] = ()
    """Some hashes of its prompt's blocks, see `telemetry/prefix_marks.py`."""
    num_output_tokens: int = 0
    most_output_tokens: int = 0
    """That it allows."""
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    trial: str = ""
    """What it was a trial of: a prediction by which it would have been refused, or placed elsewhere, and which nothing
    had confirmed lately."""
    last_token_at: float | None = None
    max_itl_s: float = 0.0
    """Longest time between two output tokens."""
    detokenize_s: float = 0.0
    """Sum of the times that its text took."""
    guardrails: Mapping[tuple[str, str, str, str, str], int] = {}
    """What guardrails did to it, and how often: guardrail, rule, `prompt` or `answer`, action, reason. Filled by the
    gateway."""
    marks: list[AttemptMarks] = []
    """One for each attempt."""

    @property
    def decision(self) -> Decision | None:
        """The placement decision of the latest attempt."""
        return None if self.placement is None else self.placement.decision()


class Completion(msgspec.Struct, frozen=True, gc=False):
    """How an answer ended."""

    reason: Literal["stop", "length"]
    num_output_tokens: int
    cached_tokens: int
    """Prompt tokens that no worker had to compute."""


class TokenBatch(msgspec.Struct, frozen=True, gc=False):
    """Output tokens that follow each other."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = []
    """One for each token, or none where the request has none."""


class RequestHandle(Protocol):
    """One running request, read by one consumer."""

    request_id: RequestId
    completion: Completion | None
    """Set when the iteration has ended normally."""
    num_answered: int | None
    """To be set before `cancel` where the answer is complete already (a stop string): its tokens. None for a request
    that is given up."""

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
    """Since its latest report, or since it came up."""
    is_suspected: bool = False
    """It seems to hang: nothing is placed there until it is responsive again."""
    open_breakers: tuple[str, ...] = ()
    """One line for each of its circuit breakers that is not closed: leg, since when, next trial."""
    steps: StepCoefficients | None = None
    """Its step times as placement has them; None before any was measured."""

    @property
    def takes_requests(self) -> bool:
        """Whether requests may be placed there."""
        return not self.is_draining and not self.is_suspected


STAGES = ("queued", "prefill", "transfer", "decode")
"""The stages of a request in flight."""


class PlacementView(NamedTuple):
    """What placement goes by, beside the workers."""

    policy: str = ""
    decodes: Decodes | None = None
    """None where the policy has no such setting."""
    admission: bool = True
    link_latency_s: float = 0.0
    link_byte_s: float = 0.0
    """The exposed time of a transfer, fitted over all pairs: a latency, and a time for each byte."""


class BackgroundView(NamedTuple):
    """Of requests of a priority below 0, such as lines of batches: those whose prompt is not computed yet."""

    num_queued: int = 0
    num_prefill: int = 0
    """That a worker has."""
    prompt_tokens: int = 0
    """Of both."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster in the router's view."""

    workers: tuple[WorkerView, ...]
    num_queued: int
    num_running: int
    background: BackgroundView = field(default_factory=BackgroundView)
    unreachable: tuple[WorkerInfo, ...] = ()
    """Workers that belong to the cluster and have no session with this router."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Requests by what they wait for, see `STAGES`."""
    rates: Rates = field(default_factory=Rates)
    slos: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of the last minute: "ttft", "tpot" and "both" (all that it had) -> (requests that met it, requests that had
    it)."""
    stats: RouterStats = field(default_factory=RouterStats)
    """Sums over all requests; grows on."""
    exported_traces: Mapping[str, int] = field(default_factory=dict)
    """Ended requests by what became of their spans for an OpenTelemetry collector; empty where none are sent."""
    counters: Mapping[WorkerId, WorkerMetrics] = field(default_factory=dict)
    """Of every worker so far: sums over all of its incarnations; they never fall."""
    restarts: Mapping[WorkerId, int] = field(default_factory=dict)
    """Of every worker so far: processes of it that took the place of an earlier one."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Counts of what failed or was dropped, by name."""
    tenants: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By tenant: requests that wait for a worker, and that run."""
    placement: PlacementView = field(default_factory=PlacementView)
    notes: tuple[str, ...] = ()
    """What an operator should know of the configuration: a target that no worker can meet."""


class RouterViews(Protocol):
    """What operators see of a gateway's requests, and the setting that they change."""

    def view(self) -> ClusterView:
        """The cluster now."""
        ...

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        """A running or recent request."""
        ...

    def recent(self, limit: int) -> list[RequestTrace]:
        """At most so many requests that run or ended lately, the latest arrival first."""
        ...

    def set_decodes(self, decodes: Decodes) -> None:
        """Place answers so from now on; see `events.SetDecodes`."""
        ...


class Router(RouterViews, Protocol):
    """A router as the gateway uses it."""

    def admit(self, call: CallDemand) -> None:
        """Charge a call to its tenant before anything is done for it. Raises `LimitError` where all of it is refused;
        then nothing is charged. What is not submitted must be refunded."""
        ...

    def refund(self, tenant: str, num_tokens: int, num_answers: int) -> None:
        """Return what a call was charged for and does not use: tokens that no submitted request has as its
        `prepaid_tokens`, and answers that were not submitted."""
        ...

    def quota(self, tenant: str, limits: TenantLimits) -> Quota:
        """What is left to a tenant now, whose calls bring `limits`."""
        ...

    def set_limits(self, limits: Mapping[str, TenantLimits]) -> None:
        """Replace the limits of all tenants. Waiting requests that may run under them are placed at once."""
        ...

    def submit(self, request: RoutedRequest, arrival: float) -> RequestHandle:
        """Queue the request. Raises `OverloadedError`, `UnavailableError`, `DeadlineError` or `ContextLengthError` at
        once where the request cannot be served; then nothing is held."""
        ...

    def check_queue_capacity(self) -> None:
        """Raises what `submit` would raise for any request, whatever its prompt: `OverloadedError` or
        `UnavailableError`. Cheap; called before a prompt is tokenized."""
        ...
