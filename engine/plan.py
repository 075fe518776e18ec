"""What one step computes, as data, and the protocols of what runs it.

plan = scheduler.schedule()         pure: which tokens of which sequences
result = runner.run(plan)           the model: one sampled token per entry that samples
events = scheduler.apply(plan, result)

Some steps are queued instead of run, each before what the last ones sampled is known: decodes on a GPU, and prompts of
a worker with stages. See `core/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
from typing_extensions import override

from disagg.engine.request import Sequence
from disagg.engine.speculation.proposer import Proposer
from disagg.proto.errors import InternalError
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import ONE_RANK, Adapter, BufferSize, KvLayout, ParallelShape, StepSample, TokenLogprobs

Buffer = Any
"""Flat staging memory of bytes, made by `ModelRunner.new_staging`: a uint8 numpy array of the host, or a uint8 tensor
on a GPU, where the transport moves that."""


class ScheduledSequence(msgspec.Struct, frozen=True):
    """Tokens [start, start + num_tokens) of `sequence.token_ids` are computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether the last of these tokens is the last known one, or a draft: its logits give the next token."""
    drafts: tuple[int, ...] = ()
    """Draft tokens that stand behind `sequence.token_ids` in this step, up to the one that this entry computes; empty
    for an entry of known tokens."""

    @property
    def end(self) -> int:
        """The token after the last one of the step."""
        return self.start + self.num_tokens


class StepPlan(msgspec.Struct, frozen=True):
    """One step of the engine. The block table of every entry covers `start + num_tokens` tokens."""

    decodes: tuple[ScheduledSequence, ...] = ()
    """Entries of exactly one token, those of a sequence one after the other: what was forced (`Sequence.num_forced`);
    the last known token, which samples; drafts, each of which samples. Where not all forced tokens are computed, none
    of the entries samples."""
    prefills: tuple[ScheduledSequence, ...] = ()
    """Prompt chunks (also of one token)."""
    pools: bool = False
    """Whether some of its sequences are pooled requests, of which an entry may stand among the decodes, too."""

    @property
    def entries(self) -> tuple[ScheduledSequence, ...]:
        """Decodes, then prefills: the order of the flat token batch."""
        return self.decodes + self.prefills

    @property
    def num_tokens(self) -> int:
        """Sum over all entries, prefills and decodes."""
        return sum(entry.num_tokens for entry in self.entries)

    def measured(self, ms: float) -> StepSample:
        """What this step computed, with the time that it took."""
        tokens = attended = context = 0
        for entry in self.prefills:
            num_tokens = entry.num_tokens
            tokens += num_tokens
            attended += num_tokens * entry.start + num_tokens * (num_tokens + 1) // 2
        for entry in self.decodes:
            context += entry.start + 1
        return StepSample(ms, tokens, attended, len(self.decodes), context)


NO_TOKEN = -1
"""Value in place of a token id: nothing could be sampled from the row."""

RowFault = Literal["model", "request"]
"""Why nothing could be sampled from a row: the model's logits hold NaN, +inf or nothing finite (`model`), or they were
good and the request's bias, masks, penalties and temperature left nothing finite (`request`)."""


