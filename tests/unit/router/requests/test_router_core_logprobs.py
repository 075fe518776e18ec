"""Logprobs go to the client with their tokens, through hand-overs and retries."""

from __future__ import annotations

from disagg.proto.ids import RequestId
from disagg.proto.messages import StepUpdate, TokenLogprobs, TokenOut
from tests.support.router import (
    EMPTY,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
)


def likely(attempt: int, first_index: int, *token_ids: int) -> StepUpdate:
    """Tokens with logprobs that tell them apart."""
    logprobs = tuple(TokenLogprobs(-token_id / 8, (token_id,), (-token_id / 8,)) for token_id in token_ids)
    return StepUpdate(tokens=(TokenOut(RequestId("r0"), attempt, first_index, token_ids, logprobs),))


def running(*workers: str) -> Scenario:
    it = Scenario(*workers)
    it.start(routed_request("r0", max_tokens=9, logprobs=1), "p0", "d0")
    return it


def test_what_two_workers_send_comes_out_once_and_in_order() -> None:
    it = running("p0", "d0")
    assert it.update("d0", handed_over_update("r0", 0), likely(0, 0, 4)) == ["emit r0 [4] -0.5"]
    assert it.update("d0", likely(0, 2, 12)) == []
    assert it.update("p0", likely(0, 0, 4), prefilled_update("r0", 0)) == []
    assert it.update("d0", likely(0, 1, 8)) == ["emit r0 [8, 12] -1.0 -1.5"]


def test_a_retry_goes_on_after_those_that_were_shown() -> None:
    it = running("p0", "d0", "d1")
    it.update("p0", likely(0, 0, 4), prefilled_update("r0", 0))
    assert it.update("d0", handed_over_update("r0", 0), likely(0, 0, 4, 8)) == ["emit r0 [8] -1.0"]
    assert it.update("d0", likely(0, 3, 20)) == []  # behind a gap: lost with the attempt
    assert it.update("d0", end_update("r0", 0, "failed")) == ["dispatch p0 r0/1 -> d1"]
    spec = it.dispatched["r0/1"].message.spec
    assert (spec.emitted_token_ids, spec.sampling.logprobs) == ((4, 8), 1)
    assert it.update("p0", likely(0, 2, 16)) == []  # of the first attempt
    assert it.update("p0", likely(1, 2, 24), prefilled_update("r0", 1)) == ["emit r0 [24] -3.0"]
    assert it.update("d1", handed_over_update("r0", 1), likely(1, 2, 24, 32), end_update("r0", 1, "stop")) == [
        "emit r0 [32] -4.0",
        "finish r0 stop 4 cached=0",
    ]
    assert it.core.holdings() == EMPTY


def test_an_answer_without_the_logprobs_that_were_asked_for_is_made_again() -> None:
    it = running("p0", "d0", "d1")
    it.update("p0", likely(0, 0, 4), prefilled_update("r0", 0))
    assert it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 1, 8, 12)) == []
    assert it.update("d0", end_update("r0", 0, "stop")) == ["dispatch p0 r0/1 -> d1"]
    assert it.dispatched["r0/1"].message.spec.emitted_token_ids == (4,)
    assert it.core.counters["end_before_tokens"] == 1
    assert it.update("p0", likely(1, 1, 8), end_update("r0", 1, "stop")) == [
        "emit r0 [8] -1.0",
        "cancel d1 r0/1",
        "finish r0 stop 2 cached=0",
    ]


def test_logprobs_that_nobody_asked_for_are_not_shown() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.update("p0", likely(0, 0, 4)) == ["emit r0 [4]"]
