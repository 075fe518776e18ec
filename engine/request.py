"""A sequence inside one worker: what is known, what is computed, which blocks hold it.

WAITING ──> RUNNING ──> (ended)          colocated, or local prefill on D; a pooled request, with its prompt
WAITING ──> RUNNING ──> HELD ──> (ended) prefill worker: computed, KV kept until the hand-over is acknowledged
RESERVED ──> RUNNING ──> (ended)         decode worker: blocks arrive by KV transfer, then it joins the batch
RUNNING ──> HELD ──> (ended), RUNNING    migration: it goes on on another worker, or here again if that fails
RUNNING ──> SUSPENDED ──> RUNNING        preemption: blocks released, KV kept in host memory until there is room
RUNNING ──> WAITING                      preemption without such memory: tokens kept, computed again
LOADING ──> WAITING                      its prefix was loaded from a tier (`tiers/loading.py`), or fetched from another
                                         worker (`core/fetching.py`)
LOADING ──> (ended)                      that prefix itself, while it comes from another worker
HELD ──> (ended)                         a prefix that is sent to another worker
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from disagg.engine.text_counts import TextCounts
from disagg.proto.ids import AttemptKey, BlockHash, GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec, TokenLogprobs
from disagg.proto.token_ids import num_token_ids, pack_token_ids


class SequenceState(enum.Enum):
    """State of a sequence in this worker; see the module docstring for the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    HELD = "held"
    RESERVED = "reserved"
    LOADING = "loading"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class WindowTable:
    """The blocks that a sequence holds of a cache group with a window. Owner: the group, `blocks/window_group.py`."""

    block_table: list[int]
    """Block table; entries before `first` are 0."""
    first: int
    """Number of the first block that is held."""
    first_token: int
    """The first token whose KV is, or will be, here: the first one of a block, except where a hand-over began between
    two blocks."""
    num_published: int
    """Blocks before this one are published, have left, or are not whole."""
    num_promised: int
    """Blocks that the sequence is promised."""

    @property
    def num_held(self) -> int:
        """Number of blocks that are held."""
        return len(self.block_table) - self.first

    @property
    def held(self) -> list[int]:
        """Blocks that are held."""
        return self.block_table[self.first :]


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt of one request on this worker. Owner: the engine core; only it writes to it."""

    spec: SequenceSpec
    state: SequenceState
    hold_after_prefill: bool = False
    """Prefill role: stop after output token 0 of this attempt and keep the KV."""
    is_copy: bool = False
    """Decode role: the prompt's KV comes from another worker, which has it too."""
    is_prefix: bool = False
    """Nobody's answer: a prefix that is fetched from another worker, or by one; see `core/fetching.py`."""
    deadline: float | None = None
    """Deadline on this process's monotonic clock."""
    arrival: float = 0.0
    first_at: float | None = None
    """When the request's first token was sampled, or came from the worker that did; on this process's monotonic clock.
    Noted at the plan behind that step, for scheduling `slack` only."""
    cannot_meet_ttft: bool = False
    """Its prompt waits, or was begun, when it could not meet its TTFT target any more; see `core/slack.py`."""
    token_ids: list[int] = field(default_factory=list)
    """Prompt, emitted and generated tokens."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache."""
    num_launched_tokens: int = 0
    """Tokens behind those that steps under way compute, see `core/steps.py`."""
    num_forced: int = 0
    """Number of its last tokens that were not sampled: the grammar left no choice behind the last sampled one."""
    swapped_tokens: int = 0
    """Tokens whose KV is in host memory; 0 unless SUSPENDED."""
    swapped_windows: tuple[int, ...] = ()
    """Of each window, the first token of what is there."""
    block_table: list[int] = field(default_factory=list)
    """Block table of the first cache group, which keeps all tokens."""
    windows: list[WindowTable] = field(default_factory=list)
    """Block tables of the other groups, in their order; empty where it holds no blocks."""
    resume_at: tuple[int, ...] = ()
    """Tokens behind which it is to be resumable when it has passed them, for a model with windows."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of full 16-token blocks, from the spec and then extended as decode fills blocks."""
    loading_tokens: int = 0
    """Leading tokens whose KV is in the device cache once it is loaded; 0 unless LOADING."""
    cached_tokens: int = 0
    """Leading tokens that were found in the prefix cache at admission."""
    reserved_blocks: int = 0
    """Blocks reserved at admission and not allocated yet."""
    num_preemptions: int = 0
    is_leaving: bool = False
    """Held, or to be held after its current step, because it moves to another worker."""
    last_logprobs: TokenLogprobs | None = None
    """Log probabilities of its last token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens from the second one on, as far as they are computed. Gathered until the
    first output token."""
    pooled_sum: Any = None
    """Sum of the hidden states of its computed tokens, where their mean is wanted. Owner: the runner."""
    text_counts: TextCounts | None = None
    """Counts of its token ids, if they are penalized and a token was sampled here."""
    grammar_state: Any = None
    """The `GrammarState` of its grammar, once a token was chosen here. Owner: the runner's `TokenMasks`."""
    adapter_slot: int = -1
    """Slot of its adapter, which is loaded as long as the sequence is here; -1 for the base model."""
    draft_index: Any = None
    """What the proposer of drafts keeps of its text. Owner: the proposer."""
    num_drafted: int = 0
    """Number of drafts that were computed for it here."""
    num_accepted: int = 0
    """Number of its output tokens that were drafts."""
    queue_s: float | None = None
    """How long it waited for its first step here; None until then."""
    key: AttemptKey = field(init=False)
    num_prompt_tokens: int = field(init=False)
    """Tokens of the client's prompt, without emitted ones."""
    num_given_tokens: int = field(init=False)
    """Tokens that were known when it came: prompt and emitted ones."""

    def __post_init__(self) -> None:
        self.key = self.spec.key
        self.num_prompt_tokens = num_token_ids(self.spec.prompt_token_ids)
        self.num_given_tokens = self.spec.num_known_tokens

    def table_of(self, group: int) -> list[int]:
        """Block table of a cache group."""
        return self.windows[group - 1].block_table if group else self.block_table

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of the whole request so far, those of earlier attempts counted."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens without KV; for a decoding sequence 1, and those that were forced behind it."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def next_token(self) -> int:
        """The first token that is neither computed nor in a step under way."""
        return self.num_computed_tokens + self.num_launched_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        """Known tokens from there on."""
        return len(self.token_ids) - self.num_computed_tokens - self.num_launched_tokens

    @property
    def has_prompt_left(self) -> bool:
        """Whether more is to be planned than what a decode computes."""
        return self.num_unplanned_tokens > 1 + self.num_forced

    @property
    def gathers_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and are computed here, for its first token."""
        sampling = self.spec.sampling
        is_wanted = sampling.prompt_logprobs >= 0 and sampling.logprobs >= 0
        return is_wanted and not self.is_copy and len(self.token_ids) == self.num_prompt_tokens

    @property
    def keeps_rows(self) -> bool:
        """Whether the rows of all of its prompt's tokens are wanted behind the last layer."""
        pooling = self.spec.pooling
        return self.gathers_prompt if pooling is None else pooling.is_whole

    @property
    def is_decoding(self) -> bool:
        """Whether its next step computes its last token, or some of the forced ones up to it, for this worker's own
        batch."""
        return (
            self.state is SequenceState.RUNNING
            and not self.hold_after_prefill
            and not self.has_prompt_left
            and self.num_output_tokens > 0
        )

    @property
    def num_uncomputed_prompt_tokens(self) -> int:
        """What is left to prefill here. After a preemption that includes output; what a decode computes does not
        count."""
        if self.state is SequenceState.WAITING:
            return self.num_uncomputed_tokens
        if self.state is SequenceState.LOADING:
            return self.num_tokens - max(self.num_computed_tokens, self.loading_tokens)
        if self.state not in (SequenceState.RUNNING, SequenceState.SUSPENDED):
            return 0
        num_computed = max(self.num_computed_tokens, self.swapped_tokens)
        if self.num_tokens - num_computed > 1 + self.num_forced:
            return self.num_tokens - num_computed
        return max(0, self.num_given_tokens - num_computed)


def dummy_sequence(
    num_tokens: int, first_block: int, block_size: int, pools: Seq[int] = (), **sampling: Any
) -> Sequence:
    """A sequence of equal tokens in consecutive blocks, for steps without requests: warm-up, calibration. It is greedy
    unless `sampling`, fields of `Sampling`, sets another temperature. `pools`: the blocks of each cache group with a
    window; a sequence that is longer than one goes round in it."""
    spec = SequenceSpec(
        request_id=RequestId("dummy"),
        attempt=0,
        gateway_id=GatewayId(""),
        prompt_token_ids=pack_token_ids([0] * num_tokens),
        sampling=Sampling(**{"temperature": 0.0, "max_tokens": num_tokens, **sampling}),
    )
    table = list(range(first_block, first_block - (-num_tokens // block_size)))
    windows = [WindowTable([block % num_blocks for block in table], 0, 0, 0, 0) for num_blocks in pools]
    return Sequence(spec, SequenceState.RUNNING, token_ids=[0] * num_tokens, block_table=table, windows=windows)
