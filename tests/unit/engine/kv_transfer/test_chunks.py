"""Cutting a prompt into payloads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.kv_transfer.pair_half import tokens_per_chunk
from disagg.engine.kv_transfer.send_window import TokenRange, next_chunk


@pytest.mark.parametrize(
    ("max_bytes", "per_token", "tokens"), [(8, 8, 1), (15, 8, 1), (16, 8, 2), (4 << 20, 46080, 91)]
)
def test_a_payload_has_whole_tokens(max_bytes: int, per_token: int, tokens: int) -> None:
    assert tokens_per_chunk(max_bytes, per_token) == tokens


@pytest.mark.parametrize(("max_bytes", "per_token"), [(7, 8), (8, 0), (0, 1), (8, -1)])
def test_a_token_must_fit(max_bytes: int, per_token: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        tokens_per_chunk(max_bytes, per_token)


@pytest.mark.parametrize(
    ("next_token", "num_computed", "complete", "expected"),
    [
        (0, 0, False, None),
        (0, 0, True, None),
        (0, 4, False, None),  # less than half of a full one waits for the next step
        (0, 5, False, (0, 5)),
        (0, 9, False, (0, 9)),
        (0, 10, False, (0, 10)),
        (0, 11, False, (0, 10)),
        (10, 11, False, None),
        (10, 11, True, (10, 11)),
        (16, 40, True, (16, 26)),
        (16, 12, False, None),  # a preempted prefill is behind what was cut
    ],
)
def test_next_chunk(next_token: int, num_computed: int, complete: bool, expected: tuple[int, int] | None) -> None:
    assert next_chunk(next_token, num_computed, 10, complete=complete) == (expected and TokenRange(*expected))


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 40), st.lists(st.integers(1, 30), max_size=40))
def test_every_token_is_cut_once_in_order(cached: int, num_tokens: int, max_tokens: int, steps: list[int]) -> None:
    num_known = cached + num_tokens
    cut: list[TokenRange] = []
    next_token, computed = cached, 0
    for step in [*steps, num_known]:
        computed = min(num_known, computed + step)
        complete = computed == num_known
        while (tokens := next_chunk(next_token, computed, max_tokens, complete=complete)) is not None:
            cut.append(tokens)
            next_token = tokens.end
            assert tokens.end <= computed
    assert [tokens.start for tokens in cut] == [cached, *(tokens.end for tokens in cut[:-1])]
    assert cut[-1].end == num_known
    assert all(0 < tokens.end - tokens.start <= max_tokens for tokens in cut)
