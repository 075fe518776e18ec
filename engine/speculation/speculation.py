"""Speculation of one worker: which drafts its steps compute, and what became of them.

plan(sequences, ...)            before a step: drafts for each of them
totals.walked(...)              after the step, for each sequence that had drafts
observe(rows, context, ms)      a step without prompts was measured
forget(sequence)                it ended or left
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from disagg.engine.plan import is_fatal
from disagg.engine.request import Sequence
from disagg.engine.speculation.draft_counts import Acceptance, RowTimes, choose, may_gain
from disagg.engine.speculation.looks import Looks
from disagg.engine.speculation.proposer import NOTHING, Proposal, Proposer
from disagg.proto.messages import MAX_DRAFT, StepSample

_log = logging.getLogger(__name__)


@dataclass
class Totals:
    """Counts since the start of the worker."""

    steps_with_drafts: int = 0
    drafted: int = 0
    """Drafts of runs whose outcome is known. A run is the drafts of one sequence in one step."""
    accepted: int = 0
    by_length: Counter[int] = field(default_factory=Counter)
    """How many runs had so many accepted drafts."""

    def walked(self, num_drafted: int, num_accepted: int) -> None:
        """Count a run."""
        self.drafted += num_drafted
        self.accepted += num_accepted
        self.by_length[num_accepted] += 1

    def counts(self) -> tuple[int, int, int, tuple[int, ...]]:
        """Steps with drafts, drafts, accepted ones, and runs by their length from 0 on."""
        runs = tuple(self.by_length[length] for length in range(MAX_DRAFT + 1))
        return self.steps_with_drafts, self.drafted, self.accepted, runs


@dataclass(slots=True)
class _Proposed:
    """The latest proposal for one sequence."""

    proposal: Proposal
    num_tokens: int
    """Length of the text that it continues."""
    num_drafted: int = 0
    """How many of it are computed, or would be if its look did not only watch."""


LONGEST_STEP = 1.5
"""How many times as long as without drafts a step may take. Beyond, a few percent more tokens a second would be paid by
the sequences of the batch that have no drafts, whose tokens all come later."""
TRY_AGAIN = 32
"""Number of steps without drafts of a costly proposer after which it is asked for one of each sequence, so that a text
that became predictable is noticed."""
STEPS_BEHIND_FAILURE = 32
"""Number of steps without drafts behind one in which the proposer failed."""


class Speculation:
    """The drafts of one worker. Owner: the scheduler.

    Args:
        proposer: the method.
        calibration: steps that were measured at the start.
        max_draft: the most drafts of a sequence in one step.
    """

    def __init__(self, proposer: Proposer, calibration: Seq[StepSample], *, max_draft: int) -> None:
        self.totals = Totals()
        self._proposer = proposer
        self._max_draft = max_draft
        self._times = RowTimes(calibration)
        self._acceptance = Acceptance()
        self._proposed: dict[Sequence, _Proposed] = {}
        self._num_without = 0
        """Steps in a row for which a costly proposer was not asked."""
        self._looks = Looks()
        self._num_behind_failure = 0
        """Number of next steps without drafts, because the proposer failed."""

    def plan(
        self, sequences: Seq[tuple[Sequence, int]], *, num_rows: int, context: int, most_rows: int, most_ms: float
    ) -> list[tuple[int, ...]]:
        """The drafts of the next step for each sequence.

        Args:
            sequences: each with the most drafts that it may have; 0 for those that may not have any.
            num_rows: rows without drafts, of these sequences and of others.
            context: sum over these rows of the tokens that each one attends to.
            most_rows: rows of the largest step.
            most_ms: longest step that the tightest sequence allows.
        """
        nothing: list[tuple[int, ...]] = [()] * len(sequences)
        if self._rests():
            return nothing
        most_ms = min(most_ms, LONGEST_STEP * self._times.ms(num_rows, context))
        most_rows = self._fitting(num_rows, context, most_rows, most_ms)
        mosts = self._mosts(sequences)
        if not may_gain(self._times, num_rows, context, min(sum(mosts), most_rows - num_rows)):
            self._looks.looked(num_rows, 0.0)
            return nothing
        if self._proposer.is_costly:
            mosts = self._chosen(sequences, _unknown(mosts), num_rows, context, most_rows)
            self._num_without = 0 if any(mosts) else self._num_without + 1
            if self._num_without >= TRY_AGAIN:
                self._num_without, num_left = 0, most_rows - num_rows
                mosts = [min(1, most) if place < num_left else 0 for place, (_, most) in enumerate(sequences)]
            if not any(mosts):
                return nothing
            proposed = self._propose(sequences, mosts)
            numbers = [len(proposal.token_ids) for proposal in proposed]
        else:
            proposed = self._propose(sequences, mosts)
            numbers = self._chosen(sequences, proposed, num_rows, context, most_rows)
        only_watches = not self._proposer.is_costly and self._looks.only_watches
        self._look(sequences, numbers, num_rows, context)
        if only_watches or not any(numbers):
            return nothing
        self.totals.steps_with_drafts += 1
        return [proposal.token_ids[:number] for proposal, number in zip(proposed, numbers, strict=True)]

    def would_plan(self, sequences: Seq[tuple[Sequence, int]], *, num_rows: int, context: int, most_rows: int) -> bool:
        """Whether `plan` would have drafts, for sequences of which the last token is not known yet: by what was
        proposed behind the token before it. Where it would not, the step is counted as one without drafts."""
        if self._rests():
            return False
        most_rows = self._fitting(num_rows, context, most_rows, LONGEST_STEP * self._times.ms(num_rows, context))
        mosts = self._mosts(sequences)
        found = may_gain(self._times, num_rows, context, min(sum(mosts), most_rows - num_rows))
        if found:
            proposals = _unknown(mosts) if self._proposer.is_costly else self._propose(sequences, mosts)
            numbers = self._chosen(sequences, proposals, num_rows, context, most_rows)
            found = any(numbers)
            if self._proposer.is_costly and not found:
                found = self._num_without + 1 >= TRY_AGAIN
                self._num_without += not found
            if found and not self._proposer.is_costly and self._looks.only_watches:
                self._look(sequences, numbers, num_rows, context)
                return False
        if not found:
            self._looks.looked(num_rows, 0.0)
        return found

    def observe(self, rows: int, context: int, ms: float) -> None:
        """A step without prompts was measured. `context`: sum over all its rows, drafts among them, of the tokens that
        each one attends to."""
        self._times.observe(rows, context, ms)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended or left."""
        self._learn(sequence)
        self._proposed.pop(sequence, None)
        self._acceptance.forget(sequence)
        self._proposer.forget(sequence)

    def _fitting(self, num_rows: int, context: int, most_rows: int, most_ms: float) -> int:
        """The most rows that take at most `most_ms`, and at least those without drafts."""

        def ms(rows: int) -> float:
            return self._times.ms(rows, context * rows // max(1, num_rows))

        if most_rows <= num_rows or ms(most_rows) <= most_ms:
            return most_rows
        fits, too_many = num_rows, most_rows
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if ms(middle) <= most_ms:
                fits = middle
            else:
                too_many = middle
        return fits

    def _rests(self) -> bool:
        """Learn from the last look. Returns whether the next step passes without one, which is never so for a costly
        proposer that did not fail: it is asked only for what is worth its time."""
        for sequence in list(self._proposed):
            self._learn(sequence)
        if self._num_behind_failure > 0:
            self._num_behind_failure -= 1
            return True
        if not any(proposed.num_drafted for proposed in self._proposed.values()):
            self._looks.settle()
        return not self._proposer.is_costly and self._looks.rests()

    def _mosts(self, sequences: Seq[tuple[Sequence, int]]) -> list[int]:
        return [self._proposer.most(sequence, min(most, self._max_draft)) for sequence, most in sequences]

    def _look(self, sequences: Seq[tuple[Sequence, int]], numbers: Seq[int], num_rows: int, context: int) -> None:
        """A look chose so many of each proposal."""
        self._looks.looked(num_rows, self._price(sequences, numbers, num_rows, context))
        for (sequence, _), number in zip(sequences, numbers, strict=True):
            if number:
                self._proposed[sequence].num_drafted = number

    def _price(self, sequences: Seq[tuple[Sequence, int]], numbers: Seq[int], num_rows: int, context: int) -> float:
        """Number of tokens that steps without drafts give in the time that so many drafts take."""
        if not any(numbers):
            return 0.0
        attended = sum(sequence.num_tokens * number for (sequence, _), number in zip(sequences, numbers, strict=True))
        ms = self._times.ms(num_rows + sum(numbers), context + attended)
        return num_rows * (ms / self._times.ms(num_rows, context) - 1.0)

    def _propose(self, sequences: Seq[tuple[Sequence, int]], mosts: Seq[int]) -> list[Proposal]:
        """Proposals for each; none where the proposer fails, because no answer needs any. What it kept of these
        sequences may be wrong then and is dropped."""
        asked = [(sequence, most) for (sequence, _), most in zip(sequences, mosts, strict=True) if most > 0]
        try:
            proposals = self._proposer.propose_all(asked)
        except Exception as error:
            if is_fatal(error):
                raise
            _log.error("making drafts failed; %d steps pass without any", STEPS_BEHIND_FAILURE, exc_info=error)
            self._num_behind_failure = STEPS_BEHIND_FAILURE
            for sequence, _ in asked:
                self._proposer.forget(sequence)
            return [NOTHING] * len(sequences)
        found = dict(zip((sequence for sequence, _ in asked), proposals, strict=True))
        for sequence, proposal in found.items():
            if proposal.token_ids:
                self._proposed[sequence] = _Proposed(proposal, sequence.num_tokens)
        return [found.get(sequence, NOTHING) for sequence, _ in sequences]

    def _chosen(
        self,
        sequences: Seq[tuple[Sequence, int]],
        proposals: Seq[Proposal],
        num_rows: int,
        context: int,
        most_rows: int,
    ) -> list[int]:
        """How many of each proposal are worth their time."""
        chances = [
            self._acceptance.chances(sequence, proposal) if proposal.token_ids else ()
            for (sequence, _), proposal in zip(sequences, proposals, strict=True)
        ]
        lengths = [sequence.num_tokens for sequence, _ in sequences]
        return choose(self._times, num_rows, context, chances, most_rows, lengths=lengths)

    def _learn(self, sequence: Sequence) -> None:
        """Compare the latest proposal for a sequence with the tokens that came."""
        proposed = self._proposed.get(sequence)
        if proposed is None:
            return
        drafts, text, start = proposed.proposal.token_ids, sequence.token_ids, proposed.num_tokens
        num_known = min(len(drafts), len(text) - start)
        if num_known <= 0:
            return
        num_accepted = 0
        while num_accepted < num_known and drafts[num_accepted] == text[start + num_accepted]:
            num_accepted += 1
        self._acceptance.observe(sequence, proposed.proposal, num_known, num_accepted)
        self._looks.accepted(min(num_accepted, proposed.num_drafted))
        del self._proposed[sequence]


def _unknown(mosts: Seq[int]) -> list[Proposal]:
    """Proposals of so many drafts each, that are not made yet."""
    return [Proposal((0,) * most) for most in mosts]
