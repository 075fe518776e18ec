"""What the router notes of requests: timelines, sums, targets met and missed."""

from __future__ import annotations

import logging

import msgspec
import pytest

from disagg.proto.ids import RequestId, WorkerId
from disagg.proto.messages import PrefillDone, StepUpdate
from disagg.router.api import RUNNING, ClusterView, RequestTrace, RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.requests.events import CancelRequest
from disagg.router.telemetry.spans import spans_of
from disagg.router.telemetry.telemetry import met_targets
from disagg.router.telemetry.traces import TraceRing
from tests.support.router import (
    Scenario,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
)


def view(it: Scenario) -> ClusterView:
    return it.core.view(it.now)


def trace_of(it: Scenario, name: str) -> RequestTrace:
    trace = it.core.trace(RequestId(name))
    assert trace is not None
    return trace


def spans(it: Scenario, name: str) -> list[tuple[str, str | None, float, float | None]]:
    return [tuple(span) for span in spans_of(trace_of(it, name))]  # type: ignore[misc]


def aimed(name: str, ttft_s: float | None = None, tpot_s: float | None = None, max_tokens: int = 4) -> RoutedRequest:
    request = routed_request(name, 64, max_tokens=max_tokens)
    return msgspec.structs.replace(request, ttft_slo_s=ttft_s, tpot_slo_s=tpot_s)


def timed(update: StepUpdate, kind: str, **durations: float) -> StepUpdate:
    """The update with what its worker measured."""
    (message,) = getattr(update, kind)
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    changed = {"prefilled": update.prefilled, "handed_over": update.handed_over, "ends": update.ends}
    return StepUpdate(**{**changed, kind: (type(message)(**{**fields, **durations}),)})


def answer(it: Scenario, request: RoutedRequest, *times: float) -> None:
    """Submitted now, tokens at these times, on d0 alone; it ends with the last one."""
    name = request.request_id
    it.submit(request)
    for index, moment in enumerate(times):
        it.now = moment
        it.update("d0", tokens_update(name, 0, index, 7))
    it.update("d0", end_update(name, 0, "length"))


def alone(**config: float) -> Scenario:
    """One worker with both roles."""
    return Scenario(worker_info("d0", roles=("prefill", "decode")), config=RouterConfig(admission=False, **config))  # type: ignore[arg-type]


# ---------------------------------------------------------------- timelines


def test_the_spans_of_a_request_over_a_pair() -> None:
    it = Scenario("p0", "d0")
    it.now = 10.0
    it.submit(routed_request("r0", 64, max_tokens=4), arrival=9.5)
    assert spans(it, "r0") == [
        ("tokenize", None, 9.5, 10.0),
        ("route", None, 10.0, 10.0),
        ("prefill", "p0", 10.0, None),
    ]
    it.now = 12.0
    prefilled = timed(prefilled_update("r0", 0), "prefilled", alloc_wait_s=0.25, queue_s=0.5)
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled)
    it.now = 13.0
    it.update("d0", timed(handed_over_update("r0", 0), "handed_over", transfer_s=2.5))
    it.now = 14.0
    ended = timed(end_update("r0", 0, "length"), "ends", queue_s=0.125)
    it.update("d0", tokens_update("r0", 0, 1, 8, 9, 10), ended)
    trace_of(it, "r0").detokenize_s = 0.5
    assert spans(it, "r0") == [
        ("tokenize", None, 9.5, 10.0),
        ("route", None, 10.0, 10.0),
        ("kv_alloc_wait", "d0", 10.0, 10.25),
        ("prefill_queue", "p0", 10.25, 10.75),
        ("prefill", "p0", 10.75, 12.0),
        ("kv_transfer", "d0", 10.5, 13.0),
        ("kv_transfer_exposed", "d0", 12.0, 13.0),
        ("decode_queue", "d0", 13.0, 13.125),
        ("decode", "d0", 13.125, 14.0),
        ("detokenize", None, 13.5, 14.0),
    ]
    stages = {stage: found.total for stage, found in view(it).stats.stages.items()}
    assert stages == {
        "tokenize_queue": 0.0,
        "tokenize": 0.5,
        "route": 0.0,
        "kv_alloc_wait": 0.25,
        "prefill_queue": 0.5,
        "prefill": 1.25,
        "kv_transfer": 2.5,
        "kv_transfer_exposed": 1.0,
        "decode_queue": 0.125,
        "decode": 0.875,
        "migration": 0.0,
        "detokenize": 0.0,  # The text of the last tokens is made after the end.
    }


