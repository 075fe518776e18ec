"""A dispatched prompt counts as uncomputed from the dispatch until the engine's own load has it."""

from __future__ import annotations

from disagg.engine.core.reports import PendingPrompts
from tests.support.engine import key_of


def test_a_prompt_counts_until_the_engine_counts_it() -> None:
    it = PendingPrompts()
    it.dispatched(key_of("a"), 100)
    it.dispatched(key_of("b"), 30)
    assert it.num_tokens(lambda key: True) == 130
    it.added([key_of("a"), key_of("unknown")])
    assert it.num_tokens(lambda key: True) == 30


def test_an_attempt_that_ends_before_the_engine_has_it_is_forgotten() -> None:
    it = PendingPrompts()
    it.dispatched(key_of("a"), 100)
    it.dispatched(key_of("b"), 30)
    assert it.num_tokens(lambda key: key != key_of("a")) == 30
    assert it.num_tokens(lambda key: True) == 30
