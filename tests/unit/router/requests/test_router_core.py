"""The core's answers, word for word: the ways of a request when nothing breaks, and what is refused."""

from collections.abc import Collection

import msgspec
import pytest

from disagg.proto.block_hash import tenant_tag
from disagg.proto.ids import WorkerId
from disagg.proto.messages import BlocksStored, Load, StepUpdate
from disagg.router.config import RouterConfig
from disagg.router.requests.attempts import Blocked, MayHave
from disagg.router.requests.events import Dispatch
from disagg.router.requests.record import RequestRecord
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
    worker_report,
)


@pytest.mark.parametrize("in_session", [False, True])
def test_workers_know_that_a_request_is_of_a_session(in_session: bool) -> None:
    it = Scenario("p0", "d0")
    it.submit(msgspec.structs.replace(routed_request("r0"), in_session=in_session))
    assert it.dispatched["r0/0"].message.spec.in_session == in_session


def test_a_request_over_a_pair() -> None:
    it = Scenario("p0", "d0")
    it.now = 1.0
    assert it.submit(routed_request("r0", 64, max_tokens=4)) == ["dispatch p0 r0/0 -> d0"]
    # P: 64 tokens, 5 blocks. D: 68 tokens are 5 blocks.
    assert it.core.holdings() == {"requests": 1, "queued": 0, "admitted": 0, "tokens": 64, "sequences": 2, "blocks": 10}
    it.now = 2.0
    assert it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0, 16)) == ["emit r0 [7]"]
    assert it.core.holdings() == {"requests": 1, "queued": 0, "admitted": 0, "tokens": 0, "sequences": 2, "blocks": 10}
    it.now = 3.0
    update = [handed_over_update("r0", 0, kv_bytes=4096, cached_tokens=32), tokens_update("r0", 0, 0, 7, 8)]
    assert it.update("d0", *update) == ["emit r0 [8]"]
    assert it.core.holdings() == {"requests": 1, "queued": 0, "admitted": 0, "tokens": 0, "sequences": 1, "blocks": 5}
    it.now = 4.0
    last = [tokens_update("r0", 0, 2, 9), end_update("r0", 0, "stop")]
    assert it.update("d0", *last) == ["emit r0 [9]", "finish r0 stop 3 cached=16"]
    assert it.core.holdings() == EMPTY
    assert it.core.next_wakeup() is None
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert (trace.prefill_worker, trace.decode_worker, trace.attempts, trace.transport) == ("p0", "d0", 1, "fake")
    assert (trace.kv_bytes, trace.prefill_cached_tokens, trace.decode_cached_tokens) == (4096, 16, 32)
    stages = [("tokenize", 1.0), ("route", 1.0), ("first_token", 2.0), ("kv_transfer", 3.0), ("end", 4.0)]
    assert list(trace.stages.items()) == stages


def test_the_dispatch_carries_all_that_a_worker_needs() -> None:
    it = Scenario("p0", worker_info("d0", incarnation="abc", address="10.0.0.7:99"))
    it.now = 1.0
    request = routed_request("r0", 40, max_tokens=9, stop=[3], deadline=6.0, priority=2)
    it.submit(request)
    message = it.dispatched["r0/0"].message
    spec = message.spec
    assert message.decode_peer is not None
    assert msgspec.to_builtins(message.decode_peer) == {
        "worker_id": "d0",
        "incarnation": "abc",
        "address": "10.0.0.7:99",
    }
    assert (spec.gateway_id, spec.prompt_token_ids, spec.emitted_token_ids) == ("g0", request.prompt_token_ids, ())
    assert (spec.block_hashes, spec.root_hash, spec.sampling) == (
        request.block_hashes,
        request.root_hash,
        request.sampling,
    )
    assert (spec.priority, spec.timeout_s) == (2, 5.0)


