"""Drafts by a smaller model of the same vocabulary, on the worker that decodes.

    a sequence joins ── its text is computed by the draft model, a chunk before a step ──> it has caught up
    before each step: the text that is new, then one draft a step of the draft model ──> drafts

The draft model chooses as the sequence does: with its temperature, filters and penalties, and with the random number of
the same output index. So it draws the same token where the two distributions agree. Edits by a grammar are left out,
and sequences that have one get no drafts.

It has a KV cache of its own, with as many blocks as the model's, which it divides among sequences by itself: a
sequence for which no block is left gets no drafts. All tokens are kept, also by a model with windows. KV of drafts that
were wrong is overwritten. A preempted sequence keeps its blocks; one that leaves the worker, or ends, gives them back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from disagg.engine.batch_arrays import blocks_for_tokens
from disagg.engine.checkpoint.checkpoint import read_model_config
from disagg.engine.config import NO_SPECULATION, WorkerConfig
from disagg.engine.draft_row import sampled_row
from disagg.engine.plan import NO_TOKEN, ScheduledSequence, StepPlan
from disagg.engine.request import Sequence, SequenceState
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.runner.sampler import Sampler
from disagg.engine.speculation.proposer import NOTHING, Proposal, Proposer

CATCH_UP_TOKENS = 128
"""Most tokens of texts that are computed before a step, so that streams wait little for a sequence that joins."""
_FEW = 4
"""Tokens up to which a sequence's new text is computed in the step that makes the first draft, as rows of decodes."""


@dataclass(slots=True)
class _Copy:
    """A sequence as the draft model sees it."""

    sequence: Sequence
    """The same ids, in blocks of the draft model's cache."""
    num_computed: int = 0
    """Leading tokens whose KV is in these."""
    drafts: tuple[int, ...] = ()
    """Drafts behind these whose KV is there, too, if they were accepted."""

    def settle(self) -> None:
        """Count the drafts that were accepted."""
        text, start = self.sequence.token_ids, self.num_computed
        for place, token_id in enumerate(self.drafts, start):
            if place >= len(text) or text[place] != token_id:
                break
            self.num_computed += 1
        self.drafts = ()

    @property
    def num_missing(self) -> int:
        """Known tokens that are not computed, without the last one."""
        return max(0, self.sequence.num_tokens - 1 - self.num_computed)


