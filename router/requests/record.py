"""One request inside the router core: its queue entry, its attempts, its tokens.

    QUEUED: `attempt` is None, the request is in the queue
    RUNNING: `attempt` is set, its live workers have an assignment for it

Owner: the router core.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, RequestId, WorkerId
from disagg.proto.messages import End, SequenceSpec, Targets
from disagg.proto.token_ids import PackedTokenIds, pack_token_ids, slice_token_ids
from disagg.router.api import AttemptMarks, Completion, RequestTrace, RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.placement.placement import FetchPlan, Version
from disagg.router.queueing.queue import Urgency
from disagg.router.queueing.tenants import Tenant
from disagg.router.requests.output_buffer import OutputBuffer
from disagg.router.states import (
    AttemptEvent,
    AttemptState,
    RequestEvent,
    RequestState,
    next_attempt_state,
    next_request_state,
)
from disagg.router.telemetry.prefix_marks import marks_in

EndOfAnswer = Literal["stop", "length"]

HashBlocks = Callable[[BlockHash, PackedTokenIds], list[BlockHash]]
"""`chain_hashes`, or its substitute if the tokens are not known."""

_NO_WORKERS: Mapping[WorkerId, float] = MappingProxyType({})


class Move(msgspec.Struct, gc=False):
    """A move of a decoding attempt to another worker; see `migrations.py`."""

    source: WorkerId
    target: WorkerId
    has_arrived: bool = False
    """Whether the target owns the sequence."""
    has_left: bool = False
    """Whether the source has sent all its tokens."""
    last_end: End | None = None
    """End of the answer by the target, if it came before the last tokens of the source."""


class Attempt(msgspec.Struct, gc=False):
    """One attempt with its workers."""

    key: AttemptKey
    prefill: WorkerId | None
    """None if `decode` computes prompt and answer."""
    decode: WorkerId
    live: list[WorkerId]
    """Workers with an open assignment: P until the hand-over, D until its end."""
    marks: AttemptMarks
    """The progress of the attempt with times, for the trace."""
    state: AttemptState = AttemptState.PREFILLING
    is_trial: bool = False
    """Whether it is the trial of a half-open circuit breaker."""
    num_trial_tokens: int = 0
    """Number of tokens of the answer that the attempt brought, counted while it is a trial."""
    num_before: int = 0
    """Number of tokens of the answer that were released before the attempt."""
    kv_tokens: int = 0
    """Number of tokens in the KV blocks that were assigned on the worker that decodes."""
    pair_timeout_s: float | None = None
    """Seconds for which the attempt may wait for its pair to be formed; None without a pair."""
    cached_tokens: int | None = None
    """Number of known tokens that the worker which computes the prompt had cached; None until it reported that."""
    fetch: FetchPlan | None = None
    """The fetch that its dispatch asked for, until that has ended."""
    move: Move | None = None
    """The move that is under way; None without one."""
    num_moves: int = 0
    """Number of moves that were begun."""
    move_after: float = 0.0
    """Time before which the attempt is not moved."""
    awaited: WorkerId | None = None
    """The target of the latest move, until its first token is released."""

    def note_cached(self, num_tokens: int) -> None:
        """Note how many tokens the worker that computes the prompt had cached. Of two reports the larger counts."""
        self.cached_tokens = max(self.cached_tokens or 0, num_tokens)

    def advance(self, event: AttemptEvent) -> None:
        """Take one step of the attempt's state table."""
        self.state = next_attempt_state(self.state, event)

    def is_before_hand_over(self, worker_id: WorkerId) -> bool:
        """Whether that worker is P and has not handed the sequence over."""
        return worker_id == self.prefill and self.state is not AttemptState.DECODING

    def is_computed_on(self, worker_id: WorkerId) -> bool:
        """Whether this worker computes the sequence now, or is the next to compute it."""
        if self.state is AttemptState.PREFILLING:
            return worker_id == self.computes_prompt
        return self.state is AttemptState.DECODING and worker_id == self.decode

    @property
    def computes_prompt(self) -> WorkerId:
        """Id of the worker that computes the prompt: P, or else D."""
        return self.prefill or self.decode


