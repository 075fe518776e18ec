"""Messages between our own processes: frozen structs in closed tagged unions, msgpack on the wire.

Four conversations, in frames of `encode` and `decoder`:

    gateway  <-> worker   Session    down: dispatch, cancel, connect; up: one `StepUpdate` per step
    router    -> worker   Watch      up: `WorkerReport`, load and KV events, coalesced
    operator  -> worker   Audit      `AuditReport`: what the worker holds, for conservation checks
    P        <-> D        Pair       the control half of the hand-over, see handover.py

Times on the wire are durations (`timeout_s`), never clock readings: clocks differ between hosts.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, overload

import msgspec

from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.token_ids import PackedTokenIds, check_packed, num_token_ids

RoleName = Literal["prefill", "decode"]
EndReason = Literal["stop", "length", "cancelled", "deadline", "refused", "preempted", "moved", "failed", "invalid"]
"""`stop` and `length` are answers; `refused` means nothing was done and another worker may be used; `preempted` that
the worker needed the sequence's memory, and it continues on another worker or later; `moved` that another worker has
the sequence with its KV and goes on (see `Migrate`); `failed` is a fault; `invalid` that the request itself is the
cause, so that it is not tried again: no token can be sampled with its settings."""

MAX_FRAME_BYTES = 16 << 20

NonEmptyHash = Annotated[BlockHash, msgspec.Meta(min_length=1)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every message: immutable, and unknown fields are refused."""


class Sampling(Message, frozen=True, kw_only=True):
    """Sampling parameters as workers need them: complete, validated by the gateway, in token ids."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    """The draw for output token i is a function of (seed, i) only."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """The client's and, unless `ignore_eos`, the model's; the gateway merged them."""
    max_tokens: int = 16
    """Output tokens of the whole request, those of earlier attempts counted."""
    min_tokens: int = 0
    """No stop id is sampled before this many output tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), before everything else that changes logits."""
    logprobs: int = -1
    """How many of the likeliest tokens come with each output token; 0: only its own probability; -1: none at all."""
    prompt_logprobs: int = -1
    """As `logprobs`, of the prompt's tokens from the second on; with the first output token, if that has `logprobs`."""
    grammar: str = ""
    """What the output must be, as `proto/grammars.py` says; empty for any text."""


class Targets(msgspec.Struct, frozen=True, array_like=True):
    """The latency targets of a request, and how far it is, when this was sent."""

    ttft_s: float | None = None
    """From the request's arrival at the gateway to its first token."""
    tpot_s: float | None = None
    """Mean time between the tokens of the whole answer."""
    age_s: float = 0.0
    """Since the request's arrival."""
    streamed_s: float | None = None
    """Since its first token; None before it."""
    output_tokens: float = 1.0
    """Expected number of tokens of the whole answer."""

    def after(self, passed_s: float) -> Targets:
        """The same, `passed_s` later."""
        streamed_s = None if self.streamed_s is None else self.streamed_s + passed_s
        return Targets(self.ttft_s, self.tpot_s, self.age_s + passed_s, streamed_s, self.output_tokens)