class DraftModel(Proposer):
    """A draft model with its KV cache. Owner: the engine thread.

    Args:
        config: of the worker; its `speculation` names the model.
        num_blocks: blocks of its KV cache.
        max_model_len: longest sequence of the worker.

    Raises:
        ConfigError: the checkpoint cannot be used.
    """

    def __init__(self, config: WorkerConfig, num_blocks: int, max_model_len: int) -> None:
        assert config.speculation.model is not None
        longest = read_model_config(config.speculation.model).max_exact_len
        alone = msgspec.structs.replace(
            config,
            model_path=config.speculation.model,
            speculation=NO_SPECULATION,
            adapters=None,
            num_blocks=num_blocks,
            max_model_len=min(max_model_len, longest),
            step_ahead=False,
        )
        self.is_costly = True
        self._runner = TorchModelRunner(alone, keeps_all=True)
        self._runner.capture_steps()
        self._sampler = Sampler(self._runner.vocab_size)
        self._free = list(range(num_blocks))
        self._copies: dict[Sequence, _Copy] = {}

    @override
    def most(self, sequence: Sequence, most: int) -> int:
        """None with a grammar, behind the draft model's longest text, and without blocks."""
        if sequence.spec.sampling.grammar:
            return 0
        most = min(most, self._runner.max_model_len - sequence.num_tokens)
        return most if most > 0 and self._num_missing_blocks(sequence, most) <= len(self._free) else 0

    @override
    def propose(self, sequence: Sequence, most: int) -> Proposal:
        return self.propose_all([(sequence, most)])[0]

    @override
    def propose_all(self, sequences: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        copies = {sequence: copy for sequence, most in sequences if (copy := self._copy_of(sequence, most)) is not None}
        ready = self._catch_up(list(copies.values()))
        drafts: dict[Sequence, tuple[int, ...]] = {}
        rows = [(sequence, most) for sequence, most in sequences if copies.get(sequence) in ready]
        while rows:
            token_ids = self._sample([(copies[sequence], drafts.get(sequence, ())) for sequence, _ in rows])
            going_on: list[tuple[Sequence, int]] = []
            for (sequence, most), token_id in zip(rows, token_ids, strict=True):
                copies[sequence].drafts = drafts.get(sequence, ())
                if token_id != NO_TOKEN and token_id not in sequence.spec.sampling.stop_token_ids:
                    drafts[sequence] = (*drafts.get(sequence, ()), token_id)
                    if len(drafts[sequence]) < most:
                        going_on.append((sequence, most))
            rows = going_on
        return [Proposal(drafts[sequence]) if sequence in drafts else NOTHING for sequence, _ in sequences]

    @override
    def forget(self, sequence: Sequence) -> None:
        copy = self._copies.pop(sequence, None)
        if copy is not None:
            self._free += copy.sequence.block_table

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free)

    def _copy_of(self, sequence: Sequence, most: int) -> _Copy | None:
        """The copy of a sequence, with blocks for its text and `most` drafts; None where it cannot have drafts, or may
        not."""
        if most < 1 or self.most(sequence, most) < most:
            return None
        num_missing, copy = self._num_missing_blocks(sequence, most), self._copies.get(sequence)
        if copy is None:
            same = Sequence(sequence.spec, SequenceState.RUNNING, token_ids=sequence.token_ids)
            copy = self._copies[sequence] = _Copy(same)
        for _ in range(num_missing):
            copy.sequence.block_table.append(self._free.pop())
        return copy

    def _num_missing_blocks(self, sequence: Sequence, most: int) -> int:
        copy = self._copies.get(sequence)
        num_blocks = 0 if copy is None else len(copy.sequence.block_table)
        return blocks_for_tokens(sequence.num_tokens + most, self._runner.block_size) - num_blocks

    def _catch_up(self, copies: list[_Copy]) -> list[_Copy]:
        """Compute what is new in the texts, within a budget. Returns those of which at most `_FEW` tokens are missing
        then."""
        budget, ready = CATCH_UP_TOKENS, list[_Copy]()
        chunks: list[ScheduledSequence] = []
        for copy in copies:
            copy.settle()
        for copy in sorted(copies, key=lambda copy: copy.num_missing):
            if copy.num_missing > _FEW and budget > 0:
                num_tokens = min(copy.num_missing, budget)
                budget -= num_tokens
                chunks.append(ScheduledSequence(copy.sequence, copy.num_computed, num_tokens, False))
                copy.num_computed += num_tokens
            if copy.num_missing <= _FEW:
                ready.append(copy)
        if chunks:
            self._runner.compute(self._runner.arrays(StepPlan(prefills=tuple(chunks))))
        return ready

    def _sample(self, rows: Seq[tuple[_Copy, tuple[int, ...]]]) -> list[int]:
        """One token behind each text with its drafts; what is missing of a text is computed with its first."""
        entries: list[ScheduledSequence] = []
        for copy, drafts in rows:
            sequence, last = copy.sequence, copy.sequence.num_tokens - 1
            entries += [ScheduledSequence(sequence, at, 1, False) for at in range(copy.num_computed, last)]
            entries.append(ScheduledSequence(sequence, last + len(drafts), 1, True, drafts))
            copy.num_computed = last + 1
        logits = self._runner.forward(StepPlan(tuple(entries)))
        places = [place for place, entry in enumerate(entries) if entry.samples]
        sampled = [sampled_row(entry) for entry in entries if entry.samples]
        return self._sampler.sample(logits[places] if len(places) < len(entries) else logits, sampled)