def test_the_wait_for_the_tokenizer_is_a_span_of_its_own() -> None:
    it = Scenario("p0", "d0")
    it.now = 10.0
    it.submit(msgspec.structs.replace(routed_request("r0", 64), tokenize_queue_s=0.375), arrival=9.5)
    assert spans(it, "r0")[:2] == [("tokenize_queue", None, 9.5, 9.875), ("tokenize", None, 9.875, 10.0)]


def test_what_a_worker_measured_never_reaches_beyond_what_the_gateway_saw() -> None:
    it = Scenario("p0", "d0")
    it.submit(routed_request("r0", 64))
    it.now = 1.0
    it.update("p0", timed(prefilled_update("r0", 0), "prefilled", alloc_wait_s=0.75, queue_s=9.0))
    it.update("d0", timed(handed_over_update("r0", 0), "handed_over", transfer_s=9.0))
    assert spans(it, "r0")[2:] == [
        ("kv_alloc_wait", "d0", 0.0, 0.75),
        ("prefill_queue", "p0", 0.75, 1.0),
        ("prefill", "p0", 1.0, 1.0),
        ("kv_transfer", "d0", 0.0, 1.0),
        ("kv_transfer_exposed", "d0", 1.0, 1.0),
        ("decode", "d0", 1.0, None),
    ]


def test_a_prompt_was_computed_when_its_decode_worker_says_first_that_it_has_the_sequence() -> None:
    """The messages of two workers overtake each other; the prefill does not last until the end of the answer."""
    it = Scenario("p0", "d0")
    it.submit(routed_request("r0", 64))
    it.now = 1.0
    it.update("d0", timed(handed_over_update("r0", 0), "handed_over", transfer_s=0.5))
    it.now = 1.5
    it.update("p0", timed(prefilled_update("r0", 0), "prefilled", alloc_wait_s=0.25, queue_s=0.25))
    it.now = 5.0
    assert spans(it, "r0")[2:] == [
        ("kv_alloc_wait", "d0", 0.0, 0.25),
        ("prefill_queue", "p0", 0.25, 0.5),
        ("prefill", "p0", 0.5, 1.0),
        ("kv_transfer", "d0", 0.5, 1.0),
        ("kv_transfer_exposed", "d0", 1.0, 1.0),
        ("decode", "d0", 1.0, None),
    ]


def test_the_spans_of_a_lost_attempt_and_of_the_next_one() -> None:
    it = Scenario("p0", "d0", "d1")
    it.submit(routed_request("r0", 64))
    it.now = 1.0
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0))
    it.now = 3.0
    assert it.lost("d0") == ["cancel p0 r0/0", "dispatch p0 r0/1 -> d1"]
    it.now = 4.0
    it.cancel("r0")
    assert spans(it, "r0") == [
        ("tokenize", None, 0.0, 0.0),
        ("route", None, 0.0, 0.0),
        ("kv_alloc_wait", "d0", 0.0, 0.0),
        ("prefill_queue", "p0", 0.0, 0.0),
        ("prefill", "p0", 0.0, 1.0),
        ("kv_transfer_exposed", "d0", 1.0, 3.0),
        ("route", None, 3.0, 3.0),
        ("prefill", "p0", 3.0, 4.0),
    ]
    assert trace_of(it, "r0").outcome == "cancelled"