class SequenceSpec(Message, frozen=True, kw_only=True):
    """All that a worker needs to run, or to go on with, a request."""

    request_id: RequestId
    attempt: int
    gateway_id: GatewayId
    prompt_token_ids: PackedTokenIds
    """The client's prompt. Never empty."""
    emitted_token_ids: tuple[int, ...] = ()
    """Output tokens of earlier attempts; they are computed again as if they were prompt, and not sent again."""
    block_hashes: tuple[BlockHash, ...] = ()
    """Chained hashes of the full 16-token blocks of prompt + emitted tokens."""
    root_hash: BlockHash = BlockHash(b"")
    """The parent of block 0 (model fingerprint and tenant), for blocks that decode fills."""
    tenant_tag: bytes = b""
    """Whose the blocks are once they are cached: the same for all requests of a tenant, whatever their salts; empty
    where there are no tenants. See `block_hash.tenant_tag`."""
    sampling: Sampling
    priority: int = 0
    """Larger is more urgent."""
    timeout_s: float | None = None
    """What was left of the request's deadline when this was sent."""
    targets: Targets | None = None
    """None where the request has neither, its own or a configured one."""

    def __post_init__(self) -> None:
        check_packed("prompt_token_ids", self.prompt_token_ids)

    @property
    def key(self) -> AttemptKey:
        """The key of this attempt."""
        return AttemptKey(self.request_id, self.attempt)

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids are known: prompt and emitted ones."""
        return num_token_ids(self.prompt_token_ids) + len(self.emitted_token_ids)


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step computed and how long it took: the raw material of the router's cost model."""

    ms: float
    """Wall time of the step."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefill_attended: int = 0
    """Query-key pairs of these prompt tokens: the sum over them of the tokens that each one attends to."""
    num_decodes: int = 0
    """Tokens computed of sequences that decode: of each its last one, and those that its grammar forced before it."""
    decode_context: int = 0
    """The sum over these tokens of those that each one attends to."""


class StepCoefficients(NamedTuple):
    """Step time = base + prefill tokens, attended pairs, decodes and decode context times these, in milliseconds."""

    base_ms: float
    prefill_token_ms: float
    attended_ms: float
    decode_ms: float
    context_ms: float

    def step_ms(self, sample: StepSample) -> float:
        """Of what the sample computes."""
        prompts = sample.prefill_tokens * self.prefill_token_ms + sample.prefill_attended * self.attended_ms
        return self.base_ms + prompts + sample.num_decodes * self.decode_ms + sample.decode_context * self.context_ms

    def prompt_ms(self, start: int, num_tokens: int) -> float:
        """What prompt tokens [start, start + num_tokens) add to a step."""
        return num_tokens * (self.prefill_token_ms + (start + (num_tokens + 1) / 2) * self.attended_ms)

    def num_tokens(self, start: int, room_ms: float) -> float:
        """The most tokens of a prompt, from `start` on, that add at most `room_ms`: a whole number, or infinite."""
        if room_ms <= 0.0:
            return 0
        linear = self.prefill_token_ms + (start + 0.5) * self.attended_ms
        divisor = linear + math.sqrt(linear * linear + 2.0 * self.attended_ms * room_ms)
        fits = 2.0 * room_ms / divisor if divisor > 0.0 else math.inf
        return math.floor(fits * (1.0 + 1e-12)) if fits < 1e18 else math.inf


class StartPhase(msgspec.Struct, frozen=True, array_like=True):
    """A part of the start of a process, and how long it took."""

    name: str
    seconds: float


class WorkerInfo(Message, frozen=True, kw_only=True, gc=False):
    """What a worker registers once it listens."""

    worker_id: WorkerId
    incarnation: Incarnation
    roles: tuple[RoleName, ...]
    is_elastic: bool = False
    """With both roles: whether it also forms pairs with others of its kind, as P and as D."""
    address: str
    """host:port of its control server."""
    pid: int
    fingerprint: str
    """Model fingerprint: workers with different ones never form a pair."""
    kv_layout: KvLayout
    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Sequences that it takes at a time; never more than a step has tokens."""
    token_budget: int
    max_model_len: int
    tp: int = 1
    """Ranks that compute together; each holds a part of the KV heads."""
    calibration: tuple[StepSample, ...] = ()
    """Steps measured at start-up, on an idle worker. Empty where it does not calibrate."""
    start_id: str = ""
    """The start by the controller that it comes from; empty where no controller started it. A process that its launcher
    restarts by itself keeps it."""
    config_hash: str = ""
    """Names the configuration that its controller started it with."""
    decode_reserve_tokens: int = 0
    """Output tokens whose blocks a sequence must find when it is admitted (less if its max_tokens is less)."""
    watermark_blocks: int = 0
    """KV blocks that admission leaves free."""
    scheduling: str = "decode_first"
    """How its steps are planned; see `EngineLimits.scheduling`."""
    max_itl_ms: float | None = None
    """See `EngineLimits.max_itl_ms`."""
    start_phases: tuple[StartPhase, ...] = ()
    """From the controller's order to its registration, in order; empty where that was not measured."""
    arithmetic: str = ""
    """How it computes, such as `fma` or `avx512-bf16`: workers of one arithmetic continue each other's answers to the
    bit. Any pair can hand over; where the two differ, tokens are those that the decode worker computes from the
    prefill worker's KV."""


class KvLayout(Message, frozen=True, kw_only=True):
    """The shape of one token's KV, which both ends of a transfer must share."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    """A torch dtype name such as `bfloat16`, or `fake`."""
    bytes_per_token: int
    """All layers, K and V."""


class PeerRef(Message, frozen=True, kw_only=True):
    """The address of one incarnation of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


# ---------------------------------------------------------------- gateway <-> worker


