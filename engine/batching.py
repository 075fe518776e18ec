"""The small rules of the scheduler: when an answer ends, who goes first, how long a chunk is. Pure functions."""

from __future__ import annotations

from typing import Literal

from disagg.engine.lazy_heap import Order
from disagg.engine.request import Sequence


def finish_reason(sequence: Sequence, max_model_len: int) -> Literal["stop", "length"] | None:
    """Why the last known token ends the sequence, or None. A stop id counts from `min_tokens` output tokens on."""
    sampling, num_output_tokens = sequence.spec.sampling, sequence.num_output_tokens
    may_stop = num_output_tokens > 0 and num_output_tokens >= sampling.min_tokens
    if may_stop and sequence.token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    if num_output_tokens >= sampling.max_tokens or sequence.num_tokens >= max_model_len:
        return "length"
    return None


def queue_order(sequence: Sequence) -> Order:
    """Who goes first: larger priority, then preempted ones, then the earlier arrival."""
    return (-sequence.spec.priority, sequence.num_preemptions == 0, sequence.arrival)


def chunk_length(start: int, num_uncomputed: int, budget: int, block_size: int, *, first: bool) -> int:
    """How many of `num_uncomputed` tokens from `start` on to compute within `budget`.

    A chunk that does not finish the prompt ends at a block boundary. Where the budget does not reach one, the step's
    first chunk takes what there is, so that prefill always advances; later ones get nothing.
    """
    if num_uncomputed <= budget:
        return num_uncomputed
    aligned = (start + budget) // block_size * block_size - start
    if aligned > 0:
        return aligned
    return budget if first else 0