def test_a_request_that_waits_is_being_routed() -> None:
    it = Scenario("p0", "d0", config=RouterConfig(policy="least_loaded", local_prefill="never", prefill_chunks=1))
    it.start(routed_request("r0", 128), "p0", "d0")
    it.submit(routed_request("r1", 64))
    it.now = 2.0
    assert spans(it, "r1") == [("tokenize", None, 0.0, 0.0), ("route", None, 0.0, None)]
    assert view(it).stages == {"queued": 1, "prefill": 1, "transfer": 0, "decode": 0}
    assert (view(it).num_queued, view(it).num_running) == (1, 1)
    it.cancel("r1")
    assert spans(it, "r1") == [("tokenize", None, 0.0, 0.0), ("route", None, 0.0, 2.0)]


def test_the_spans_of_a_worker_alone() -> None:
    it = alone()
    it.submit(routed_request("r0", 64))
    it.now = 2.0
    it.update("d0", tokens_update("r0", 0, 0, 7))
    it.now = 5.0
    it.update("d0", tokens_update("r0", 0, 1, 8, 9, 10), timed(end_update("r0", 0, "length"), "ends", queue_s=0.5))
    assert spans(it, "r0")[2:] == [
        ("prefill_queue", "d0", 0.0, 0.5),
        ("prefill", "d0", 0.5, 2.0),
        ("decode", "d0", 2.0, 5.0),
    ]


def test_stages_follow_the_attempt() -> None:
    it = Scenario("p0", "d0")
    it.submit(routed_request("r0", 64))
    seen = [view(it).stages]
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0))
    seen.append(view(it).stages)
    it.update("d0", handed_over_update("r0", 0))
    seen.append(view(it).stages)
    assert [[stage for stage, count in stages.items() if count] for stages in seen] == [
        ["prefill"],
        ["transfer"],
        ["decode"],
    ]


def test_the_longest_gap_is_noted() -> None:
    it = alone()
    answer(it, routed_request("r0", 64), 1.0, 1.5, 4.0, 4.25)
    assert trace_of(it, "r0").max_itl_s == 2.5
    itl = view(it).stats.itl
    assert (itl.num_observed, itl.total) == (3, 3.25)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    it = alone()
    it.submit(routed_request("r0", 64, max_tokens=8))
    it.now = 1.0
    it.update("d0", tokens_update("r0", 0, 0, 5, 6, 7))
    it.now = 3.0
    it.update("d0", tokens_update("r0", 0, 3, 8, 9))
    stats = view(it).stats
    assert (stats.itl.counts[0], stats.itl.num_observed, stats.itl.total) == (3, 4, 2.0)
    assert (stats.ttft["colocated"].num_observed, stats.ttft["colocated"].total) == (1, 1.0)
    assert stats.num_output_tokens == 5


def test_the_ring_keeps_the_latest() -> None:
    ring = TraceRing(2)
    traces = [RequestTrace(request_id=RequestId(f"r{i}"), arrival=float(i)) for i in range(5)]
    for trace in traces:
        ring.begin(trace)
    for trace in (traces[3], traces[0], traces[2]):
        ring.end(trace, 9.0)
    assert ring.get(RequestId("r3")) is None
    assert [trace.request_id for trace in ring.latest(10)] == ["r4", "r2", "r1", "r0"]
    assert [trace.request_id for trace in ring.latest(2)] == ["r4", "r2"]
    assert ring.latest(0) == []