class Dispatch(Message, frozen=True, kw_only=True, tag=True):
    """Run this attempt. With `decode_peer`, prefill here and hand over to that worker; without, do all of it here."""

    spec: SequenceSpec
    decode_peer: PeerRef | None = None
    pair_timeout_s: float | None = None
    """For how long it may wait for the pair with that worker to be formed; then it is refused, so that it can go
    elsewhere. None leaves it to the pair."""


class Connect(Message, frozen=True, kw_only=True, tag=True):
    """Form the pair with a decode worker now, so that no request has to wait for that."""

    decode_peer: PeerRef


class Cancel(Message, frozen=True, kw_only=True, tag=True):
    """Stop this attempt, in whatever phase it is. Idempotent; may arrive before the attempt itself."""

    request_id: RequestId
    attempt: int


class Migrate(Message, frozen=True, kw_only=True, tag=True):
    """Move this attempt, which decodes here, to another worker, with its KV; it keeps its key. Answered with `End`
    (`moved`) once that worker has it, or with `MigrationFailed` where it stays. One that ends before need not be
    answered."""

    request_id: RequestId
    attempt: int
    number: int
    """Counts the moves of this attempt that were tried, from 1."""
    decode_peer: PeerRef
    pair_timeout_s: float | None = None
    """As in `Dispatch`."""


class CancelMigration(Message, frozen=True, kw_only=True, tag=True):
    """The attempt shall stay, if that is still possible. Answered like `Migrate`."""

    request_id: RequestId
    attempt: int


GatewayToWorker = Dispatch | Connect | Cancel | Migrate | CancelMigration


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely an output token was, and what was likelier: natural logarithms of the probabilities that the model
    gave, before bias, penalties, temperature and filters."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    """The likeliest tokens, likeliest first, the smallest id among equals; `Sampling.logprobs` of them."""
    top_logprobs: tuple[float, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()  # with the first output token: of the prompt's, from the second on


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one attempt: `token_ids[i]` has output index `first_index + i`."""

    request_id: RequestId
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, or none where the request has none."""


class PrefillDone(Message, frozen=True, kw_only=True):
    """P computed the whole prompt (and sampled token 0, which is in `StepUpdate.tokens`): its prefill slot is free."""

    request_id: RequestId
    attempt: int
    cached_tokens: int
    """Prompt tokens that P had."""
    alloc_wait_s: float = 0.0
    """From the dispatch until D had reserved room."""
    queue_s: float = 0.0
    """From then until the first step that computed some of the prompt."""


class HandedOver(Message, frozen=True, kw_only=True):
    """D owns the sequence now (sent by D when it commits)."""

    request_id: RequestId
    attempt: int
    kv_bytes: int
    """Bytes that moved."""
    cached_tokens: int
    """Prompt tokens that D had."""
    transport: str
    transfer_s: float = 0.0
    """From the first chunk that was announced until all was in place; 0 where nothing moved."""


class End(Message, frozen=True, kw_only=True):
    """The attempt is over on this worker. The first one per attempt with stop, length, deadline or failed wins."""

    request_id: RequestId
    attempt: int
    reason: EndReason
    detail: str = ""
    cached_tokens: int = 0
    """Prompt tokens that this worker had, where it prefilled itself."""
    queue_s: float = 0.0
    """How long the sequence waited here for its first step."""
    in_transfer: bool = False
    """It is the pair with the decode worker that failed or is not there, not the computing."""


class MigrationFailed(Message, frozen=True, kw_only=True):
    """The attempt did not move and goes on where it was; nothing of it is on the other worker for long."""

    request_id: RequestId
    attempt: int
    refused: bool
    """The other worker had no room for it, or the pair was not formed: no fault."""
    detail: str


class StepUpdate(Message, frozen=True, kw_only=True, tag=True):
    """Everything that one step (or event) of a worker has for one gateway."""

    tokens: tuple[TokenOut, ...] = ()
    prefilled: tuple[PrefillDone, ...] = ()
    handed_over: tuple[HandedOver, ...] = ()
    ends: tuple[End, ...] = ()
    migrations_failed: tuple[MigrationFailed, ...] = ()


class SessionHello(Message, frozen=True, kw_only=True, tag=True):
    """The worker's first message on a session."""

    info: WorkerInfo


WorkerToGateway = StepUpdate | SessionHello


# ---------------------------------------------------------------- worker -> router


class BlocksStored(Message, frozen=True, kw_only=True, tag=True):
    """These prefix blocks can now be hit on this worker."""

    hashes: tuple[NonEmptyHash, ...]


