import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.messages import TokenLogprobs
from disagg.router.api import TokenBatch
from disagg.router.requests.output_buffer import OutputBuffer


def output_buffer(max_tokens: int = 8, attempt: int = 0) -> OutputBuffer:
    made = OutputBuffer(max_tokens)
    made.begin(attempt)
    return made


def test_tokens_in_order_pass_at_once() -> None:
    it = output_buffer()
    assert it.add(0, 0, [10]) == TokenBatch([10])
    assert it.add(0, 1, [11, 12]) == TokenBatch([11, 12])
    assert (it.released, it.has_gap) == ([10, 11, 12], False)


def test_early_tokens_wait_for_the_gap_to_close() -> None:
    it = output_buffer()
    assert it.add(0, 1, [11, 12]) == TokenBatch([])
    assert it.has_gap
    assert it.add(0, 4, [14]) == TokenBatch([])
    assert it.add(0, 0, [10]) == TokenBatch([10, 11, 12])
    assert it.has_gap
    assert it.add(0, 3, [13]) == TokenBatch([13, 14])
    assert not it.has_gap


def test_duplicates_are_dropped_and_the_first_of_two_different_tokens_stays() -> None:
    it = output_buffer()
    it.add(0, 0, [10])
    assert it.add(0, 0, [10, 11]) == TokenBatch([11])
    assert (it.num_duplicate, it.num_contradicting) == (1, 0)
    assert it.add(0, 0, [99]) == TokenBatch([])
    assert it.add(0, 3, [13]) == TokenBatch([])
    assert it.add(0, 3, [98]) == TokenBatch([])
    assert it.add(0, 2, [12]) == TokenBatch([12, 13])
    assert (it.num_duplicate, it.num_contradicting) == (3, 2)
    assert it.released == [10, 11, 12, 13]


def test_token_id_zero_is_a_token() -> None:
    assert output_buffer().add(0, 0, [0, 0]) == TokenBatch([0, 0])


def test_only_the_current_attempt_counts() -> None:
    it = output_buffer(attempt=1)
    assert it.add(0, 0, [10, 11]) == TokenBatch([])
    assert it.add(2, 0, [10]) == TokenBatch([])
    assert it.add(1, 0, [20]) == TokenBatch([20])


def test_a_new_attempt_forgets_what_was_held_back_and_keeps_what_was_released() -> None:
    it = output_buffer()
    it.add(0, 0, [10])
    it.add(0, 2, [12])
    it.begin(1)
    assert not it.has_gap
    assert it.add(1, 1, [21]) == TokenBatch([21])
    assert it.released == [10, 21]


def test_what_the_client_did_not_ask_for_takes_no_memory() -> None:
    it = output_buffer(max_tokens=2)
    assert it.add(0, 0, [10, 11, 12, 13]) == TokenBatch([10, 11])
    assert it.add(0, 1_000_000, [1]) == TokenBatch([])
    assert it.add(0, -1, [9]) == TokenBatch([])
    assert (it.num_beyond, it.has_gap) == (4, False)


def of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-token_id / 8, (token_id,), (-token_id / 8,))


def asking() -> OutputBuffer:
    made = OutputBuffer(8, wants_logprobs=True)
    made.begin(0)
    return made


def test_logprobs_wait_with_their_tokens_and_the_first_ones_stay() -> None:
    it = asking()
    assert it.add(0, 1, [11, 12], [of(11), of(12)]) == TokenBatch([])
    assert it.add(0, 2, [12], [of(99)]) == TokenBatch([])
    assert it.add(0, 0, [10], [of(10)]) == TokenBatch([10, 11, 12], [of(10), of(11), of(12)])
    assert it.add(0, 2, [12, 13], [of(99), of(13)]) == TokenBatch([13], [of(13)])
    assert (it.num_duplicate, it.num_contradicting, it.has_gap) == (2, 0, False)


def test_logprobs_of_another_attempt_or_beyond_the_end_are_dropped() -> None:
    it = asking()
    it.add(0, 1, [11], [of(11)])
    it.begin(1)
    assert it.add(0, 0, [10], [of(10)]) == TokenBatch([])
    assert it.add(1, 0, [20, 21], [of(20), of(21)]) == TokenBatch([20, 21], [of(20), of(21)])
    assert it.add(1, 8, [28], [of(28)]) == TokenBatch([])
    assert (it.num_beyond, it.has_gap) == (1, False)


def test_logprobs_that_nobody_asked_for_are_dropped() -> None:
    assert output_buffer().add(0, 0, [10, 11], [of(10)]) == TokenBatch([10, 11])


@pytest.mark.parametrize("logprobs", [[], [of(11)]])
def test_tokens_without_logprobs_leave_a_gap_until_the_next_attempt(logprobs: list[TokenLogprobs]) -> None:
    it = asking()
    it.add(0, 0, [10], [of(10)])
    assert it.add(0, 1, [11, 12], logprobs) == TokenBatch([])
    assert (it.has_gap, it.released) == (True, [10])
    it.begin(1)
    assert not it.has_gap
    assert it.add(1, 1, [11], [of(11)]) == TokenBatch([11], [of(11)])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_any_order_with_repeats_gives_the_same_answer(token_ids: list[int], rng: random.Random) -> None:
    pieces = []
    for start in range(len(token_ids)):
        end = rng.randint(start + 1, len(token_ids))
        pieces += [(start, token_ids[start:end])] * rng.randint(1, 2)
    rng.shuffle(pieces)
    it = output_buffer(max_tokens=len(token_ids))
    released = [token for start, piece in pieces for token in it.add(0, start, piece).token_ids]
    assert released == it.released == token_ids
    assert (it.has_gap, it.num_contradicting) == (False, 0)
