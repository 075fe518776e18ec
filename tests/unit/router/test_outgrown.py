"""An answer that outgrew the prefill workers, where decode workers must not compute prompts of new requests."""

import msgspec
import pytest

from disagg.router.config import PolicyName, RouterConfig
from tests.support.router import (
    EMPTY,
    PLAIN,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)

NEVER = msgspec.structs.replace(PLAIN, local_prefill="never")


def small_prefill(config: RouterConfig = NEVER) -> Scenario:
    """P holds 80 tokens, D 1,024."""
    it = Scenario(worker_info("p0", num_blocks=5), worker_info("d0", num_blocks=64), config=config)
    assert it.submit(routed_request("r0", 64, max_tokens=100)) == ["dispatch p0 r0/0 -> d0"]
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0))
    return it


def grow(it: Scenario, num_tokens: int) -> None:
    """So many tokens of the answer, the first one included."""
    it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 1, *[7] * (num_tokens - 1)))


@pytest.mark.parametrize("policy", ["joint", "least_loaded"])
def test_it_is_continued_on_the_decode_worker_alone(policy: PolicyName) -> None:
    it = small_prefill(msgspec.structs.replace(NEVER, policy=policy))
    grow(it, 30)
    assert it.update("d0", end_update("r0", 0, "preempted")) == []
    assert it.at(2.0) == ["dispatch d0 r0/1 alone"]
    it.update("d0", tokens_update("r0", 1, 30, *[7] * 70))
    assert it.update("d0", end_update("r0", 1, "length")) == ["finish r0 length 100 cached=0"]
    assert it.core.holdings() == EMPTY
    assert it.core.check_integrity() == []


def test_while_a_prefill_worker_can_hold_it_the_pair_continues_it() -> None:
    it = small_prefill()
    grow(it, 10)
    it.update("d0", end_update("r0", 0, "preempted"))
    assert it.at(2.0) == ["dispatch p0 r0/1 -> d0"]


def test_what_is_too_long_for_each_decode_worker_too_waits_for_one_and_fails() -> None:
    it = small_prefill()
    it.up(worker_info("d1", num_blocks=5))
    grow(it, 30)
    it.lost("d0")
    assert it.at(2.4) == []
    assert it.at(2.6) == ["fail r0 UnavailableError no_decode_capacity"]


def test_it_is_continued_on_a_decode_worker_that_comes_later() -> None:
    it = small_prefill()
    grow(it, 30)
    it.lost("d0")
    assert it.at(1.0) == []
    assert it.up(worker_info("d1", num_blocks=64)) == ["dispatch d1 r0/1 alone"]


def test_with_local_prefill_a_simple_policy_uses_it_for_what_no_prefill_worker_can_hold() -> None:
    config = msgspec.structs.replace(PLAIN, local_prefill="auto")
    it = Scenario(worker_info("p0", num_blocks=5), worker_info("d0", num_blocks=64), config=config)
    assert it.submit(routed_request("r0", 64, max_tokens=4)) == ["dispatch p0 r0/0 -> d0"]
    assert it.submit(routed_request("r1", 94, max_tokens=4)) == ["dispatch d0 r1/0 alone"]


def test_a_new_request_is_not_placed_there() -> None:
    it = small_prefill()
    assert it.submit(routed_request("r1", 94, max_tokens=4)) == ["fail r1 ContextLengthError"]
