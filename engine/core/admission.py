"""Admission of a request spec to a worker: the sequence made of it, and why it is refused. Pure."""

from __future__ import annotations

import math

from disagg.engine.core.policy import finish_reason
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.messages import EndReason, Pooling, Sampling, SequenceSpec, Targets
from disagg.proto.token_ids import unpack_token_ids

_LONGEST_S = 1e12
"""Times beyond have no meaning, and sums of them no precision."""


def new_sequence(spec: SequenceSpec, state: SequenceState, now: float) -> Sequence:
    """The sequence of a spec that arrives now, before anything of it is computed."""
    streamed_s = None if spec.targets is None else spec.targets.streamed_s
    return Sequence(
        spec=spec,
        state=state,
        deadline=None if spec.timeout_s is None else now + spec.timeout_s,
        arrival=now,
        first_at=None if streamed_s is None else now - streamed_s,
        token_ids=[*unpack_token_ids(spec.prompt_token_ids), *spec.emitted_token_ids],
        block_hashes=list(spec.block_hashes),
    )


def refusal(sequence: Sequence, *, vocab_size: int, max_model_len: int) -> tuple[EndReason, str] | None:
    """Why a new sequence cannot be run, or need not be; None for a good one."""
    spec, token_ids = sequence.spec, sequence.token_ids
    if spec.timeout_s is not None and (math.isnan(spec.timeout_s) or spec.timeout_s < 0.0):
        return "failed", f"timeout_s is {spec.timeout_s}"
    if spec.targets is not None and not _are_times(spec.targets):
        return "failed", "targets are not finite and at least 0"
    if not spec.prompt_token_ids:
        return "failed", "the prompt is empty"
    if min(spec.emitted_token_ids, default=0) < 0 or max(token_ids) >= vocab_size:
        return "failed", "a token id is not in the vocabulary"
    if not all(0 <= token_id < vocab_size and math.isfinite(value) for token_id, value in spec.sampling.logit_bias):
        return "failed", "a logit bias is not a finite number for a token of the vocabulary"
    if not _is_computable(spec.sampling):
        return "failed", "a sampling parameter is not finite, or does not fit 32 bits"
    if len(spec.block_hashes) > len(token_ids) // HASH_BLOCK_TOKENS:
        return "failed", "there are more block hashes than full blocks"
    if spec.pooling is not None:
        return _pooled_refusal(sequence, spec.pooling, vocab_size, max_model_len)
    reason = finish_reason(sequence, max_model_len)
    if reason == "length" and _is_too_long(sequence, max_model_len):
        return "refused", f"{len(token_ids)} tokens and an answer do not fit into {max_model_len}"
    return None if reason is None else (reason, "the output is complete already")


def _pooled_refusal(
    sequence: Sequence, pooling: Pooling, vocab_size: int, max_model_len: int
) -> tuple[EndReason, str] | None:
    if sequence.num_output_tokens:
        return "failed", "a pooled request has output tokens"
    if sequence.hold_after_prefill or sequence.state is SequenceState.RESERVED:
        return "failed", "a pooled request is not handed over"
    score_ids = pooling.score_ids
    num_ids = 2 if pooling.kind == "score" else 0
    if len(score_ids) != num_ids or not all(0 <= token_id < vocab_size for token_id in score_ids):
        return "failed", f"pooling by {pooling.kind} with score_ids {score_ids}"
    if sequence.num_tokens > max_model_len:
        return "refused", f"{sequence.num_tokens} tokens do not fit into {max_model_len}"
    return None


def _are_times(targets: Targets) -> bool:
    times = (targets.ttft_s, targets.tpot_s, targets.age_s, targets.streamed_s, targets.output_tokens)
    return all(time is None or 0.0 <= time < _LONGEST_S for time in times)


def _is_computable(sampling: Sampling) -> bool:
    """Whether a batch can hold the parameters in its arrays. No gateway sends others."""
    floats = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
    )
    return all(map(math.isfinite, floats)) and sampling.top_k < 1 << 31


def _is_too_long(sequence: Sequence, max_model_len: int) -> bool:
    """Whether a worker with more room could go on. A retry that is as long as we allow has ended by that limit; one
    that is longer comes from a larger worker."""
    if sequence.num_output_tokens >= sequence.spec.sampling.max_tokens:
        return False
    return sequence.num_output_tokens == 0 or sequence.num_tokens > max_model_len


def covered_until(start: int, ranges: list[tuple[int, int]]) -> int:
    """How far [start, ...) is covered by `ranges`, which may come in any order, without a gap."""
    for first, end in sorted(ranges):
        if first > start:
            break
        start = max(start, end)
    return start
