"""Log-probabilities of a prompt's own tokens, gathered while its chunks are computed and given with the first token.
Pure.

The logits of every position of a chunk are in memory at once, so a step computes at most `MAX_ROWS` such positions. A
cached prefix is computed again, as nothing keeps its logits; after a preemption only what is not gathered yet.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from disagg.engine.plan import ScheduledSequence, StepResult
from disagg.engine.request import Sequence
from disagg.proto.messages import TokenLogprobs

MAX_ROWS = 128


def chunk_budget(sequence: Sequence, budget: int, planned: Seq[ScheduledSequence]) -> int:
    """Tokens of the next chunk of `sequence`, behind what is planned: of one sequence of a step all rows are kept."""
    if not sequence.keeps_rows:
        return budget
    return 0 if any(entry.sequence.keeps_rows for entry in planned) else min(budget, MAX_ROWS)


def note_prompt(entry: ScheduledSequence, result: StepResult) -> None:
    """Keep what a step brought. A prompt that is computed again after a preemption brings the same again."""
    found = result.prompt_logprobs.get(entry.sequence.key)
    if found is not None:
        del entry.sequence.prompt_logprobs[entry.start :]
        entry.sequence.prompt_logprobs.extend(found)


def with_prompt(sequence: Sequence, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
    """Those of the token that is appended next; of the first one with what was gathered, which is dropped here."""
    if logprobs is None or not sequence.gathers_prompt:
        return logprobs
    gathered, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), []
    return msgspec.structs.replace(logprobs, prompt=gathered)