def test_decode_may_overtake_prefill() -> None:
    """D's whole answer arrives before P's token 0 and before P's word that it is done."""
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 0, 7, 8)) == ["emit r0 [7, 8]"]
    assert it.core.holdings() == {"requests": 1, "queued": 0, "admitted": 0, "tokens": 0, "sequences": 1, "blocks": 5}
    assert it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0, 48)) == []
    assert it.update("d0", end_update("r0", 0, "length")) == ["finish r0 length 2 cached=48"]
    assert it.core.counters["duplicate_tokens"] == 1
    assert it.core.counters["contradicting_tokens"] == 0


def test_words_that_come_after_the_end_are_dropped() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 0, 7), end_update("r0", 0, "stop"))
    assert it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0)) == []
    assert it.update("d0", end_update("r0", 0, "stop")) == []
    assert it.core.counters["unknown_request"] == 3
    assert it.core.holdings() == EMPTY


def test_d_tokens_wait_for_token_0_of_p() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 1, 8)) == []
    assert it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0)) == ["emit r0 [7, 8]"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_answer_of_one_token_ends_on_p(reason: str) -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    end = end_update("r0", 0, "stop" if reason == "stop" else "length", cached_tokens=32)
    assert it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0, 32), end) == [
        "emit r0 [7]",
        "cancel d0 r0/0",
        f"finish r0 {reason} 1 cached=32",
    ]
    assert it.core.holdings() == EMPTY
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert (trace.prefill_worker, trace.decode_worker) == ("p0", None)


def test_prefill_done_counts_even_if_the_end_says_nothing_of_the_cache() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    updates = [tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0, 32), end_update("r0", 0, "stop")]
    assert it.update("p0", *updates)[-1] == "finish r0 stop 1 cached=32"


def test_local_prefill_on_d() -> None:
    it = Scenario("p0", "d0", config=RouterConfig())
    request = routed_request("r0", 64)
    it.holds("d0", request, 2)
    assert it.submit(request) == ["dispatch d0 r0/0 alone"]
    assert it.core.holdings() == {"requests": 1, "queued": 0, "admitted": 0, "tokens": 32, "sequences": 1, "blocks": 5}
    assert it.update("d0", tokens_update("r0", 0, 0, 7)) == ["emit r0 [7]"]
    assert it.core.holdings() == {"requests": 1, "queued": 0, "admitted": 0, "tokens": 0, "sequences": 1, "blocks": 5}
    assert it.update("d0", end_update("r0", 0, "stop", cached_tokens=32)) == ["finish r0 stop 1 cached=32"]
    trace = it.core.trace(request.request_id)
    assert trace is not None
    assert (trace.prefill_worker, trace.decode_worker, trace.decode_cached_tokens) == (None, "d0", 32)


def test_colocated_workers_do_all_of_it() -> None:
    it = Scenario("c0", "c1")
    assert it.submit("r0") == ["dispatch c0 r0/0 alone"]
    assert it.submit("r1") == ["dispatch c1 r1/0 alone"]
    assert it.update("c0", prefilled_update("r0", 0, 16)) == []
    assert it.core.holdings()["tokens"] == 64
    updates = [tokens_update("r0", 0, 0, 7), end_update("r0", 0, "length")]
    assert it.update("c0", *updates) == ["emit r0 [7]", "finish r0 length 1 cached=16"]


def test_a_prefix_brings_a_request_back_to_the_workers_that_have_it() -> None:
    it = Scenario("p0", "p1", "d0", "d1")
    request = routed_request("r0", 64)
    it.holds("p1", request, 4)
    it.holds("d1", request, 4)
    assert it.submit(request) == ["dispatch p1 r0/0 -> d1"]
    assert it.core.holdings()["tokens"] == 16


# ---------------------------------------------------------------- the queue


def test_requests_wait_for_a_prefill_slot_and_start_when_one_opens() -> None:
    it = Scenario(worker_info("p0", token_budget=32), "d0")
    it.start("r0", "p0", "d0")
    assert it.submit("r1") == []
    assert it.submit("r2") == []
    assert it.core.view(it.now).num_queued == 2
    assert it.core.view(it.now).num_running == 1
    assert it.update("p0", prefilled_update("r0", 0)) == ["dispatch p0 r1/0 -> d0"]
    assert it.update("p0", prefilled_update("r1", 0)) == ["dispatch p0 r2/0 -> d0"]


