"""Random lives of a pair: whatever the order, nothing is held in the end, and no answer is wrong.

`WorkerPair` itself checks at every step that no slot has two users, that no sequence is released under a gather, that
the two sides agree on sizes, and that credits are kept.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.pair import WorkerPair, prompt_of, spec_of


class PairLife(RuleBasedStateMachine):
    """Rules are what may happen at any time; `teardown` lets the pair come to rest and checks it."""

    pair: WorkerPair

    @initialize(
        chunk_tokens=st.integers(1, 24),
        credits=st.integers(1, 4),
        send_slots=st.integers(1, 3),
        receive_slots=st.integers(1, 3),
        token_budget=st.integers(3, 40),
        d_blocks=st.sampled_from([6, 12, 64]),
    )
    def start(self, **options: int) -> None:
        self.pair = WorkerPair(**options)  # type: ignore[arg-type]  # hypothesis knows the fields
        self.num_offered = 0

    @precondition(lambda self: self.num_offered < 6)
    @rule(
        num_tokens=st.integers(1, 60),
        family=st.integers(0, 2),
        max_tokens=st.integers(1, 5),
        timeout_s=st.sampled_from([None, None, 2.0]),
    )
    def offer(self, num_tokens: int, family: int, max_tokens: int, timeout_s: float | None) -> None:
        """Prompts of one family share their prefix."""
        prompt = prompt_of(num_tokens, 1000 * family)
        self.pair.offer(spec_of(f"r{self.num_offered}", prompt, max_tokens=max_tokens, timeout_s=timeout_s))
        self.num_offered += 1

    @precondition(lambda self: self.pair.ready())
    @rule(data=st.data(), num_deliveries=st.integers(1, 12))
    def deliver(self, data: st.DataObject, num_deliveries: int) -> None:
        for _ in range(num_deliveries):
            if ready := self.pair.ready():
                self.pair.deliver(data.draw(st.sampled_from(ready)))

    @precondition(lambda self: self.num_offered)
    @rule(which=st.integers(0, 5), side=st.sampled_from(["p", "d", "both"]))
    def cancel(self, which: int, side: str) -> None:
        self.pair.cancel(list(self.pair.specs)[which % self.num_offered], side)

    @rule(number=st.integers(0, 5))
    def cancel_early(self, number: int) -> None:
        self.pair.cancel(spec_of(f"r{number}", prompt_of(1)).key, "d")

    @rule()
    def corrupt(self) -> None:
        self.pair.wire.corrupt_next = True

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]), p=st.booleans(), d=st.booleans())
    def tick(self, seconds: float, p: bool, d: bool) -> None:
        self.pair.tick(seconds, p=p, d=d)

    @precondition(lambda self: self.num_offered > 3)
    @rule()
    def break_stream(self) -> None:
        self.pair.break_stream()

    @invariant()
    def answers_are_right_so_far(self) -> None:
        if hasattr(self, "pair"):
            self.pair.assert_answers_are_right()
            assert all(len(overs) <= 1 for overs in self.pair.p_overs.values())

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.settle()
            self.pair.assert_answers_are_right()
            self.pair.assert_at_rest()


TestPairLife = PairLife.TestCase
TestPairLife.settings = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)