OUT_OF_MEMORY = 2
"""CUDA error code `cudaErrorMemoryAllocation`."""
_FATAL_TEXTS = ("Triton Error [CUDA]", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
"""Not CUBLAS_STATUS_NOT_INITIALIZED, which is mostly a lack of memory for cuBLAS' handle."""


def is_fatal(error: BaseException) -> bool:
    """Whether a device gave this error that gives it for every later call, too: a CUDA context in which a kernel failed
    cannot be used again, short of another process. Out of memory is no such error. Torch's class is found by its
    name, because a worker without a model does not load torch; Triton's launcher and cuBLAS raise plain
    RuntimeErrors."""
    if any((base.__module__, base.__name__) == ("torch", "AcceleratorError") for base in type(error).__mro__):
        return getattr(error, "error_code", None) != OUT_OF_MEMORY
    text = str(error)
    return isinstance(error, RuntimeError) and text.startswith(_FATAL_TEXTS) and "out of memory" not in text


class BadLogitsError(InternalError, RuntimeError):
    """The model gave logits that nothing can be sampled from, in every row of a step."""


class StepResult(msgspec.Struct, frozen=True):
    """What a step sampled. The rows of a step do not depend on each other: a row without a token ends its own sequence
    only."""

    token_ids: list[int]
    """Token ids, one for each entry with `samples`, in the order of `plan.entries`; `NO_TOKEN` where there is none. The
    one of a pooled request has no meaning."""
    logprobs: Mapping[int, TokenLogprobs] = msgspec.field(default_factory=dict)
    """Log probabilities by index in `token_ids`, for exactly those that have a token and whose sequences request it
    (`Sampling.logprobs` is not negative)."""
    faults: Mapping[int, RowFault] = msgspec.field(default_factory=dict)
    """Faults by index in `token_ids`, for exactly those that are `NO_TOKEN`, except rows of sequences that had ended
    before."""
    forced: Mapping[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """Tokens that must follow, by index in `token_ids`, so that no step is needed to sample them. Only of sequences
    that take them (`sampling_rules.takes_forced`)."""
    prompt_logprobs: Mapping[AttemptKey, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    """Log probabilities of each prompt token that follows a token of the computed chunk, for sequences that gather them
    (`Sequence.gathers_prompt`)."""
    vectors: Mapping[AttemptKey, bytes] = msgspec.field(default_factory=dict)
    """Vectors of the pooled requests whose prompts this step completed, in the form of `End.vector`."""


class QueuedStep(Protocol):
    """A step that was queued, and may not be computed yet."""

    @property
    def ended_at(self) -> float | None:
        """When it was computed, on this process's monotonic clock; from then on `result` does not wait. None before,
        and where that is not noticed before `result` is asked for."""
        return None

    def result(self) -> StepResult:
        """Wait for what it sampled. To be called once."""
        ...


class ComputedStep(QueuedStep):
    """A step that was computed when it was queued."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    @override
    def result(self) -> StepResult:
        return self._result


class StepQueue(Protocol):
    """Queues steps of one kind and returns before they are computed. They are computed in the order in which they were
    queued, and all later work of the runner is ordered behind them."""

    kind: Literal["decodes", "prompts"] = "decodes"
    """What it takes: steps of decodes, each of which needs the token that the step before it samples; or steps of
    prompts that end with their first token (`sampling_rules.ends_with_prompt`), which need nothing of each other's
    results."""
    max_ahead: int = 1
    """Most steps whose results are not known when another one is queued."""

    @property
    def max_decodes(self) -> int:
        """The largest step of decodes that it takes; of no meaning for prompts."""
        ...

    def enqueue(self, plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
        """Queue a step of its kind. `after` is the last one that was queued, where its result was not read yet: of
        decodes, the ids that it samples are inputs of this step.

        A decode's last token is known, or it is the one that `after` samples for the same sequence. No decode requests
        log-probabilities or for other logits than the model's (`sampling_rules.edits_logits`).
        """
        ...

    def watch(self, wake: Callable[[], None]) -> bool:
        """Have `wake` called whenever a step has got its `ended_at`, on any thread. False where that is not noticed."""
        return False


class Copying(Protocol):
    """A copy that was queued on a device, and may be under way. Raises what the device raises."""

    def is_done(self) -> bool:
        """Whether the copy is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Wait until the copy is done."""
        ...

    def checksum(self) -> int:
        """Checksum of the copied bytes, once the copy is done. For a copy into the cache only if its digest was
        requested."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter as it was read, to be put into a slot."""

    fingerprint: str
    num_bytes: int
    """Bytes of its tensors in the model's dtype, on all ranks."""
    content: Any = None
    """What the runner makes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Steps to compute before the first request, because kernels are compiled at their first use."""

    chunks: tuple[int, ...] = (8,)
    """Lengths of the prompts to compute, in tokens."""
    batches: tuple[int, ...] = (1,)
    """Numbers of sequences that are decoded together."""
    suffix_of: int = 0
    """Length of a context whose last token alone is computed, as behind a cached prefix; 0 for no such step."""
    copies: bool = False
    """Whether KV is copied out of the cache and back."""


class ModelRunner(Protocol):
    """The model with its paged KV cache. Owner: the engine thread."""

    layout: KvLayout
    num_blocks: int
    """Blocks of the first cache group."""
    window_blocks: tuple[int, ...] = ()
    """Blocks of each other one."""
    block_size: int
    max_model_len: int
    vocab_size: int
    fingerprint: str
    arithmetic: str = ""
    """The same as `WorkerInfo.arithmetic`."""
    expert_share: float = 0.0
    """The same as `WorkerInfo.expert_share`."""
    shape: ParallelShape = ONE_RANK
    """Ranks that compute together."""
    digests: bool = False
    """Whether the device computes digests of what goes through staging memory of the host, see `digest.py`."""
    warm_up: WarmUp = WarmUp()
    whole_prompts: bool = False
    """Whether a step computes prompts whole only, because their tokens attend to those behind them."""
    proposer: Proposer | None = None
    """Draft model, where one is configured."""

    @property
    def buffers(self) -> tuple[BufferSize, ...]:
        """Large buffers, see `WorkerInfo.buffers`."""
        return ()

    @property
    def expert_imbalance(self) -> tuple[float, ...]:
        """Of each layer with experts, the tokens of its busiest expert over those of an average one, as of a while
        ago."""
        return ()

    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Read and check an adapter of the configured folder. Any thread, one call at a time.

        Raises:
            AdapterError: it cannot be used, or its fingerprint is not the one that `adapter` has, if it has one.
        """
        raise InternalError("this runner takes no adapters")

    def put_adapter(self, slot: int, loaded: LoadedAdapter) -> None:
        """Write what was read into a slot, between two steps."""
        raise InternalError("this runner takes no adapters")

    @property
    def step_queue(self) -> StepQueue | None:
        """The step queue, where steps can be queued; None where `run` computes each of them."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the plan and sample."""
        ...

    def capture_steps(self) -> None:
        """Capture the steps that are captured at start, before any other."""
        return

    def new_staging(self, nbytes: int) -> Buffer:
        """A flat staging buffer of `nbytes` bytes."""
        ...

    def gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> int:
        """Copy the KV of tokens [start, end) of a cache group into `out`, for a worker of the shape `peer`; the
        checksum of the copy.

        Each rank's part of `out` holds its slices (`sharding.kv_routes`) one after the other, each in canonical order
        [layer][k|v][head][token][dim].
        """
        ...

    def start_gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying | int:
        """`gather`, perhaps without waiting for it: then what says when `out` is full, on any thread. All later work of
        the runner is ordered behind the reads of the cache. With `digests` the checksum is the device's. An int: it is
        done, and that is the checksum."""
        return self.gather(block_table, start, end, out, peer, group=group)

    def scatter(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        """Copy the KV of tokens [start, end) of a cache group from `data`, which a worker of the shape `peer` sent,
        into the blocks."""
        ...

    def start_scatter(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying | None:
        """`scatter`, perhaps behind steps that were queued and not computed: then what says when `data` was read. All
        later work of the runner is ordered behind it. With `digests`, which needs `ModelRunner.digests`, the device
        computes one of what arrives there. None: it is done."""
        self.scatter(block_table, start, end, data, peer, group=group)
        return None
