"""Random lives of a pair: whatever the order, nothing is held in the end, and no answer is wrong.

`WorkerPair` itself checks at every step that no slot has two users, that no sequence is released under a gather, that
nothing is joined before all of it is verified, that the two sides agree on sizes, and that credits are kept.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.pair import Message, WorkerPair, prompt_of, spec_of

TRANSFER_TIMEOUT_S = 2.0


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
        windows=st.sampled_from([(), (), ((16, 12),), ((5, 40), (40, 16)), ((33, 64),)]),
    )
    def start(self, **options: Any) -> None:
        self.actions: dict[str, str] = {}
        self.held: dict[str, list[Message]] = {"to_d": [], "to_p": []}
        self.pair = WorkerPair(
            tampers={way: partial(self.arrive, way) for way in self.held},
            transfer_timeout_s=TRANSFER_TIMEOUT_S,
            **options,
        )
        self.num_offered = 0

    def arrive(self, way: str, message: Message) -> list[Message]:
        """What becomes of a control message; the next one of a way may be lost, doubled or held back until another one
        has passed."""
        held, self.held[way] = self.held[way], []
        match self.actions.pop(way, ""):
            case "lose":
                return held
            case "double":
                return [message, message, *held]
            case "hold":
                self.held[way] = [message]
                return held
        return [message, *held]

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

    @precondition(lambda self: not self.actions)
    @rule(way=st.sampled_from(["to_d", "to_p"]), action=st.sampled_from(["lose", "double", "hold"]))
    def tamper(self, way: str, action: str) -> None:
        self.actions[way] = action

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0]), p=st.booleans(), d=st.booleans())
    def tick(self, seconds: float, p: bool, d: bool) -> None:
        self.pair.tick(seconds, p=p, d=d)

    @precondition(lambda self: self.num_offered > 3)
    @rule()
    def break_stream(self) -> None:
        self.pair.break_stream()

    @invariant()
    def blocks_are_in_order(self) -> None:
        """None is free and pinned, or counted twice."""
        if hasattr(self, "pair"):
            assert self.pair.p.core.check_integrity() == self.pair.d.core.check_integrity() == []

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
TestPairLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
