import random

from hypothesis import given
from hypothesis import strategies as st

from disagg.router.ledger import TokenLedger


def ledger(max_tokens: int = 8, attempt: int = 0) -> TokenLedger:
    made = TokenLedger(max_tokens)
    made.begin(attempt)
    return made


def test_tokens_in_order_pass_at_once() -> None:
    it = ledger()
    assert it.add(0, 0, [10]) == [10]
    assert it.add(0, 1, [11, 12]) == [11, 12]
    assert (it.released, it.has_gap) == ([10, 11, 12], False)


def test_early_tokens_wait_for_the_gap_to_close() -> None:
    it = ledger()
    assert it.add(0, 1, [11, 12]) == []
    assert it.has_gap
    assert it.add(0, 4, [14]) == []
    assert it.add(0, 0, [10]) == [10, 11, 12]
    assert it.has_gap
    assert it.add(0, 3, [13]) == [13, 14]
    assert not it.has_gap


def test_duplicates_are_dropped_and_the_first_of_two_different_tokens_stays() -> None:
    it = ledger()
    it.add(0, 0, [10])
    assert it.add(0, 0, [10, 11]) == [11]
    assert (it.num_duplicate, it.num_contradicting) == (1, 0)
    assert it.add(0, 0, [99]) == []
    assert it.add(0, 3, [13]) == []
    assert it.add(0, 3, [98]) == []
    assert it.add(0, 2, [12]) == [12, 13]
    assert (it.num_duplicate, it.num_contradicting) == (3, 2)
    assert it.released == [10, 11, 12, 13]


def test_token_id_zero_is_a_token() -> None:
    assert ledger().add(0, 0, [0, 0]) == [0, 0]


def test_only_the_current_attempt_counts() -> None:
    it = ledger(attempt=1)
    assert it.add(0, 0, [10, 11]) == []
    assert it.add(2, 0, [10]) == []
    assert it.num_stale == 3
    assert it.add(1, 0, [20]) == [20]


def test_a_new_attempt_forgets_what_was_held_back_and_keeps_what_was_released() -> None:
    it = ledger()
    it.add(0, 0, [10])
    it.add(0, 2, [12])
    it.begin(1)
    assert not it.has_gap
    assert it.add(1, 1, [21]) == [21]
    assert it.released == [10, 21]


def test_what_the_client_did_not_ask_for_takes_no_memory() -> None:
    it = ledger(max_tokens=2)
    assert it.add(0, 0, [10, 11, 12, 13]) == [10, 11]
    assert it.add(0, 1_000_000, [1]) == []
    assert it.add(0, -1, [9]) == []
    assert (it.num_beyond, it.has_gap) == (4, False)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_any_order_with_repeats_gives_the_same_answer(token_ids: list[int], rng: random.Random) -> None:
    pieces = []
    for start in range(len(token_ids)):
        end = rng.randint(start + 1, len(token_ids))
        pieces += [(start, token_ids[start:end])] * rng.randint(1, 2)
    rng.shuffle(pieces)
    it = ledger(max_tokens=len(token_ids))
    released = [token for start, piece in pieces for token in it.add(0, start, piece)]
    assert released == it.released == token_ids
    assert (it.has_gap, it.num_contradicting) == (False, 0)