class BlocksRemoved(Message, frozen=True, kw_only=True, tag=True):
    """These prefix blocks are gone from this worker."""

    hashes: tuple[NonEmptyHash, ...]


class BlocksSnapshot(Message, frozen=True, kw_only=True, tag=True):
    """All prefix blocks of this worker; replaces what was known."""

    hashes: tuple[NonEmptyHash, ...]


KvEvent = BlocksStored | BlocksRemoved | BlocksSnapshot


class Load(Message, frozen=True, kw_only=True):
    """What a worker is doing, in units that add up."""

    num_running: int = 0
    """Sequences in the batch."""
    num_waiting: int = 0
    """Sequences admitted and not yet started."""
    num_suspended: int = 0
    """Sequences that were preempted and whose KV is in host memory."""
    uncomputed_prompt_tokens: int = 0
    """Prompt tokens that no step has computed yet, of this worker's sequences and of attempts that were dispatched to
    it and are no sequences yet."""
    blocks_total: int = 0
    blocks_active: int = 0
    """Held by sequences."""
    blocks_cached: int = 0
    """Unreferenced, content reusable."""
    blocks_reserved: int = 0
    """Reserved for sequences and not written."""
    steps: int = 0
    """Engine steps since start."""
    blocks_apart: int = 0
    """Free, but between blocks of others: cached ones are given up before a new sequence gets these."""
    num_preempted: int = 0
    """Sequences that were preempted and wait, suspended ones included: while there are any, nothing is reserved."""
    blocks_copied: int = 0
    """Those of the cached ones that go first, because the worker that computed them has them too."""


class TransferCount(Message, frozen=True, kw_only=True):
    """What one prefill worker sent to one decode worker since it started."""

    decode_worker: WorkerId
    transport: str
    num_transfers: int = 0
    num_bytes: int = 0
    failures: dict[str, int] = {}
    """Reason -> how often."""


class WorkerMetrics(Message, frozen=True, kw_only=True):
    """Counters of one incarnation of a worker; they only grow."""

    step_seconds: tuple[int, ...] = ()
    """Steps by duration: how many fell into each interval of `STEP_SECONDS_BOUNDS`; the last one has no upper end."""
    step_seconds_sum: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    output_tokens: int = 0
    """Tokens sampled."""
    preemptions: int = 0
    swapped_out_blocks: int = 0
    """KV blocks of preempted sequences that were copied to host memory."""
    swapped_in_blocks: int = 0
    """KV blocks that were copied back."""
    transfers: tuple[TransferCount, ...] = ()


STEP_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper ends of the intervals of `WorkerMetrics.step_seconds`, in seconds."""


class WorkerReport(Message, frozen=True, kw_only=True, tag=True):
    """Load and KV events since the last report. `sequence` counts up by one; after a gap the receiver opens a new
    stream."""

    worker_id: WorkerId
    incarnation: Incarnation
    sequence: int
    load: Load
    kv_events: tuple[KvEvent, ...] = ()
    steps: tuple[StepSample, ...] = ()
    """Some of the steps since the last report; which ones does not depend on how long they took."""
    metrics: WorkerMetrics | None = None
    """Counters since the worker started; absent where none of them changed."""
    turn_s: float = 0.0
    """For how long the engine has been in its present turn (one step and what comes with it); 0 where it waits."""
    expected_s: float = 0.0
    """For how long that was predicted to last; 0 where no turn lasts long."""


class WatchRequest(Message, frozen=True, kw_only=True, tag=True):
    """Opens a report stream; the first report carries a snapshot."""


# ---------------------------------------------------------------- operator -> worker


class AuditRequest(Message, frozen=True, kw_only=True, tag=True):
    """Requests an `AuditReport`."""


class AuditReport(Message, frozen=True, kw_only=True, tag=True):
    """What a worker holds. On an idle worker every count is zero and `problems` is empty."""

    worker_id: WorkerId
    incarnation: Incarnation
    counts: dict[str, int]
    """By name: sequences, blocks_active, blocks_reserved, swap_bytes, sending, receiving, tombstones and others."""
    problems: tuple[str, ...] = ()
    """Findings of `check_integrity()`."""


# ---------------------------------------------------------------- encoding

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """One message as msgpack."""
    return _encoder.encode(message)


@overload
def decoder(kind: type[M]) -> msgspec.msgpack.Decoder[M]: ...
@overload
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def decoder(kind: Any) -> Any:
    """A strict decoder for one closed union of the above; raises `msgspec.MsgspecError` on anything else."""
    return msgspec.msgpack.Decoder(kind)
