"""What the sampling parameters of a sequence require. Pure, without torch: scheduler and sampler both use it."""

from __future__ import annotations

from disagg.engine.draft_row import SampledRow
from disagg.engine.request import Sequence
from disagg.proto.messages import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most probable token is taken."""
    return sampling.temperature < GREEDY_BELOW


def is_filtered(sampling: Sampling, vocab_size: int) -> bool:
    """Whether some tokens cannot be drawn, be they ever so probable."""
    return 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0 or sampling.min_p > 0.0


def penalizes(sampling: Sampling) -> bool:
    """Whether tokens that the text has already become less probable."""
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def masks_stops(sequence: SampledRow) -> bool:
    """Whether the next token must not be a stop id."""
    sampling = sequence.spec.sampling
    return bool(sampling.stop_token_ids) and sequence.num_output_tokens < sampling.min_tokens


def edits_logits(sequence: SampledRow) -> bool:
    """Whether the next token is chosen from other logits than the model's."""
    sampling = sequence.spec.sampling
    return bool(sampling.logit_bias or sampling.grammar) or penalizes(sampling) or masks_stops(sequence)


def ends_with_prompt(sequence: Sequence) -> bool:
    """Whether this worker computes nothing of it behind its prompt, and its tokens in any steps."""
    return sequence.hold_after_prefill and sequence.spec.pooling is None


def takes_forced(sequence: Sequence) -> bool:
    """Whether tokens that its grammar forces may be appended behind a sampled one. Not where each needs a step of its
    own, for its log-probabilities or for what `min_tokens` masks; nor where the sequence goes on elsewhere, which
    begins with one token whose KV is missing."""
    sampling = sequence.spec.sampling
    if not sampling.grammar or sampling.logprobs >= 0 or sampling.min_tokens:
        return False
    return not (sequence.hold_after_prefill or sequence.is_leaving)


def is_only_masked(sequence: SampledRow) -> bool:
    """Whether a grammar is all that changes the model's logits."""
    sampling = sequence.spec.sampling
    return bool(sampling.grammar) and not (sampling.logit_bias or penalizes(sampling) or masks_stops(sequence))
