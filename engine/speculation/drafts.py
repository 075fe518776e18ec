"""Drafts in a plan: how many a sequence may have, and their entries. Pure.

    known, draft, draft ──> three entries of one token in one step ──> a token is sampled behind each

Every layer writes the KV of all entries of a step before any of them attends, so a draft's row is computed as it would
be in a step of its own behind those before it; and the token for output index i is drawn with the random number of i.
So as long as each draft is the token that was sampled before it, all rows give the tokens of steps of their own
(`Scheduler.apply`); what comes behind a draft that is not, is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disagg.engine.plan import ScheduledSequence
from disagg.engine.request import Sequence


def most_drafts(sequence: Sequence, max_model_len: int) -> int:
    """How many drafts a decoding sequence may have in a step: its last row may give the last token of the answer. None
    where it leaves for another worker, which begins with one token whose KV is missing."""
    sampling = sequence.spec.sampling
    if sequence.is_leaving or sequence.hold_after_prefill or not sequence.spec.speculation:
        return 0
    num_left = sampling.max_tokens - sequence.num_output_tokens
    return max(0, min(num_left, max_model_len - sequence.num_tokens) - 1)


def with_drafts(
    decodes: Iterable[ScheduledSequence], drafts: Mapping[Sequence, tuple[int, ...]]
) -> tuple[ScheduledSequence, ...]:
    """The entries with those of drafts behind the last one of their sequence."""
    entries: list[ScheduledSequence] = []
    for entry in decodes:
        entries.append(entry)
        if entry.samples and (token_ids := drafts.get(entry.sequence)):
            entries += [
                ScheduledSequence(entry.sequence, entry.end + number, 1, True, token_ids[: number + 1])
                for number in range(len(token_ids))
            ]
    return tuple(entries)
