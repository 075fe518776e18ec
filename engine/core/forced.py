"""Plans of tokens that a grammar forced behind a sampled one: decodes of several tokens. Pure.

    sampled, forced, forced ──> three entries of one token in one step ──> the next token, sampled behind the last one

Every layer writes the KV of all entries of a step before any of them attends, so entries of one sequence are computed
like those of several: by the same kernels, with the same result as in steps of their own, and by the same captured
steps. They take places of the batch that are free in this step, so that it has no more entries than a full batch, and
leave a token of the budget to prompts. Where places or blocks are short, the rest waits for the next step: nothing is
preempted for it, also not because the last block is gone that another sequence needs next.
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg.engine.blocks.kv_cache_manager import KVCacheManager
from disagg.engine.plan import ScheduledSequence
from disagg.engine.request import Sequence


def num_to_decode(sequence: Sequence, num_free: int, kv_cache: KVCacheManager, num_others: int) -> int:
    """How many of a decoding sequence's uncomputed tokens to compute now, where `num_free` more entries are free. For
    each of `num_others` a block stays available."""
    num_tokens = max(1, min(sequence.num_uncomputed_tokens, 1 + num_free))
    end = sequence.num_computed_tokens + num_tokens
    return num_tokens if kv_cache.has_room(sequence, end, num_left=num_others) else 1


def as_rows(decodes: Iterable[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
    """Entries of one token each."""
    decodes = tuple(decodes)
    if all(entry.num_tokens == 1 for entry in decodes):
        return decodes
    rows: list[ScheduledSequence] = []
    for entry in decodes:
        rows += [ScheduledSequence(entry.sequence, at, 1, samples=False) for at in range(entry.start, entry.end - 1)]
        rows.append(
            entry if entry.num_tokens == 1 else ScheduledSequence(entry.sequence, entry.end - 1, 1, entry.samples)
        )
    return tuple(rows)
