"""Drafts from answers that are known: right up to a place that changes from step to step, and wrong there."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from disagg.engine.core.engine_core import EngineCore
from disagg.engine.request import Sequence as EngineSequence
from disagg.engine.speculation.speculation import Speculation, Totals


@dataclass
class KnownDrafts(Speculation):
    """In place of a worker's `Speculation`: of each sequence the drafts are its answer's next tokens, with a wrong one
    at a random place.

    Args:
        answers: output tokens by request id, or a function that gives those of a sequence.
        most: the most drafts of a sequence.
        right: how often a draft is the right one.
        vocab_size: a wrong draft is the right one plus 1, modulo this.
    """

    answers: Mapping[str, Sequence[int]] | Callable[[EngineSequence], Sequence[int]]
    most: int = 4
    right: float = 0.8
    vocab_size: int = 1000
    seed: int = 0
    totals: Totals = field(default_factory=Totals)
    planned: Counter[str] = field(default_factory=Counter)
    """Number of drafts by request id."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def plan(
        self,
        sequences: Sequence[tuple[EngineSequence, int]],
        *,
        num_rows: int,
        context: int,
        most_rows: int,
        most_ms: float,
    ) -> list[tuple[int, ...]]:
        assert num_rows <= most_rows
        num_free = most_rows - num_rows
        found: list[tuple[int, ...]] = []
        for sequence, most in sequences:
            whole = self.answers(sequence) if callable(self.answers) else self.answers[sequence.key.request_id]
            answer = whole[sequence.num_output_tokens :]
            drafts = [
                token if self._random.random() < self.right else (token + 1) % self.vocab_size
                for token in answer[: min(most, self.most, num_free)]
            ]
            num_free -= len(drafts)
            self.planned[sequence.key.request_id] += len(drafts)
            found.append(tuple(drafts))
        return found

    def would_plan(
        self, sequences: Sequence[tuple[EngineSequence, int]], *, num_rows: int, context: int, most_rows: int
    ) -> bool:
        return num_rows < most_rows and any(most > 0 for _, most in sequences)

    def observe(self, rows: int, context: int, ms: float) -> None:
        return

    def forget(self, sequence: EngineSequence) -> None:
        return


def draft(core: EngineCore, speculation: Speculation) -> None:
    """Let a core compute these drafts."""
    core._scheduler.speculation = speculation
