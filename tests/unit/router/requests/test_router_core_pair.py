"""An operator's probe: a request for one pair of workers. It runs there at once, or fails at once, and nobody waits
for it."""

from __future__ import annotations

import msgspec
import pytest

from disagg.proto.ids import WorkerId
from disagg.proto.messages import EndReason
from disagg.router.api import RoutedRequest
from disagg.router.config import PolicyName, RouterConfig
from tests.support.router import (
    EMPTY,
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)

WORKERS = ("p0", "p1", "d0", "d1")


def probe(prefill: str, decode: str, num_tokens: int = 64, request_id: str = "r0") -> RoutedRequest:
    request = routed_request(request_id, num_tokens, max_tokens=2)
    return msgspec.structs.replace(request, pair=(WorkerId(prefill), WorkerId(decode)))


@pytest.mark.parametrize("policy", ["joint", "prefix", "least_loaded", "round_robin", "random"])
@pytest.mark.parametrize("pair", [("p0", "d0"), ("p0", "d1"), ("p1", "d0"), ("p1", "d1")])
def test_it_goes_where_it_is_told_whatever_the_policy(policy: PolicyName, pair: tuple[str, str]) -> None:
    it = Scenario(*WORKERS, config=RouterConfig(policy=policy))
    assert it.submit(probe(*pair)) == [f"dispatch {pair[0]} r0/0 -> {pair[1]}"]


def test_it_runs_as_any_request_and_leaves_nothing() -> None:
    it = Scenario(*WORKERS)
    it.start(probe("p1", "d1"), "p1", "d1")
    assert it.update("p1", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0)) == ["emit r0 [7]"]
    assert it.update("d1", handed_over_update("r0", 0), tokens_update("r0", 0, 1, 8)) == ["emit r0 [8]"]
    assert it.update("d1", end_update("r0", 0, "length")) == ["finish r0 length 2 cached=0"]
    assert it.core.holdings() == EMPTY


def test_it_goes_past_the_queue_and_to_a_worker_without_a_slot() -> None:
    it = Scenario("p0", "d0")
    it.start(routed_request("long", 600), "p0", "d0")
    assert it.submit("waits") == []
    assert it.submit(probe("p0", "d0")) == ["dispatch p0 r0/0 -> d0"]


@pytest.mark.parametrize("pair", [("p0", "d9"), ("p9", "d0"), ("d0", "p0"), ("d0", "d1"), ("c0", "d0"), ("p0", "d2")])
def test_what_is_no_pair_fails(pair: tuple[str, str]) -> None:
    it = Scenario(*WORKERS, "c0", worker_info("d2", fingerprint="another model"))
    assert it.submit(probe(*pair)) == ["fail r0 UnavailableError no_such_pair"]
    assert it.core.holdings() == EMPTY


def test_a_draining_worker_forms_no_pair() -> None:
    it = Scenario(*WORKERS)
    assert it.drain("d0") == ["drained d0 1"]
    assert it.submit(probe("p0", "d0")) == ["fail r0 UnavailableError no_such_pair"]


def test_without_room_it_fails_and_does_not_wait() -> None:
    it = Scenario("p0", worker_info("d0", max_num_seqs=1))
    it.start("first", "p0", "d0")
    assert it.submit(probe("p0", "d0")) == ["fail r0 UnavailableError no_room"]
    assert str(it.errors["r0"]) == "d0 has no room now"
    assert it.core.holdings()["queued"] == 0


def test_a_prompt_that_never_fits_there_has_no_room() -> None:
    it = Scenario("p0", "d0", worker_info("d1", max_model_len=64))
    assert it.submit(probe("p0", "d1", 64)) == ["fail r0 UnavailableError no_room"]


def test_admission_by_predicted_ttft_is_not_for_probes() -> None:
    it = Scenario(*WORKERS, config=RouterConfig(local_prefill="never", ttft_slo_s=1e-9))
    assert it.submit(probe("p0", "d1")) == ["dispatch p0 r0/0 -> d1"]


@pytest.mark.parametrize(("reason", "code"), [("refused", "no_decode_capacity"), ("failed", "prefill_failed")])
def test_it_is_tried_once(reason: EndReason, code: str) -> None:
    it = Scenario(*WORKERS)
    it.start(probe("p0", "d0"), "p0", "d0")
    ended = it.update("p0", end_update("r0", 0, reason, detail="no"))
    assert ended == ["cancel d0 r0/0", f"fail r0 UnavailableError {code}"]
    assert it.core.holdings() == EMPTY


def test_losing_one_of_the_two_ends_it() -> None:
    it = Scenario(*WORKERS)
    it.start(probe("p0", "d0"), "p0", "d0")
    assert it.lost("d0") == ["cancel p0 r0/0", "fail r0 UnavailableError worker_lost"]
    assert it.core.holdings() == EMPTY