def test_a_tenant_with_many_requests_does_not_push_out_those_of_others() -> None:
    ring, lives = TraceRing(6), iter(range(1000))

    def end(tenant: str) -> str:
        index = next(lives)
        trace = RequestTrace(request_id=RequestId(f"r{index}"), arrival=float(index), tenant=tenant)
        ring.end(trace, 9.0)
        return trace.request_id

    rare = [end("rare"), end("rare")]
    busy = [end("busy") for _ in range(100)]
    assert [trace.request_id for trace in ring.latest(10)] == [*reversed(busy[-4:]), *reversed(rare)]
    others = [end(f"t{i}") for i in range(4)]
    assert [trace.request_id for trace in ring.latest(10)] == [*reversed(others), busy[-1], rare[-1]]
    more = [end(f"u{i}") for i in range(100)]
    assert [trace.request_id for trace in ring.latest(10)] == [*reversed(more[-6:])]
    assert (ring.get(RequestId(more[-1])) is not None, ring.get(RequestId(rare[-1]))) == (True, None)


def test_recent_requests_come_latest_first_refused_ones_too() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    it.now = 1.0
    it.submit(routed_request("r1", deadline=0.5))
    assert [(trace.request_id, trace.outcome) for trace in it.core.recent(9)] == [("r1", "timeout"), ("r0", "running")]


def test_a_trace_knows_whose_the_request_is_and_where_it_came_from() -> None:
    it = Scenario("p0", "d0")
    it.submit(msgspec.structs.replace(routed_request("r0", 64), tenant="acme", trace_parent="00-1-2-01"))
    trace = trace_of(it, "r0")
    assert (trace.tenant, trace.trace_parent, trace.num_prompt_tokens) == ("acme", "00-1-2-01", 64)


def test_a_line_for_each_request_says_nothing_of_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    it = alone()
    with caplog.at_level(logging.DEBUG, "disagg.router.telemetry.telemetry"):
        answer(
            it,
            msgspec.structs.replace(routed_request("r0", 64), trace_parent=f"00-{'a' * 32}-{'b' * 16}-01"),
            0.5,
        )
    (record,) = caplog.records
    assert record.getMessage() == "r0: length after 500.0 ms, 64 + 1 tokens, None -> d0"
    assert (vars(record)["request_id"], vars(record)["trace_id"]) == ("r0", "a" * 32)


# ---------------------------------------------------------------- sums


def test_an_answered_request_is_summed_up() -> None:
    it = Scenario("p0", "d0")
    it.submit(routed_request("r0", 64, max_tokens=2))
    it.now = 1.0
    it.update("p0", tokens_update("r0", 0, 0, 7), prefilled_update("r0", 0, 16))
    it.now = 2.0
    it.update("d0", handed_over_update("r0", 0), tokens_update("r0", 0, 0, 7, 8), end_update("r0", 0, "length"))
    stats = view(it).stats
    assert stats.outcomes == {"length": 1}
    assert (stats.prompt_tokens.total, stats.cached_tokens, stats.output_tokens.total) == (64, 16, 2)
    assert (stats.ttft["pd"].total, stats.e2e.total) == (1.0, 2.0)
    times = (stats.queue_time, stats.prefill_time, stats.decode_time)
    assert [(each.num_observed, each.total) for each in times] == [(1, 0.0), (1, 1.0), (1, 1.0)]
    assert stats.decisions == {"pair": 1}
    assert stats.slos == {}


def test_an_answer_cut_by_a_stop_string_is_an_answer() -> None:
    it = alone()
    it.submit(routed_request("r0", 64, max_tokens=100))
    it.update("d0", tokens_update("r0", 0, 0, 7, 8, 9))
    assert it.handle(CancelRequest(RequestId("r0"), num_answered=2))[-1] == "fail r0 RequestCancelledError"
    trace, stats = trace_of(it, "r0"), view(it).stats
    assert (trace.outcome, trace.num_output_tokens) == ("stop", 2)
    assert stats.outcomes == {"stop": 1}
    assert (stats.output_tokens.total, stats.num_output_tokens) == (2, 3)


