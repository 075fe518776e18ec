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
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, overload

import msgspec

from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.token_ids import PackedTokenIds, check_packed, num_token_ids

RoleName = Literal["prefill", "decode"]
EndReason = Literal["stop", "length", "cancelled", "deadline", "refused", "preempted", "moved", "failed", "invalid"]
"""`stop` and `length` are answers; `refused` means nothing was done and another worker may be used; `preempted` that
the worker needed the sequence's memory, and it continues on another worker or later; `moved` that another worker has
the sequence with its KV and continues it (see `Migrate`); `failed` is a fault; `invalid` that the request itself is the
cause, so that it is not tried again: no token can be sampled with its settings."""

MAX_FRAME_BYTES = 16 << 20

TierName = Literal["host", "disk"]
"""Where a worker keeps KV beside its device cache: host memory, or a folder."""

EXTENT_TOKENS = 128
"""Tokens of an extent, the unit in which tiers keep KV: large enough that a copy, or a file, costs more than its call;
small enough that little of a prompt is in none."""
HASHES_PER_EXTENT = EXTENT_TOKENS // HASH_BLOCK_TOKENS

FetchOutcome = Literal["done", "refused", "failed", "late"]
"""How a fetch of KV from another worker ended: `done` with all or some of it; `refused` by the source, which had none
of it left or no time; `failed` by a fault of the source, the pair or the data; `late` at its time limit. In each case
what arrived in order is used, and the rest is computed."""

