"""The text behind which a draft's row samples: a sequence as it will be if its drafts are accepted. Pure.

The choice of a token reads a sequence's sampling parameters, the number of its output tokens, its ids (for penalties)
and the state of its grammar. A `DraftRow` has all of these, as they will be behind some drafts, and changes nothing of
the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from disagg.engine.plan import ScheduledSequence
from disagg.engine.request import Sequence
from disagg.engine.text_counts import TextCounts
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec


class DraftRow:
    """A sequence with `drafts` behind it, for the choice of the token behind them."""

    __slots__ = ("_token_ids", "drafts", "grammar_state", "sequence", "text_counts")

    def __init__(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        self.sequence = sequence
        self.drafts = drafts
        self.grammar_state: Any = None
        """As of `Sequence`; a copy of the sequence's own, made when its mask is computed."""
        self._token_ids: list[int] | None = None
        self.text_counts: TextCounts | None = None if sequence.text_counts is None else sequence.text_counts.copied()

    @property
    def spec(self) -> SequenceSpec:
        """Spec of the sequence."""
        return self.sequence.spec

    @property
    def key(self) -> AttemptKey:
        """Key of the sequence."""
        return self.sequence.key

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the sequence."""
        return self.sequence.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, drafts included."""
        return self.sequence.num_output_tokens + len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """Prompt, output and drafts."""
        if self._token_ids is None:
            self._token_ids = [*self.sequence.token_ids, *self.drafts]
        return self._token_ids


SampledRow = Sequence | DraftRow
"""What a sampled row of logits belongs to."""


def sampled_row(entry: ScheduledSequence) -> SampledRow:
    """The text behind which the row of an entry samples."""
    return DraftRow(entry.sequence, entry.drafts) if entry.drafts else entry.sequence


def is_last_reached(rows: Seq[SampledRow], token_ids: Seq[int], place: int) -> bool:
    """Whether a row gives a token, and none of its sequence gives one behind it. The rows of a sequence stand together,
    and one of drafts gives a token if each of its drafts is what was sampled before it."""
    row = rows[place]
    if isinstance(row, DraftRow):
        first = place - len(row.drafts)
        if list(row.drafts) != list(token_ids[first:place]):
            return False
    if place + 1 == len(rows):
        return True
    behind = rows[place + 1]
    return not isinstance(behind, DraftRow) or behind.drafts[-1] != token_ids[place]