def test_a_probe_is_traced_and_not_counted() -> None:
    it = Scenario("p0", "d0")
    it.submit(msgspec.structs.replace(aimed("r0", 1.0), pair=(WorkerId("p0"), WorkerId("d0"))))
    it.update("p0", tokens_update("r0", 0, 0, 7), end_update("r0", 0, "stop"))
    assert trace_of(it, "r0").outcome == "stop"
    assert "first_token" in trace_of(it, "r0").stages
    stats = view(it).stats
    assert (stats.outcomes, stats.slos, stats.num_output_tokens) == ({}, {}, 0)
    assert stats.decisions == {"probe": 1}


def test_decisions_are_counted() -> None:
    config = RouterConfig(policy="least_loaded", local_prefill="auto", prefill_chunks=1)
    it = Scenario("p0", "d0", config=config)
    it.start(routed_request("r0", 128), "p0", "d0")
    it.submit(routed_request("r1", 64))
    assert view(it).stats.decisions == {"pair": 1, "no_room": 1}
    assert it.lost("p0") == ["cancel d0 r0/0", "dispatch d0 r0/1 alone"]
    assert view(it).stats.decisions == {"pair": 1, "no_room": 1, "local_fallback": 1}


def test_rates_are_of_the_last_ten_seconds() -> None:
    it = alone()
    for second in range(20):
        it.now = float(second)
        answer(it, routed_request(f"r{second}", 64), it.now, it.now + 0.25)
    it.now = 20.0
    # Of the seconds 11 to 19, all of which are over.
    assert view(it).rates == (1.0, 2.0)
    it.now = 29.0
    assert view(it).rates == (0.0, 0.0)


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "times", "met"),
    [
        (1.0, None, (1.0, 9.0), {"ttft": True, "both": True}),
        (1.0, None, (1.25,), {"ttft": False, "both": False}),
        (None, 0.5, (5.0, 5.5, 6.0), {"tpot": True, "both": True}),
        (None, 0.5, (5.0, 5.25, 6.25), {"tpot": False, "both": False}),
        (1.0, 0.5, (0.5, 1.0), {"ttft": True, "tpot": True, "both": True}),
        (1.0, 0.5, (0.5, 1.5), {"ttft": True, "tpot": False, "both": False}),
        (1.0, 0.5, (1.5, 2.0), {"ttft": False, "tpot": True, "both": False}),
        (None, 0.5, (5.0,), {"tpot": True, "both": True}),
        (None, None, (5.0,), {}),
    ],
)
def test_targets_of_an_answer(
    ttft_s: float | None, tpot_s: float | None, times: tuple[float, ...], met: dict[str, bool]
) -> None:
    it = alone()
    answer(it, aimed("r0", ttft_s, tpot_s), *times)
    assert view(it).stats.slos == dict.fromkeys(met.items(), 1)
    counts = {slo: (int(met[slo]), 1) if slo in met else (0, 0) for slo in ("ttft", "tpot", "both")}
    assert view(it).slos == counts


def test_configured_targets_count_for_requests_without_their_own() -> None:
    it = alone(ttft_slo_s=1.0)
    answer(it, aimed("r0"), 0.5)
    it.now = 10.0
    answer(it, aimed("r1", ttft_s=0.25), 10.5)
    assert view(it).stats.slos == {("ttft", True): 1, ("both", True): 1, ("ttft", False): 1, ("both", False): 1}


def test_a_failed_request_missed_all_of_its_targets() -> None:
    it = alone()
    it.submit(msgspec.structs.replace(aimed("r0", 5.0, 5.0), deadline=2.0))
    it.now = 1.0
    it.update("d0", tokens_update("r0", 0, 0, 7))
    it.at(2.0)
    assert view(it).stats.slos == {("ttft", False): 1, ("tpot", False): 1, ("both", False): 1}


def test_a_refused_request_missed_its_targets() -> None:
    it = Scenario("p0", "d0")
    it.now = 1.0
    it.submit(msgspec.structs.replace(aimed("r0", 5.0), deadline=1.0))
    assert view(it).stats.slos == {("ttft", False): 1, ("both", False): 1}
    assert view(it).stats.outcomes == {"timeout": 1}


