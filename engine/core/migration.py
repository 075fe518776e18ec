"""A sequence that moves to another worker while it decodes: what it is offered with, and what it grew by meanwhile.
Pure.

    S   Export ──> Exported(spec)  ...KV is copied while it decodes on...  Hold ──> Held(tokens) ──> Gather* ──> End
                                                                            └── it failed ──> Unhold
    D   Reserve ──> Reserved ──> Scatter* ──> Extend(tokens) ──> Scatter* ──> Join

The tokens whose KV is computed are all but the last one, so nothing is computed again: the last one is what a prefill
worker would have sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from disagg.engine.blocks.kv_cache_manager import KVCacheManager
from disagg.engine.request import Sequence
from disagg.proto.messages import SequenceSpec, Targets


def exported_spec(sequence: Sequence, now: float) -> SequenceSpec | None:
    """The spec with which a sequence goes on elsewhere; None where it does not decode."""
    if not sequence.is_decoding:
        return None
    computed = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_computed_tokens]
    return msgspec.structs.replace(
        sequence.spec,
        emitted_token_ids=tuple(computed),
        block_hashes=tuple(sequence.block_hashes),
        timeout_s=None if sequence.deadline is None else max(0.0, sequence.deadline - now),
        targets=_targets(sequence, now),
    )


def _targets(sequence: Sequence, now: float) -> Targets | None:
    targets = sequence.spec.targets
    if targets is None:
        return None
    targets = targets.after(max(0.0, now - sequence.arrival))
    if targets.streamed_s is None and sequence.first_at is not None:
        targets = Targets(
            targets.ttft_s, targets.tpot_s, targets.age_s, max(0.0, now - sequence.first_at), targets.output_tokens
        )
    return targets


def extend(
    sequence: Sequence, token_ids: Seq[int], kv_cache: KVCacheManager, *, vocab_size: int, max_model_len: int
) -> str | None:
    """Append tokens that another worker sampled to a RESERVED sequence, and allocate all its blocks. Returns why that
    is impossible, or None."""
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        return "a token id is not in the vocabulary"
    num_tokens = sequence.num_tokens + len(token_ids)
    if num_tokens >= max_model_len:
        return f"{num_tokens} tokens and an answer do not fit into {max_model_len}"
    if sequence.num_output_tokens + len(token_ids) >= sequence.spec.sampling.max_tokens:
        return "the output is complete already"
    if not kv_cache.has_room(sequence, num_tokens):
        return "not enough free KV blocks"
    sequence.token_ids.extend(token_ids)
    sequence.num_given_tokens = num_tokens
    kv_cache.extend(sequence, num_tokens)
    return None
