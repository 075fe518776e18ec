"""The breaker alone: its table, when it opens, how long it waits; and random lives of one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.proto.ids import AttemptKey, RequestId
from disagg.router.states import IllegalTransitionError
from disagg.router.workers.circuit_breaker import (
    BREAKER_TABLE,
    BreakerEvent,
    BreakerLimits,
    BreakerState,
    CircuitBreaker,
    next_breaker_state,
)

LIMITS = BreakerLimits(failures=3, share=0.5, pause_s=0.5, max_pause_s=4.0)
KEY = AttemptKey(RequestId("r"), 0)


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = CircuitBreaker(LIMITS)
    assert [breaker.failed(now, now) for _ in range(3)] == [False, False, True]
    return breaker


def test_every_pair_that_is_not_listed_raises() -> None:
    for state, event in itertools.product(BreakerState, BreakerEvent):
        if (state, event) in BREAKER_TABLE:
            assert next_breaker_state(state, event) is BREAKER_TABLE[state, event]
        else:
            with pytest.raises(IllegalTransitionError, match=f"breaker: '{event.value}' while {state.value}"):
                next_breaker_state(state, event)


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = CircuitBreaker(LIMITS)
    assert [breaker.failed(0, 0), breaker.failed(0, 0)] == [False, False]
    assert not breaker.passed(0, 0)
    assert [breaker.failed(0, 0), breaker.failed(0, 0)] == [False, False]
    assert breaker.failed(0, 0)
    assert (breaker.state, breaker.is_blocked, breaker.trial_at) == (BreakerState.OPEN, True, 0.5)


def test_half_of_the_latest_results_open_it() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(4):
        assert not breaker.failed(0, 0)
        assert not breaker.passed(0, 0)
    assert not breaker.failed(0, 0)  # nine results are too few
    assert not breaker.passed(0, 0)
    assert breaker.failed(0, 0)


def test_a_failure_now_and_then_does_not() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(100):
        assert not breaker.failed(0, 0)
        assert not breaker.passed(0, 0)
        assert not breaker.passed(0, 0)


def test_failures_with_one_peer_only_do_not_open_what_needs_two() -> None:
    breaker = CircuitBreaker(BreakerLimits(failures=3, share=0.5, pause_s=0.5, max_pause_s=4.0, peers=2))
    assert not any(breaker.failed(0, 0, "d0") for _ in range(30))
    assert breaker.failed(0, 0, "d1")


def test_the_pause_doubles_with_each_trial_that_fails_up_to_a_limit() -> None:
    breaker, pauses = opened(), []
    for _ in range(5):
        pauses.append(breaker.pause_s)
        assert not breaker.tick(breaker.trial_at - 0.01)
        now = breaker.trial_at
        assert breaker.tick(now)
        breaker.begin_trial(KEY)
        assert breaker.is_blocked
        assert breaker.failed(now, now + 1)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert breaker.opened_at == 0.0


def test_a_trial_that_passes_closes_it_and_the_next_opening_soon_after_goes_on_doubling() -> None:
    breaker = opened()
    assert breaker.tick(0.5)
    breaker.begin_trial(KEY)
    assert breaker.passed(0.5, 1.0)
    assert (breaker.state, breaker.trial) == (BreakerState.CLOSED, None)
    assert [breaker.failed(1, 1) for _ in range(3)] == [False, False, True]
    assert breaker.pause_s == 1.0
    assert breaker.tick(2.0)
    breaker.begin_trial(KEY)
    assert breaker.passed(2.0, 3.0)
    assert [breaker.failed(63, 63) for _ in range(3)] == [False, False, True]
    assert breaker.pause_s == 0.5


def test_a_trial_without_a_result_makes_way_for_another() -> None:
    breaker = opened()
    breaker.tick(0.5)
    breaker.begin_trial(KEY)
    assert not breaker.withdraw(AttemptKey(RequestId("other"), 0))
    assert breaker.withdraw(KEY)
    assert (breaker.state, breaker.is_blocked) == (BreakerState.HALF_OPEN, False)


def test_what_was_placed_before_it_opened_says_nothing() -> None:
    breaker = opened(now=1.0)
    assert not breaker.passed(0.9, 2.0)
    breaker.tick(1.5)
    assert not breaker.failed(0.9, 2.0)
    assert (breaker.state, breaker.pause_s) == (BreakerState.HALF_OPEN, 0.5)


def test_a_success_where_it_was_used_for_want_of_others_closes_it() -> None:
    breaker = opened(now=1.0)
    assert breaker.passed(1.1, 1.2)
    assert not breaker.is_blocked


@given(
    st.lists(
        st.sampled_from(["failed", "passed", "late failure", "late success", "tick", "trial", "withdraw"]), max_size=60
    ),
    st.lists(st.floats(0.0, 3.0), min_size=60, max_size=60),
)
def test_a_worker_that_is_healthy_from_now_on_is_used_again(steps: list[str], gaps: list[float]) -> None:
    """Whatever came before: one pause, one trial, and it is closed; and all is forgotten in the end."""
    breaker, now, num_trials = CircuitBreaker(LIMITS), 0.0, 0
    for step, gap in zip(steps, gaps, strict=False):
        now += gap
        match step:
            case "failed":
                breaker.failed(now, now)
            case "passed":
                breaker.passed(now, now)
            case "late failure":
                breaker.failed(breaker.opened_at - 1, now)
            case "late success":
                breaker.passed(breaker.opened_at - 1, now)
            case "tick":
                breaker.tick(now)
            case "trial":
                if breaker.state is BreakerState.HALF_OPEN:
                    num_trials += 1
                    breaker.begin_trial(AttemptKey(RequestId("r"), num_trials))
                    with pytest.raises(IllegalTransitionError):
                        breaker.begin_trial(KEY)
            case _:
                breaker.withdraw(AttemptKey(RequestId("r"), num_trials))
        assert (breaker.trial is not None) == (breaker.state is BreakerState.TRIAL)
        assert breaker.pause_s <= LIMITS.max_pause_s
    if breaker.state is BreakerState.OPEN:
        now = max(now, breaker.trial_at)
        assert breaker.tick(now)
    if breaker.state is BreakerState.HALF_OPEN:
        breaker.begin_trial(KEY)
    if breaker.state is BreakerState.TRIAL:
        assert breaker.passed(now, now)
    assert breaker.state is BreakerState.CLOSED
    for _ in range(20):
        assert not breaker.passed(now, now)
    assert breaker.is_forgotten(now + 61)