class RequestRecord(msgspec.Struct, gc=False):
    """The state of one request that has not ended."""

    request: RoutedRequest
    tenant: Tenant
    cost: int
    """Upper limit of the tokens of prompt and answer: the charge to the tenant."""
    kv_tokens: int
    """Number of tokens for which KV blocks are assigned on the worker that decodes, if none of them is shared."""
    arrival_order: int
    output: OutputBuffer
    trace: RequestTrace
    due: float
    """When the first token is due; the sort key of the queue."""
    deadline: float | None
    """Deadline on the gateway's clock. The time for which the gateway's process stood still, which that clock does not
    count, is subtracted."""
    block_hashes: tuple[BlockHash, ...]
    """Hashes of the full blocks of prompt and released tokens, as of the last time it was queued."""
    state: RequestState = RequestState.QUEUED
    attempt: Attempt | None = None
    num_attempts: int = 0
    """Number of attempts begun so far; also the number of the next one."""
    num_failures: int = 0
    """Number of failures since an attempt last made progress, see `Retries`."""
    num_losses: int = 0
    """Number of these failures that are losses of a worker which it may have caused."""
    num_suspicions: int = 0
    """Number of lost workers that it may have ended, or whose step it may have kept from ending."""
    is_isolated: bool = False
    """Whether it is to be computed without others that may end workers, see `suspects.py`."""
    num_losses_ever: int = 0
    """Number of losses since the request was submitted."""
    num_free: int = 0
    """Number of faults that were not counted as failures, see `Retries`."""
    num_refusals: int = 0
    """Number of refusals in a row; the pause after a refusal grows with it."""
    num_refusals_by_idle: int = 0
    """Number of refusals in a row by workers without other sequences, on which waiting would not help."""
    avoid_until: Mapping[WorkerId, float] = _NO_WORKERS
    cannot_meet_ttft: bool = False
    """Whether it became too late for its TTFT target in the queue; then `due` was moved back."""
    is_boosted: bool = False
    """Whether it is queued by a target of its own."""
    is_charged: bool = False
    """Whether the tenant's turn was charged for it."""
    unservable_since: float | None = None
    """Time from which on no present worker could hold it even if empty."""
    lacks_room_since: float | None = None
    """Time from which on no worker has had room for it."""
    is_overtaken: bool = False
    """Whether it waits for KV blocks while there are enough for smaller requests, which are placed before it."""
    version: Version | None = None
    """Version of the model that made the first released token; it must make the others, too."""
    arithmetic: str = ""
    """Arithmetic of the first worker that was to decode it. The next attempt of a begun answer prefers workers with the
    same."""
    cached_tokens: int | None = None
    """The fewest cached tokens of any attempt: prompt tokens that no worker had to compute."""
    vector: bytes = b""
    """Vector of a pooled request that was computed."""

    @property
    def request_id(self) -> RequestId:
        """Id of the client's request; the same for all attempts."""
        return self.request.request_id

    @property
    def running(self) -> Attempt:
        """The current attempt of a request that runs."""
        assert self.attempt is not None, f"{self.request_id} has no attempt"
        return self.attempt

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and released ones."""
        return self.trace.num_prompt_tokens + len(self.output.released)

    @property
    def num_used(self) -> int:
        """Number of tokens that it has used so far."""
        return self.num_tokens if self.num_attempts else 0

    @property
    def priority(self) -> int:
        """The priority, limited to that of its tenant."""
        limit = self.tenant.limits.max_priority
        return self.request.priority if limit is None else min(self.request.priority, limit)

    @property
    def urgency(self) -> Urgency:
        """The sort key among the requests of its tenant."""
        return Urgency(-self.priority, self.num_attempts == 0, self.due, self.arrival_order)

    @property
    def is_pooled(self) -> bool:
        """Whether it ends with a vector of its prompt."""
        return self.request.pooling is not None

    @property
    def is_probe(self) -> bool:
        """Whether it must run on one given pair; then it has only one attempt."""
        return self.request.pair is not None

    def advance(self, event: RequestEvent) -> None:
        """Take one step of the request's state table."""
        self.state = next_request_state(self.state, event)

    def is_expired(self, now: float) -> bool:
        """Whether the deadline has come."""
        return self.deadline is not None and self.deadline <= now

    def avoided(self, now: float) -> Collection[WorkerId]:
        """Ids of the workers to which it must not go now."""
        if self.avoid_until:
            self.avoid_until = {worker_id: until for worker_id, until in self.avoid_until.items() if until > now}
        return self.avoid_until

    def end_attempt(self) -> None:
        """Remove the attempt that has ended."""
        attempt = self.running
        attempt.advance(AttemptEvent.ENDED)
        if attempt.cached_tokens is not None:
            known = self.request.num_prompt_tokens if self.cached_tokens is None else self.cached_tokens
            self.cached_tokens = min(known, attempt.cached_tokens)
        self.attempt = None

    def spec(self, key: AttemptKey, gateway_id: GatewayId, output_tokens: float, now: float) -> SequenceSpec:
        """What a worker needs to run attempt `key`, after the released tokens. The answer is expected to have
        `output_tokens`."""
        request = self.request
        return SequenceSpec(
            request_id=key.request_id,
            attempt=key.attempt,
            gateway_id=gateway_id,
            prompt_token_ids=request.prompt_token_ids,
            emitted_token_ids=tuple(self.output.released),
            block_hashes=self.block_hashes,
            root_hash=request.root_hash,
            tenant_tag=self.tenant.tag,
            sampling=request.sampling,
            priority=self.priority,
            timeout_s=None if self.deadline is None else self.deadline - now,
            targets=self._targets(output_tokens, now),
            speculation=request.speculation,
            in_session=request.in_session,
            adapter=request.adapter,
            pooling=request.pooling,
        )

    def _targets(self, output_tokens: float, now: float) -> Targets | None:
        trace = self.trace
        if trace.ttft_slo_s is None and trace.tpot_slo_s is None:
            return None
        first = trace.stages.get("first_token")
        return Targets(
            ttft_s=trace.ttft_slo_s,
            tpot_s=trace.tpot_slo_s,
            age_s=now - trace.arrival,
            streamed_s=None if first is None else now - first,
            output_tokens=min(output_tokens, float(self.request.sampling.max_tokens)),
        )

    def prepare_to_continue(self, hash_blocks: HashBlocks) -> None:
        """Hash the blocks that released tokens filled, so that the next attempt can find them in a cache."""
        tokens = PackedTokenIds(self.request.prompt_token_ids + pack_token_ids(self.output.released))
        parent = self.block_hashes[-1] if self.block_hashes else self.request.root_hash
        new = hash_blocks(parent, slice_token_ids(tokens, len(self.block_hashes) * HASH_BLOCK_TOKENS))
        self.block_hashes += tuple(new)

    def completion(self, reason: EndOfAnswer) -> Completion:
        """The completion of the answer with the tokens released so far."""
        return Completion(reason, len(self.output.released), self.cached_tokens or 0, self.vector)

    def end_of_answer(self) -> EndOfAnswer | None:
        """The end of the answer, if the released tokens alone show it: an attempt may be lost after its last token.

        A stop id is sampled only where it may end the answer, so seeing one is enough."""
        released, sampling = self.output.released, self.request.sampling
        if released and released[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(released) >= sampling.max_tokens else None


def new_trace(request: RoutedRequest, arrival: float, now: float, config: RouterConfig) -> RequestTrace:
    """The trace of a request that arrived at the gateway at `arrival` and reaches the router now. A pooled request has
    no tokens, and so no targets for them."""
    ttft_slo_s = config.ttft_slo_s if request.ttft_slo_s is None else request.ttft_slo_s
    tpot_slo_s = config.tpot_slo_s if request.tpot_slo_s is None else request.tpot_slo_s
    has_targets = request.pooling is None
    return RequestTrace(
        request_id=request.request_id,
        arrival=arrival,
        tokenize_queue_s=request.tokenize_queue_s,
        stages={"tokenize": now},
        tenant=request.tenant,
        trace_parent=request.trace_parent,
        parent_span=request.parent_span,
        response_id=request.response_id,
        is_chat=request.is_chat,
        adapter="" if request.adapter is None else request.adapter.name,
        is_probe=request.pair is not None,
        is_background=request.priority < 0,
        num_prompt_tokens=request.num_prompt_tokens,
        prefix_marks=marks_in(request.block_hashes),
        model_version=request.model_version,
        most_output_tokens=request.sampling.max_tokens,
        ttft_slo_s=ttft_slo_s if has_targets else None,
        tpot_slo_s=tpot_slo_s if has_targets else None,
    )


def new_record(
    request: RoutedRequest, trace: RequestTrace, tenant: Tenant, arrival_order: int, config: RouterConfig
) -> RequestRecord:
    """The record of a request that is accepted."""
    limits, target_s, is_boosted = tenant.limits, trace.ttft_slo_s, False
    if request.ttft_slo_s is not None:
        is_boosted = limits.boosted is None or tenant.num_boosted < limits.boosted
        target_s = max(request.ttft_slo_s, limits.min_ttft_s) if is_boosted else config.ttft_slo_s
    reserve_tokens = min(request.sampling.max_tokens, config.decode_reserve_tokens)
    due = trace.arrival + (config.queue_horizon_s if target_s is None else target_s)
    return RequestRecord(
        request=request,
        tenant=tenant,
        cost=trace.num_prompt_tokens + request.sampling.max_tokens,
        kv_tokens=-(-(trace.num_prompt_tokens + reserve_tokens) // HASH_BLOCK_TOKENS) * HASH_BLOCK_TOKENS,
        arrival_order=arrival_order,
        output=OutputBuffer(
            request.sampling.max_tokens, request.sampling.logprobs >= 0, list(request.resumed_token_ids)
        ),
        trace=trace,
        deadline=request.deadline,
        block_hashes=request.block_hashes,
        due=due if request.deadline is None else min(due, request.deadline),
        is_boosted=is_boosted,
        version=Version(request.model_version) if request.model_version else None,
    )
