import itertools

import pytest

from disagg.router.states import (
    ATTEMPT_TABLE,
    REQUEST_TABLE,
    AttemptEvent,
    AttemptState,
    IllegalTransitionError,
    RequestEvent,
    RequestState,
    next_attempt_state,
    next_request_state,
)

R, RE, A, AE = RequestState, RequestEvent, AttemptState, AttemptEvent


def test_the_way_of_a_request_that_is_tried_twice() -> None:
    state = R.QUEUED
    for event in (RE.PLACED, RE.PUT_BACK, RE.PLACED, RE.ANSWERED):
        state = next_request_state(state, event)
    assert state is R.FINISHED


def test_the_ways_to_decoding() -> None:
    prefilled = next_attempt_state(A.PREFILLING, AE.PREFILLED)
    assert prefilled is A.TRANSFERRING
    assert next_attempt_state(prefilled, AE.HANDED_OVER) is A.DECODING
    assert next_attempt_state(A.PREFILLING, AE.PREFILLED_HERE) is A.DECODING
    assert next_attempt_state(A.PREFILLING, AE.HANDED_OVER) is A.DECODING


def test_the_end_of_an_attempt_can_come_at_any_time_but_once() -> None:
    for state in set(AttemptState) - {A.ENDED}:
        assert next_attempt_state(state, AE.ENDED) is A.ENDED
    for event in AttemptEvent:
        with pytest.raises(IllegalTransitionError):
            next_attempt_state(A.ENDED, event)


@pytest.mark.parametrize("state", [R.FINISHED, R.FAILED, R.CANCELLED])
def test_a_request_that_is_over_stays_so(state: RequestState) -> None:
    for event in RequestEvent:
        with pytest.raises(IllegalTransitionError, match=f"while {state.value}"):
            next_request_state(state, event)


def test_every_unlisted_pair_raises() -> None:
    for state, event in set(itertools.product(RequestState, RequestEvent)) - REQUEST_TABLE.keys():
        with pytest.raises(IllegalTransitionError):
            next_request_state(state, event)
    for attempt_state, attempt_event in set(itertools.product(AttemptState, AttemptEvent)) - ATTEMPT_TABLE.keys():
        with pytest.raises(IllegalTransitionError):
            next_attempt_state(attempt_state, attempt_event)


def test_every_state_can_be_reached() -> None:
    assert {R.QUEUED, *REQUEST_TABLE.values()} == set(RequestState)
    assert {A.PREFILLING, *ATTEMPT_TABLE.values()} == set(AttemptState)
