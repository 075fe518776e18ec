"""A fake runner under a grammar that forces tokens: where they stand decides, so that they can be counted."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import StepPlan, StepResult
from disagg.engine.request import Sequence
from disagg.engine.sampling_rules import takes_forced
from tests.support.engine import BLOCK, VOCAB_SIZE

GRAMMAR = "any"
"""Of a sequence for which the runner forces tokens."""


def forced_token(index: int) -> int:
    """Of an output index at which the grammar leaves no choice."""
    return (31 * index + 500) % VOCAB_SIZE


class ForcingRunner(FakeModelRunner):
    """At the output indices `forced` the token of a sequence with a grammar is `forced_token`, whatever the KV; between
    them it depends on all KV. With `skips`, those behind a sampled token come with it."""

    def __init__(self, forced: Collection[int], *, skips: bool = True, num_blocks: int = 10) -> None:
        super().__init__(num_blocks, BLOCK, 4096, VOCAB_SIZE)
        self._forced_at = frozenset(forced)
        self._skips = skips
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        result = super().run(plan)
        token_ids, forced = list(result.token_ids), dict[int, tuple[int, ...]]()
        for place, entry in enumerate(entry for entry in plan.entries if entry.samples):
            if entry.sequence.spec.sampling.grammar:
                index = entry.sequence.num_output_tokens
                if index in self._forced_at:
                    token_ids[place] = forced_token(index)
                forced[place] = self._behind(entry.sequence, index + 1)
        return msgspec.structs.replace(result, token_ids=token_ids, forced=forced)

    def _behind(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        if not self._skips or not takes_forced(sequence):
            return ()
        end = index
        while end in self._forced_at:
            end += 1
        return tuple(map(forced_token, range(index, end)))