def test_requests_wait_for_blocks_on_d() -> None:
    it = Scenario("p0", worker_info("d0", num_blocks=9))
    it.start("r0", "p0", "d0")
    assert it.submit("r1") == []
    it.hand_over("r0", "p0", "d0", 7)
    assert it.update("d0", end_update("r0", 0, "stop")) == ["finish r0 stop 1 cached=0", "dispatch p0 r1/0 -> d0"]


def test_what_a_worker_reports_as_held_counts_too() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    assert it.report(worker_report("d0", 0, load=Load(blocks_active=50, blocks_reserved=10))) == []
    assert it.submit("r1") == []
    assert it.report(worker_report("d0", 1, load=Load(blocks_active=50))) == ["dispatch p0 r1/0 -> d0"]


def test_a_head_that_waits_for_room_can_be_given_room_before_all_others() -> None:
    it = Scenario("p0", worker_info("d0", num_blocks=24), config=msgspec.structs.replace(PLAIN, bypass_s=0.0))
    it.start("r0", "p0", "d0")
    assert it.submit(routed_request("big", 320)) == []
    assert it.submit(routed_request("small", 16)) == []
    assert it.cancel("big") == ["fail big RequestCancelledError", "dispatch p0 small/0 -> d0"]


def test_priority_then_deadline_then_arrival() -> None:
    it = Scenario(worker_info("p0", token_budget=32), "d0")
    it.start("r0", "p0", "d0")
    for request in (
        routed_request("last"),
        routed_request("third", deadline=9.0),
        routed_request("second", deadline=8.0),
        routed_request("first", priority=1),
    ):
        assert it.submit(request) == []
    order = []
    running = "r0"
    for _ in range(4):
        (line,) = it.update("p0", prefilled_update(running, 0))
        running = line.split()[2].split("/")[0]
        order.append(running)
    assert order == ["first", "second", "third", "last"]


def test_only_what_may_have_made_room_looks_at_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scenario("p0", "d0")
    looks: list[str] = []
    try_start = it.core._attempts.try_start

    def counting(
        record: RequestRecord, now: float, queued_ms: float, kept: Collection[WorkerId], may_have: MayHave
    ) -> Dispatch | Blocked:
        looks.append(record.request_id)
        return try_start(record, now, queued_ms, kept, may_have)

    monkeypatch.setattr(it.core._attempts, "try_start", counting)
    it.start(routed_request("r0", 300), "p0", "d0")
    assert it.submit("r1") == []
    it.submit("r2")
    assert looks == ["r0", "r1"]
    it.update("p0", tokens_update("r0", 0, 0, 7))
    it.update("d0", StepUpdate())
    assert looks == ["r0", "r1"]
    it.update("p0", prefilled_update("r0", 0))
    assert looks == ["r0", "r1", "r1", "r2"]


# ---------------------------------------------------------------- refused at once


def test_without_workers_a_request_is_refused() -> None:
    assert Scenario().submit("r0") == ["fail r0 UnavailableError no_decode_capacity"]
    assert Scenario("p0").submit("r0") == ["fail r0 UnavailableError no_decode_capacity"]
    assert Scenario("d0").submit("r0") == ["fail r0 UnavailableError no_prefill_capacity"]
    foreign = worker_info("d0", fingerprint="other")
    assert Scenario("p0", foreign).submit("r0") == ["fail r0 UnavailableError no_decode_capacity"]


def test_local_prefill_needs_no_prefill_worker() -> None:
    auto = msgspec.structs.replace(PLAIN, local_prefill="auto")
    it = Scenario(worker_info("d0", max_model_len=100), config=auto)
    assert it.submit(routed_request("r0", 99)) == ["dispatch d0 r0/0 alone"]
    assert it.submit(routed_request("r1", 100)) == ["fail r1 ContextLengthError"]
    assert Scenario("d0").submit(routed_request("r0", 1)) == ["fail r0 UnavailableError no_prefill_capacity"]
    assert Scenario("p0", config=auto).submit(routed_request("r0", 1)) == [
        "fail r0 UnavailableError no_decode_capacity"
    ]


