"""What the gateway asks of the router: submit a request, read its tokens in order, cancel it. Plain data and one
protocol, so that each side can be tested with a stand-in for the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from disagg.proto.ids import BlockHash, RequestId, WorkerId
from disagg.proto.messages import Load, Sampling, TokenLogprobs, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A validated, tokenized request."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
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
    """The prefill and the decode worker that must run it, for an operator's probe; None leaves it to placement."""
    trace_parent: str = ""
    """The W3C `traceparent` under which this request runs, of the gateway's own span; empty without one."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was placed where it was. Times are predictions; None where the policy makes none."""

    policy: str
    num_options: int
    """Pairs and single workers that were compared."""
    ttft_ms: float | None
    """From the placement on."""
    tpot_ms: float | None
    cost: float
    """What was least: the sum of the parts below where the policy knows times, else in units of its own."""
    wait_ms: float
    prefill_ms: float
    transfer_ms: float
    decode_ms: float
    delay_ms: float
    """What other sequences lose, summed over them."""
    barrier_ms: float
    """What the KV utilization was worth."""


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """Where a request ran and what moved; filled while it runs, kept in a ring afterwards."""

    request_id: RequestId
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    transport: str = ""
    kv_bytes: int = 0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    attempts: int = 0
    decision: Decision | None = None
    """Of the latest attempt."""
    arrival: float = 0.0
    """On the gateway's monotonic clock."""
    stages: dict[str, float] = field(default_factory=dict)
    """Stage name -> time at which it ended, same clock, in order: tokenize, route, first_token, kv_transfer, end."""


@dataclass(frozen=True, slots=True)
class Completion:
    """How an answer ended."""

    reason: Literal["stop", "length"]
    num_output_tokens: int
    cached_tokens: int
    """Prompt tokens that nobody computed."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Output tokens that follow each other."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each token, or none where the request did not ask."""


class RequestHandle(Protocol):
    """One running request, read by one consumer."""

    request_id: RequestId
    completion: Completion | None
    """Set when the iteration has ended normally."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        """New output tokens in index order, several at once where the consumer was slow. Ends after the last
        token; raises a `DisaggError` when the request failed, was refused, or ran out of time."""
        ...

    def cancel(self) -> None:
        """Give the request up, in any phase; idempotent. The iteration ends with `RequestCancelledError`. Must be
        called whenever the consumer stops reading before the end."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router sees it."""

    info: WorkerInfo
    load: Load


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as the router sees it."""

    workers: tuple[WorkerView, ...]
    num_queued: int
    num_running: int


class Router(Protocol):
    """The shell around the router core."""

    def submit(self, request: RoutedRequest, arrival: float) -> RequestHandle:
        """Queue the request. Raises `OverloadedError`, `UnavailableError`, `DeadlineError` or `ContextLengthError` at
        once where it can see that the request cannot be served; then nothing is held."""
        ...

    def view(self) -> ClusterView:
        """The cluster now."""
        ...

    def trace(self, request_id: RequestId) -> RequestTrace | None:
        """A running or recent request."""
        ...