@pytest.mark.parametrize(
    ("tokens_at", "left_at", "met"),
    [
        ((), 0.5, {}),
        ((), 1.5, {"ttft": False, "both": False}),
        ((0.5,), 9.0, {}),
        ((0.5, 1.0), 1.0, {}),
        ((0.5, 3.5), 4.0, {"tpot": False, "both": False}),
    ],
)
def test_a_client_that_leaves_missed_what_was_missed_by_then(
    tokens_at: tuple[float, ...], left_at: float, met: dict[str, bool]
) -> None:
    it = alone()
    it.submit(aimed("r0", 1.0, 2.0))
    for index, moment in enumerate(tokens_at):
        it.now = moment
        it.update("d0", tokens_update("r0", 0, index, 7))
    it.now = left_at
    it.cancel("r0")
    assert view(it).stats.slos == dict.fromkeys(met.items(), 1)


def test_attainment_is_that_of_the_last_minute() -> None:
    it = alone()
    answer(it, aimed("r0", 1.0), 0.5)
    it.now = 30.0
    answer(it, aimed("r1", 1.0), 35.0)
    assert view(it).slos["ttft"] == (1, 2)
    it.now = 61.0
    assert view(it).slos["ttft"] == (0, 1)
    it.now = 96.0
    assert view(it).slos["ttft"] == (0, 0)


def test_prefill_done_of_a_worker_alone_has_no_wait_for_room() -> None:
    it = alone()
    it.submit(routed_request("r0", 64))
    it.now = 1.0
    done = PrefillDone(request_id=RequestId("r0"), attempt=0, cached_tokens=0, alloc_wait_s=0.5, queue_s=0.25)
    it.update("d0", StepUpdate(prefilled=(done,)))
    (marks,) = trace_of(it, "r0").marks
    assert (marks.path, marks.alloc_wait_s, marks.queue_s, marks.computed) == ("colocated", None, 0.25, 1.0)


@pytest.mark.parametrize(
    ("outcome", "first_at", "met"),
    [
        ("length", 1.5, True),
        ("stop", 2.5, False),
        (RUNNING, 1.5, None),
        ("cancelled", 1.5, None),
        ("slow_down", None, False),
    ],
)
def test_whether_all_targets_were_met(outcome: str, first_at: float | None, met: bool | None) -> None:
    stages = {} if first_at is None else {"first_token": first_at}
    trace = RequestTrace(request_id=RequestId("r"), arrival=1.0, stages=stages, outcome=outcome, ttft_slo_s=1.0)
    assert met_targets(trace) is met
    trace.ttft_slo_s = None
    assert met_targets(trace) is None


def test_lines_of_batches_are_none_that_met_their_targets() -> None:
    it = alone(ttft_slo_s=1.0)
    answer(it, msgspec.structs.replace(aimed("line", 9e9), priority=-1), 0.5)
    assert trace_of(it, "line").outcome == "length"
    assert (view(it).stats.slos, view(it).slos["both"], met_targets(trace_of(it, "line"))) == ({}, (0, 0), None)


def test_prompts_of_lines_are_counted_until_they_are_computed() -> None:
    it = Scenario("p0", "d0", config=RouterConfig(local_prefill="never", policy="least_loaded"))
    for name, priority in (("line", -1), ("other", -1), ("interactive", 0)):
        it.submit(msgspec.structs.replace(routed_request(name, 64), priority=priority))
    before = view(it).background
    assert (before.num_queued + before.num_prefill, before.prompt_tokens) == (2, 128)
    it.update("p0", tokens_update("line", 0, 0, 7), prefilled_update("line", 0))
    after = view(it).background
    assert (after.num_queued + after.num_prefill, after.prompt_tokens) == (1, 64)