def test_what_can_never_fit_is_refused() -> None:
    it = Scenario(worker_info("p0", max_model_len=100), worker_info("d0", num_blocks=5))
    assert it.submit(routed_request("r0", 79)) == ["dispatch p0 r0/0 -> d0"]
    assert it.submit(routed_request("r1", 80)) == ["fail r1 ContextLengthError"]
    assert str(it.errors["r1"]) == (
        "This model's maximum context length is 80 tokens. However, the prompt is too long: 80 tokens > 79 maximum"
    )


def test_a_deadline_that_has_passed_is_refused() -> None:
    it = Scenario("p0", "d0")
    it.now = 5.0
    assert it.submit(routed_request("r0", deadline=5.0)) == ["fail r0 DeadlineError"]
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert (trace.outcome, trace.attempts, trace.marks) == ("timeout", 0, [])


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    config = msgspec.structs.replace(PLAIN, max_queued=2, retry_after_s=3.0)
    it = Scenario(worker_info("p0", token_budget=32), "d0", config=config)
    it.start("r0", "p0", "d0")
    assert [it.submit(name) for name in ("r1", "r2")] == [[], []]
    assert it.submit("r3") == ["fail r3 OverloadedError"]
    assert vars(it.errors["r3"])["retry_after_s"] == 3.0
    assert it.cancel("r1") == ["fail r1 RequestCancelledError"]
    assert it.submit("r4") == []


def test_a_request_id_in_use_is_a_fault_of_the_gateway() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    with pytest.raises(ValueError, match="request id r0 is in use"):
        it.submit("r0")
    assert it.core.check_integrity() == []


# ---------------------------------------------------------------- reports and traces


def test_a_gap_in_the_reports_asks_for_a_new_stream() -> None:
    it = Scenario("p0", "d0")
    request = routed_request("r0")
    it.holds("d0", request, 4)
    assert it.report(worker_report("d0", 2, BlocksStored(hashes=()))) == ["watch d0"]
    assert it.report(worker_report("d0", 3)) == []
    assert it.core.counters["report_gap"] == 1


def test_the_view_shows_what_workers_report() -> None:
    it = Scenario("p0", "d0")
    assert it.report(worker_report("d0", 0, load=Load(num_running=3))) == []
    view = it.core.view(it.now)
    assert [(w.info.worker_id, w.load.num_running) for w in view.workers] == [("d0", 3), ("p0", 0)]
    assert it.report(worker_report("d0", 1, load=Load(num_running=9), incarnation="old")) == []
    assert it.core.view(it.now).workers[0].load.num_running == 3
    assert it.core.counters["stale_incarnation"] == 1


def test_the_last_traces_are_kept() -> None:
    it = Scenario("c0", config=RouterConfig(num_traces=2))
    for name in ("r0", "r1", "r2"):
        it.submit(name)
        it.update("c0", tokens_update(name, 0, 0, 7), end_update(name, 0, "stop"))
    kept = [it.core.trace(routed_request(name).request_id) for name in ("r0", "r1", "r2")]
    assert [trace.request_id if trace else None for trace in kept] == [None, "r1", "r2"]


def test_workers_get_a_tag_of_the_tenant_and_not_its_name() -> None:
    """The same tag whatever the salt of the prefix, and in every attempt."""
    it = Scenario("p0", "d0")
    it.start(msgspec.structs.replace(routed_request("r0"), tenant="acme"), "p0", "d0")
    it.update("p0", end_update("r0", 0, "failed"))
    it.at(it.now + 1.0)
    tags = {it.dispatched[attempt].message.spec.tenant_tag for attempt in ("r0/0", "r0/1")}
    assert tags == {tenant_tag("acme")}
    it.start("r1", "p0", "d0")
    assert it.dispatched["r1/0"].message.spec.tenant_tag == b""