NonEmptyHash = Annotated[BlockHash, msgspec.Meta(min_length=1)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every message: immutable, and unknown fields are refused."""


class Sampling(Message, frozen=True, kw_only=True):
    """Sampling parameters as workers need them: complete, validated by the gateway, in token ids."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most probable tokens to sample from; 0 keeps all."""
    min_p: float = 0.0
    seed: int = 0
    """The draw for output token i is a function of (seed, i) only."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the answer: the client's and, unless `ignore_eos`, the model's, merged by the gateway."""
    max_tokens: int = 16
    """Limit on the output tokens of the whole request, those of earlier attempts included."""
    min_tokens: int = 0
    """No stop id is sampled before this many output tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of (token id, number that is added to its logit), applied before everything else that changes logits."""
    logprobs: int = -1
    """Number of most probable tokens that are reported with each output token; 0: only its own probability; -1: none at
    all."""
    prompt_logprobs: int = -1
    """The same for the prompt's tokens from the second on; reported with the first output token, if that has
    `logprobs`."""
    grammar: str = ""
    """Grammar of the output, in the form that `proto/grammars.py` describes; empty for any text."""


PoolingKind = Literal["last", "mean", "cls", "score"]
"""What becomes of the hidden states of a prompt: that of the last token, the mean of all, that of the first token; or
a probability that the model gives at the last token (`Pooling.score_ids`)."""


class Pooling(Message, frozen=True, kw_only=True):
    """Settings of a request that ends with a vector instead of an answer."""

    kind: PoolingKind
    dimensions: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of leading dimensions to keep; 0 keeps all."""
    normalize: bool = True
    """Whether the vector is divided by its length."""
    score_ids: tuple[int, ...] = ()
    """Token whose probability is a score, and the token that it is weighed against."""

    @property
    def is_whole(self) -> bool:
        """Whether the hidden states of all tokens are read, so that no cached prefix serves."""
        return self.kind in ("mean", "cls")


class Targets(msgspec.Struct, frozen=True, array_like=True):
    """Latency targets of a request, and its progress when this was sent."""

    ttft_s: float | None = None
    """Target of the time from the request's arrival at the gateway to its first token, in seconds."""
    tpot_s: float | None = None
    """Target of the mean time between the tokens of the whole answer, in seconds."""
    age_s: float = 0.0
    """Time since the request's arrival, in seconds."""
    streamed_s: float | None = None
    """Time since its first token, in seconds; None before it."""
    output_tokens: float = 1.0
    """Expected number of tokens of the whole answer."""

    def after(self, passed_s: float) -> Targets:
        """The same targets `passed_s` seconds later."""
        streamed_s = None if self.streamed_s is None else self.streamed_s + passed_s
        return Targets(self.ttft_s, self.tpot_s, self.age_s + passed_s, streamed_s, self.output_tokens)


class Adapter(Message, frozen=True, kw_only=True):
    """A LoRA adapter: weights that are added to those of a served model."""

    name: str
    """The name that requests use, for messages."""
    path: str
    """Folder in PEFT's format, relative to `adapters.folder`."""
    fingerprint: str = ""
    """Names its content: a SHA-256, in hex, of the meaning of `adapter_config.json` and the bytes of the tensors. Empty
    in a `LoadAdapter` that asks for it."""


class SequenceSpec(Message, frozen=True, kw_only=True):
    """All that a worker needs to run a request, or to continue it."""

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
    """Tag of the tenant that the blocks belong to once they are cached: the same for all requests of a tenant, whatever
    their salts; empty where there are no tenants. See `block_hash.tenant_tag`."""
    sampling: Sampling
    priority: int = 0
    """Larger is more urgent."""
    timeout_s: float | None = None
    """Time that was left until the request's deadline when this was sent, in seconds."""
    targets: Targets | None = None
    """Latency targets; None where neither the request nor the configuration has any."""
    speculation: bool = True
    """Whether drafts may be computed for it, where the worker makes some. They change no token."""
    in_session: bool = False
    """Whether it is a turn of a conversation that its client named: its KV is kept in tiers from the first turn on."""
    pooling: Pooling | None = None
    """Set for a request without an answer, which ends with a vector of its prompt (`End.vector`)."""
    adapter: Adapter | None = None
    """The adapter that it is computed with; None for the base model. `root_hash` covers its fingerprint."""

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
    """Prompt tokens that the step computed."""
    prefill_attended: int = 0
    """Query-key pairs of these prompt tokens: the sum over them of the tokens that each one attends to."""
    num_decodes: int = 0
    """Tokens that were computed for decoding sequences: the last one of each, and those that its grammar forced before
    it."""
    decode_context: int = 0
    """Decode context: the sum over these tokens of the number of tokens that each one attends to."""


class StepCoefficients(NamedTuple):
    """Coefficients of the step time in milliseconds, a linear model: base, prefill tokens, attended pairs, decodes and
    decode context; and for models with experts the time to read all of them, of which a step reads a share that bends
    with its rows (`experts_read`)."""

    base_ms: float
    prefill_token_ms: float
    attended_ms: float
    decode_ms: float
    context_ms: float
    experts_ms: float = 0.0
    expert_share: float = 0.0
    """Share of its experts that a token chooses, k / E; 0 without experts."""

    def step_ms(self, sample: StepSample) -> float:
        """Predicted duration of a step with the sample's work, in milliseconds."""
        return self.ms_of(sample.prefill_tokens, sample.prefill_attended, sample.num_decodes, sample.decode_context)

    def ms_of(self, prefill_tokens: int, prefill_attended: int, num_decodes: int, decode_context: int) -> float:
        """Predicted duration of a step with this work, in milliseconds; counts as in `StepSample`."""
        ms = self.base_ms + prefill_tokens * self.prefill_token_ms + prefill_attended * self.attended_ms
        ms = ms + num_decodes * self.decode_ms + decode_context * self.context_ms
        return ms + self.experts_of(prefill_tokens + num_decodes) if self.experts_ms else ms

    def experts_of(self, num_rows: float) -> float:
        """Milliseconds to read the experts that so many rows are expected to choose."""
        return self.experts_ms * experts_read(self.expert_share, num_rows)

    def prompt_ms(self, start: int, num_tokens: int) -> float:
        """Milliseconds that prompt tokens [start, start + num_tokens) add to a step."""
        return num_tokens * (self.prefill_token_ms + (start + (num_tokens + 1) / 2) * self.attended_ms)

    def num_tokens(self, start: int, room_ms: float) -> float:
        """The largest number of prompt tokens, from `start` on, that add at most `room_ms` to a step: a whole number,
        or infinite."""
        if room_ms <= 0.0:
            return 0
        linear = self.prefill_token_ms + (start + 0.5) * self.attended_ms
        divisor = linear + math.sqrt(linear * linear + 2.0 * self.attended_ms * room_ms)
        fits = 2.0 * room_ms / divisor if divisor > 0.0 else math.inf
        return math.floor(fits * (1.0 + 1e-12)) if fits < 1e18 else math.inf


def experts_read(expert_share: float, num_rows: float) -> float:
    """The share of all experts that a step of so many rows is expected to read, where each row chooses
    `expert_share` of them, independently and alike."""
    unread: float = (1.0 - expert_share) ** num_rows
    return 1.0 - unread


class StartPhase(msgspec.Struct, frozen=True, array_like=True):
    """One phase of the start of a process, and its duration."""

    name: str
    seconds: float


class BufferSize(msgspec.Struct, frozen=True, array_like=True):
    """The size of one buffer of a worker."""

    name: str
    num_bytes: int


class ParallelShape(Message, frozen=True, kw_only=True, gc=False):
    """The ranks of a worker: `pp` stages of `tp` ranks, numbered stage by stage."""

    tp: int = 1
    """Ranks of each stage, of which each holds a part of the KV heads of its stage's layers."""
    stage_ends: tuple[int, ...] = ()
    """For each stage, the number of the layer behind its last one; empty for one stage."""

    @property
    def pp(self) -> int:
        """Number of stages."""
        return max(1, len(self.stage_ends))

    @property
    def num_ranks(self) -> int:
        """Ranks of the worker."""
        return self.tp * self.pp


ONE_RANK = ParallelShape()
"""The shape of a worker that is not divided."""


class WorkerInfo(Message, frozen=True, kw_only=True, gc=False):
    """What a worker registers once it listens."""

    worker_id: WorkerId
    incarnation: Incarnation
    roles: tuple[RoleName, ...]
    is_elastic: bool = False
    """Whether a worker with both roles also forms pairs with others of its kind, as P and as D."""
    address: str
    """host:port of its control server."""
    pid: int
    fingerprint: str
    """Model fingerprint: workers with different ones never form a pair."""
    kv_layout: KvLayout
    num_blocks: int
    block_size: int
    max_num_seqs: int
    """Largest number of sequences that it runs at once; never more than the tokens of a step."""
    token_budget: int
    max_model_len: int
    tp: int = 1
    """Tensor parallel size: the ranks of each stage. Each holds a part of the KV heads."""
    stage_ends: tuple[int, ...] = ()
    """As in `ParallelShape`: one for each of its stages; empty for one stage."""
    ep: bool = False
    """Whether each rank has whole experts in place of a part of each."""
    calibration: tuple[StepSample, ...] = ()
    """Steps measured at start-up, on an idle worker. Empty where it does not calibrate."""
    start_id: str = ""
    """Id of the start by the controller that the process belongs to; empty where no controller started it. A process
    that its launcher restarts by itself keeps it."""
    config_hash: str = ""
    """Hash of the configuration that its controller started it with."""
    decode_reserve_tokens: int = 0
    """Output tokens for which free blocks must exist when a sequence is admitted (fewer if its max_tokens is less)."""
    watermark_blocks: int = 0
    """KV blocks that admission leaves free."""
    scheduling: str = "decode_first"
    """Scheduling policy of its steps; see `EngineLimits.scheduling`."""
    max_itl_ms: float | None = None
    """Limit on the time between tokens in milliseconds, as in `EngineLimits`."""
    start_phases: tuple[StartPhase, ...] = ()
    """Phases of its start, from the controller's order to its registration; empty where they were not measured."""
    tiers: tuple[TierName, ...] = ()
    """Where it keeps KV beside its device cache."""
    fetches: bool = False
    """Whether it can get KV of prefixes from other workers, and give them its own."""
    arithmetic: str = ""
    """Kind of arithmetic, such as `fma` or `avx512-bf16`. Workers with the same arithmetic continue each other's
    answers bit for bit. Any pair can hand over; where the two differ, the tokens are those that the decode worker
    computes from the prefill worker's KV."""
    expert_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Share of its model's experts that a token chooses, by which its step times bend; 0 without experts."""
    buffers: tuple[BufferSize, ...] = ()
    """Large buffers of its ranks whose sizes are known at the start, each as on the rank where it is largest: `kv` and
    `kv_window_<tokens>`, the caches of its cache groups; `experts`, what layers of experts use in the largest step
    beside weights; `adapters`, slots of adapters; `swap`, host memory for the KV of preempted sequences."""

    @property
    def shape(self) -> ParallelShape:
        """Its ranks."""
        return ParallelShape(tp=self.tp, stage_ends=self.stage_ends)


class CacheGroup(Message, frozen=True, kw_only=True):
    """Layers whose KV is kept alike: one tensor, one pool of blocks and one block table of each sequence."""

    kind: Literal["full", "window"] = "full"
    """`full`: the KV of all tokens is kept; `window`: of the last `window` tokens."""
    layers: tuple[int, ...]
    """Numbers of the model's layers, ascending."""
    num_heads: int
    """Number of KV heads; 1 for latent attention."""
    key_dim: int
    value_dim: int
    """Width of a head's values; 0 where they are the first `value_prefix` columns of its keys."""
    value_prefix: int = 0
    dtype: str
    """A torch dtype name such as `bfloat16`, or `fake`."""
    bytes_per_token: int
    """Bytes of one token's KV in all layers of the group, with the scales of dtype `int8`."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0 for a full group."""

    def kept_from(self, num_tokens: int, block_size: int = 16) -> int:
        """The first token whose KV is kept, and handed over, once `num_tokens` tokens are computed: in whole blocks
        all that the next token attends to, and all that the last full block needs to be a resume point."""
        if not self.window:
            return 0
        return max(0, num_tokens // block_size - -(-self.window // block_size)) * block_size

    def bytes_of(self, num_tokens: int, cached: int = 0) -> int:
        """The group's part of `KvLayout.bytes_of`."""
        first = max(cached, self.kept_from(num_tokens)) if self.window else cached
        return (num_tokens - first) * self.bytes_per_token


class WindowKv(Message, frozen=True, kw_only=True):
    """Size of the KV that layers with a window keep."""

    window: Annotated[int, msgspec.Meta(ge=1)]
    """Tokens that a token attends to, itself included."""
    bytes_per_token: Annotated[int, msgspec.Meta(ge=1)]
    """Bytes of one token's KV in all of these layers."""


class KvLayout(Message, frozen=True, kw_only=True):
    """The shape of the KV of a sequence, which both ends of a transfer must share."""

    groups: tuple[CacheGroup, ...]
    """Cache groups; the first one is full. Its blocks are what the prefix index and the router know."""

    @classmethod
    def dense(cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, bytes_per_token: int) -> KvLayout:
        """The layout of a model whose layers are all alike and attend to all tokens."""
        group = CacheGroup(
            layers=tuple(range(num_layers)),
            num_heads=num_kv_heads,
            key_dim=head_dim,
            value_dim=head_dim,
            dtype=dtype,
            bytes_per_token=bytes_per_token,
        )
        return cls(groups=(group,))

    @classmethod
    def sized(cls, bytes_per_token: int, windows: Sequence[WindowKv] = ()) -> KvLayout:
        """A layout of these sizes, for which heads and layers do not matter: that of a simulation.

        Args:
            bytes_per_token: of all groups.
            windows: those of the groups with a window.

        Raises:
            ValueError: if a window has no tokens or bytes, or the windows leave nothing for the first group.
        """
        if any(each.window < 1 or each.bytes_per_token < 1 for each in windows):
            raise ValueError("a window has at least 1 token and 1 byte of each")
        first = bytes_per_token - sum(each.bytes_per_token for each in windows)
        if windows and first < 1:
            raise ValueError(f"{bytes_per_token} bytes a token are no more than those of the windows")
        shape = CacheGroup(layers=(0,), num_heads=1, key_dim=1, value_dim=1, dtype="simulated", bytes_per_token=first)
        others = [
            msgspec.structs.replace(
                shape, kind="window", layers=(number,), window=each.window, bytes_per_token=each.bytes_per_token
            )
            for number, each in enumerate(windows, start=1)
        ]
        return cls(groups=(shape, *others))

    @property
    def dtype(self) -> str:
        """Dtype of the first group, and of all others."""
        return self.groups[0].dtype

    def unlike(self, other: KvLayout) -> str:
        """Text of what differs: the dtypes, which `model.kv_cache_dtype` sets, or else both layouts."""
        if self.dtype != other.dtype:
            return f"KV in {self.dtype} and in {other.dtype} (model.kv_cache_dtype)"
        return f"{self} and {other}"

    @property
    def windows(self) -> tuple[WindowKv, ...]:
        """The sizes of the groups with a window; see `sized`."""
        return tuple(
            WindowKv(window=group.window, bytes_per_token=group.bytes_per_token)
            for group in self.groups
            if group.window
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token more takes while no window is full: of all groups. What a prefix of some length takes is
        `bytes_of`."""
        return sum(group.bytes_per_token for group in self.groups)

    def bytes_of(self, num_tokens: int, cached: int = 0) -> int:
        """Bytes of the KV that is kept of a prefix of `num_tokens` tokens: what a hand-over of it sends to a worker
        that has the first `cached` tokens."""
        groups = self.groups
        if len(groups) == 1:
            return (num_tokens - cached) * groups[0].bytes_per_token
        return sum([group.bytes_of(num_tokens, cached) for group in groups])


class PeerRef(Message, frozen=True, kw_only=True):
    """The address of one incarnation of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


# ---------------------------------------------------------------- gateway <-> worker


class FetchFrom(Message, frozen=True, kw_only=True):
    """Get the KV of a prefix from another worker before computing: unless what this worker has of it by then, in its
    device cache or its tiers, is as long. What does not come is computed."""

    peer: PeerRef
    """The source: the worker that is believed to have the KV in its device cache."""
    end_token: Annotated[int, msgspec.Meta(ge=EXTENT_TOKENS, multiple_of=EXTENT_TOKENS)]
    """The KV is that of the first `end_token` tokens of the sequence."""
    timeout_ms: Annotated[float, msgspec.Meta(gt=0.0)]
    """Milliseconds after which the rest is computed, whatever has come."""


class Dispatch(Message, frozen=True, kw_only=True, tag=True):
    """Run this attempt. With `decode_peer`, prefill here and hand over to that worker; without, run all of it here."""

    spec: SequenceSpec
    decode_peer: PeerRef | None = None
    pair_timeout_s: float | None = None
    """Seconds that the attempt may wait for the pair with that worker to be formed. After that it is refused, so that
    it can be placed elsewhere. None: as long as the pair takes."""
    fetch: FetchFrom | None = None
    """Where to get KV from that this worker lacks; None where it computes all that it has not itself."""


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
    """Number of the move among all moves of this attempt that were tried, from 1."""
    decode_peer: PeerRef
    pair_timeout_s: float | None = None
    """Seconds that the move may wait for the pair, as in `Dispatch`."""


class CancelMigration(Message, frozen=True, kw_only=True, tag=True):
    """Keep the attempt here, if that is still possible. Answered like `Migrate`."""

    request_id: RequestId
    attempt: int


class ForgetTenant(Message, frozen=True, kw_only=True, tag=True):
    """Drop the KV that is kept of a tenant and that no sequence uses, and delete its files. Not answered."""

    tenant_tag: bytes


GatewayToWorker = Dispatch | Connect | Cancel | Migrate | CancelMigration | ForgetTenant


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the probabilities that the model gave to an output token and to the most probable ones,
    before bias, penalties, temperature and filters."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    """The most probable tokens, `Sampling.logprobs` of them: most probable first, smallest id first among equals."""
    top_logprobs: tuple[float, ...] = ()
    prompt: tuple[TokenLogprobs, ...] = ()  # with the first output token: of the prompt's, from the second on


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one attempt: `token_ids[i]` has output index `first_index + i`."""

    request_id: RequestId
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities, one for each token; empty where the request does not ask for them."""


class PrefillDone(Message, frozen=True, kw_only=True):
    """P computed the whole prompt (and sampled token 0, which is in `StepUpdate.tokens`): its prefill slot is free."""

    request_id: RequestId
    attempt: int
    cached_tokens: int
    """Prompt tokens that P had cached."""
    alloc_wait_s: float = 0.0
    """Time from the dispatch until D had reserved blocks, in seconds."""
    queue_s: float = 0.0
    """Time from then until the first step that computed part of the prompt, in seconds."""


class Fetched(Message, frozen=True, kw_only=True, gc=False):
    """A fetch that a `Dispatch` asked for is over."""

    request_id: RequestId
    attempt: int
    source: WorkerId
    outcome: FetchOutcome
    tokens: int = 0
    """Leading tokens of the sequence whose KV this worker had then that it did not have before: 0 where nothing came.
    """
    kv_bytes: int = 0
    """Bytes of KV that came."""
    transfer_s: float = 0.0
    """Time from the request to the source until the last of them, in seconds."""
    detail: str = ""


class HandedOver(Message, frozen=True, kw_only=True):
    """D owns the sequence now (sent by D when it commits)."""

    request_id: RequestId
    attempt: int
    kv_bytes: int
    """Bytes of KV that were transferred."""
    cached_tokens: int
    """Prompt tokens that D had cached."""
    transport: str
    transfer_s: float = 0.0
    """Time from the first announced chunk until all KV was in place, in seconds; 0 where nothing was transferred."""


class End(Message, frozen=True, kw_only=True):
    """The attempt is over on this worker. The first one per attempt with stop, length, deadline or failed wins."""

    request_id: RequestId
    attempt: int
    reason: EndReason
    detail: str = ""
    cached_tokens: int = 0
    """Prompt tokens that this worker had cached, where it prefilled the attempt itself."""
    queue_s: float = 0.0
    """Time that the sequence waited here for its first step, in seconds."""
    drafted_tokens: int = 0
    """Drafts that were computed here for the attempt."""
    accepted_tokens: int = 0
    """Output tokens of the attempt that had been drafts."""
    in_transfer: bool = False
    """Whether the failure is that of the pair with the decode worker and not of the computation."""
    vector: bytes = b""
    """Vector of a pooled request that ended with `stop`, in fp32, little-endian; one number for a score."""


class MigrationFailed(Message, frozen=True, kw_only=True):
    """The attempt did not move and continues where it was; the other worker soon drops what it has of it."""

    request_id: RequestId
    attempt: int
    refused: bool
    """Whether the other worker had no room for it, or the pair was not formed: no fault."""
    detail: str


class StepUpdate(Message, frozen=True, kw_only=True, tag=True):
    """Everything that one step (or event) of a worker reports to one gateway."""

    tokens: tuple[TokenOut, ...] = ()
    prefilled: tuple[PrefillDone, ...] = ()
    handed_over: tuple[HandedOver, ...] = ()
    ends: tuple[End, ...] = ()
    migrations_failed: tuple[MigrationFailed, ...] = ()
    fetched: tuple[Fetched, ...] = ()


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
    """All prefix blocks and resume points of this worker, which replace the previous ones."""

    hashes: tuple[NonEmptyHash, ...]
    resume: tuple[NonEmptyHash, ...] = ()
    """The last block of each prefix that can be resumed; for a layout with windows only."""
    tiers: dict[TierName, tuple[NonEmptyHash, ...]] = {}
    """The extents in each of its tiers, by their last blocks."""


class ResumeStored(Message, frozen=True, kw_only=True, tag=True):
    """The prefixes that end with these blocks can now be resumed on this worker, whose layout has windows. Without
    windows each prefix can."""

    hashes: tuple[NonEmptyHash, ...]


class ResumeRemoved(Message, frozen=True, kw_only=True, tag=True):
    """The prefixes that end with these blocks cannot be resumed any more."""

    hashes: tuple[NonEmptyHash, ...]


class TierStored(Message, frozen=True, kw_only=True, tag=True):
    """The extents that end with these blocks can now be loaded from a tier of this worker."""

    tier: TierName
    hashes: tuple[NonEmptyHash, ...]


class TierRemoved(Message, frozen=True, kw_only=True, tag=True):
    """The extents that end with these blocks are gone from a tier."""

    tier: TierName
    hashes: tuple[NonEmptyHash, ...]


KvEvent = BlocksStored | BlocksRemoved | BlocksSnapshot | ResumeStored | ResumeRemoved | TierStored | TierRemoved


AtLeastOne = Annotated[float, msgspec.Meta(ge=1.0)]


class Load(Message, frozen=True, kw_only=True):
    """Load of a worker, in quantities that can be added, and two means over its latest steps."""

    num_running: int = 0
    """Sequences in the batch."""
    num_waiting: int = 0
    """Sequences admitted and not yet started."""
    num_suspended: int = 0
    """Sequences that were preempted and whose KV is in host memory."""
    uncomputed_prompt_tokens: int = 0
    """Prompt tokens that no step has computed yet, of this worker's sequences and of attempts that were dispatched to
    it and have no sequence yet."""
    blocks_total: int = 0
    blocks_active: int = 0
    """KV blocks that sequences hold."""
    blocks_cached: int = 0
    """KV blocks that no sequence holds and whose content can be reused."""
    blocks_reserved: int = 0
    """KV blocks that are reserved for sequences and not yet written. All blocks are those of the first cache group;
    where a larger share is promised of a window's pool, these are as many as make that share of the first group."""
    steps: int = 0
    """Engine steps since start."""
    blocks_apart: int = 0
    """Free blocks that lie between blocks of other sequences: cached blocks are evicted before a new sequence gets
    these."""
    num_preempted: int = 0
    """Sequences that were preempted and wait, suspended ones included: while there are any, nothing is reserved."""
    blocks_copied: int = 0
    """Cached blocks that are evicted first, because the worker that computed them has them too."""
    tokens_per_step: AtLeastOne = 1.0
    """Tokens that a step gives to a sequence that decodes: more than 1 with accepted drafts or forced tokens."""
    rows_per_step: AtLeastOne = 1.0
    """Rows that a step computes for such a sequence: its last token, forced ones before it, and drafts behind it."""


class TransferCount(Message, frozen=True, kw_only=True):
    """Transfers from one prefill worker to one decode worker since the start of the former."""

    decode_worker: WorkerId
    transport: str
    num_transfers: int = 0
    num_bytes: int = 0
    failures: dict[str, int] = {}
    """Number of failures by reason."""


class TierCounts(Message, frozen=True, kw_only=True):
    """What a worker keeps in one tier of KV beside its device cache, and what it did with it since its start."""

    name: TierName
    extent_ms: float = 0.0
    """Milliseconds that it expects to take to load an extent, beside what it computes; 0 while it loads none."""
    queue_ms: float = 0.0
    """Milliseconds until what it is loading is there: a load that begins now waits for that."""
    capacity_bytes: int = 0
    held_bytes: int = 0
    written_extents: int = 0
    loaded_extents: int = 0
    evicted_extents: int = 0
    failed_extents: int = 0
    """Extents that could not be written or read."""
    off_reason: str = ""
    """Why the tier is not used at present, or not written to; empty while it is."""


class WorkerMetrics(Message, frozen=True, kw_only=True):
    """Counters of one incarnation of a worker; they only grow."""

    step_seconds: tuple[int, ...] = ()
    """Number of steps by duration, one count for each interval of `STEP_SECONDS_BOUNDS`; the last interval has no upper
    end."""
    step_seconds_sum: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens that were computed."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    output_tokens: int = 0
    """Output tokens that were sampled."""
    preemptions: int = 0
    swapped_out_blocks: int = 0
    """KV blocks of preempted sequences that were copied to host memory."""
    swapped_in_blocks: int = 0
    """KV blocks that were copied back."""
    draft_steps: int = 0
    """Steps that computed drafts."""
    drafted_tokens: int = 0
    """Drafts that were computed."""
    accepted_tokens: int = 0
    """Drafts that became output tokens."""
    draft_runs: tuple[int, ...] = ()
    """Number of runs (the drafts of one sequence in one step) by how many of their drafts were accepted: 0 to
    `MAX_DRAFT`. Empty for a worker without drafts."""
    expert_imbalance: tuple[float, ...] = ()
    """Of each layer with experts, of several stages those of the first one, the tokens of its busiest expert over those
    of an average one in the last steps that were counted; no counter."""
    transfers: tuple[TransferCount, ...] = ()
    loaded_tokens: int = 0
    """Prompt tokens whose KV was loaded from a tier; they are among `cached_tokens`."""
    fetched_tokens: int = 0
    """Prompt tokens whose KV came from another worker; they are among `cached_tokens`."""
    fetches: dict[FetchOutcome, int] = {}
    """Number of fetches from other workers by outcome."""
    served_fetches: int = 0
    """Number of fetches for which it gave KV to other workers."""
    dropped_extents: int = 0
    """Extents that were to be written to a tier and were not: their blocks were needed first, or there was no place."""
    tiers: tuple[TierCounts, ...] = ()
    """The tiers that it has."""


MAX_DRAFT = 15
"""The most drafts of a sequence in one step."""

STEP_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper ends of the intervals of `WorkerMetrics.step_seconds`, in seconds."""


class AdapterState(Message, frozen=True, kw_only=True):
    """An adapter that a worker has loaded."""

    fingerprint: str
    bytes: int
    """Bytes of its tensors in the model's dtype, on all ranks together."""
    load_ms: float
    """Milliseconds from the order to load it until it could be used."""
    uses: int
    """Sequences here that it is kept for; 0 where it may be replaced by another one."""


class WorkerReport(Message, frozen=True, kw_only=True, tag=True):
    """Load and KV events since the last report. `sequence` counts up by one; after a gap the receiver opens a new
    stream."""

    worker_id: WorkerId
    incarnation: Incarnation
    sequence: int
    load: Load
    kv_events: tuple[KvEvent, ...] = ()
    steps: tuple[StepSample, ...] = ()
    """A sample of the steps since the last report; the choice does not depend on their duration."""
    metrics: WorkerMetrics | None = None
    """Counters since the worker started; absent where none of them changed."""
    turn_s: float = 0.0
    """Time for which the engine has been in its present turn (one step and what comes with it), or has waited for a
    copy of KV, in seconds; 0 where it waits for nothing of its own."""
    expected_s: float = 0.0
    """Predicted duration of that turn in seconds; 0 where no turn lasts long."""
    adapters: tuple[AdapterState, ...] = ()
    """All adapters that it has loaded."""


class WatchRequest(Message, frozen=True, kw_only=True, tag=True):
    """Opens a report stream; the first report carries a snapshot."""


# ---------------------------------------------------------------- operator -> worker


class AuditRequest(Message, frozen=True, kw_only=True, tag=True):
    """Ask for an `AuditReport`, which is the answer."""


class AuditReport(Message, frozen=True, kw_only=True, tag=True):
    """State that a worker holds. On an idle worker every count is zero and `problems` is empty."""

    worker_id: WorkerId
    incarnation: Incarnation
    counts: dict[str, int]
    """Counts by name: sequences, blocks_active, blocks_reserved, swap_bytes, sending, receiving, tombstones and others.
    """
    problems: tuple[str, ...] = ()
    """Inconsistencies that the audit of the engine found, as text."""


class LoadAdapter(Message, frozen=True, kw_only=True, tag=True):
    """Check an adapter and load it; the answer is `AdapterLoaded`. What is wrong with it is the detail of a gRPC error:
    INVALID_ARGUMENT for its content, NOT_FOUND where the folder is not on the worker's host, FAILED_PRECONDITION where
    the worker takes no adapters or the content has another fingerprint."""

    adapter: Adapter


class AdapterLoaded(Message, frozen=True, kw_only=True, tag=True):
    """The adapter is good. It is loaded unless all slots are in use; a sequence that needs it loads it then."""

    fingerprint: str
    bytes: int
    """As in `AdapterState`."""
    load_ms: float
    """Milliseconds that reading and checking it took, and loading where it was loaded; 0 where it was loaded before."""


class UnloadAdapter(Message, frozen=True, kw_only=True, tag=True):
    """Take an adapter out of its slot as soon as no sequence uses it. The answer is `AdapterUnloaded`. A sequence that
    comes with it later loads it again: who may use it is decided by the gateways."""

    fingerprint: str


class AdapterUnloaded(Message, frozen=True, kw_only=True, tag=True):
    """Whether it was loaded, and how many sequences still use it."""

    was_loaded: bool
    uses: int


# ---------------------------------------------------------------- encoding

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message as msgpack."""
    return _encoder.encode(message)


@overload
def decoder(kind: type[M]) -> msgspec.msgpack.Decoder[M]: ...
@overload
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]: ...
def decoder(kind: Any) -> Any:
    """A strict decoder for one closed union of the above; raises `msgspec.MsgspecError` on anything else."""
    return msgspec.msgpack.Decoder(kind)
