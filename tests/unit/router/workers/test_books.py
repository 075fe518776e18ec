import pytest

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.router.workers.books import Booking, Books

P, D = WorkerId("p0"), WorkerId("d0")
K0, K1 = AttemptKey(RequestId("r0"), 0), AttemptKey(RequestId("r1"), 0)
NOTHING = {"tokens": 0, "sequences": 0, "blocks": 0}


def test_what_was_booked_is_given_back() -> None:
    books = Books()
    books.open(P, K0, Booking(tokens=100, blocks=7))
    books.open(P, K1, Booking(tokens=10, blocks=1))
    books.open(D, K0, Booking(blocks=9))
    assert books.holdings() == {"tokens": 110, "sequences": 3, "blocks": 17}
    account = books.account(P)
    assert (account.tokens, account.blocks, account.sequences) == (110, 8, 2)
    assert sorted(books.entries()) == [(D, K0), (P, K0), (P, K1)]
    for worker_id, key in list(books.entries()):
        books.close(worker_id, key)
    assert books.holdings() == NOTHING
    assert books.check_integrity() == []


def test_a_computed_prompt_gives_back_its_tokens_once() -> None:
    books = Books()
    books.open(P, K0, Booking(tokens=100, blocks=7))
    assert books.computed(P, K0) == 100
    assert books.computed(P, K0) == 0
    assert books.holdings() == {"tokens": 0, "sequences": 1, "blocks": 7}
    books.close(P, K0)
    assert books.holdings() == NOTHING


def test_a_booking_is_opened_and_closed_exactly_once() -> None:
    books = Books()
    booking = Booking(tokens=1)
    books.open(P, K0, booking)
    for again in (Booking(tokens=1), booking):
        with pytest.raises(ValueError, match="r0/0 is booked on p0 already"):
            books.open(P, K0, again)
    books.close(P, K0)
    with pytest.raises(KeyError):
        books.close(P, K0)
    assert books.holdings() == NOTHING


def test_an_answer_that_grows_is_given_back_with_its_booking() -> None:
    books = Books()
    account = books.account(D)
    books.open(D, K0, Booking(tokens=10, pairs=55, blocks=2, context=10))
    books.grow(D, K0, 3)
    assert (account.tokens, account.pairs, account.blocks, account.context) == (10, 55, 2, 13)
    books.computed(D, K0)
    assert (account.tokens, account.pairs, account.blocks, account.context) == (0, 0, 2, 13)
    assert books.close(D, K0) == Booking(blocks=2, context=13)
    assert (account.blocks, account.context) == (0, 0)
    books.forget(D)
    assert books.account(D) is not account


def test_integrity_sees_sums_that_are_off() -> None:
    books = Books()
    books.open(P, K0, Booking(tokens=5, blocks=2))
    books.account(P).tokens += 1
    assert books.check_integrity() == ["books of p0: 6 tokens, but its bookings say 5"]
