"""The core's answers, word for word: targets, refusals by prediction, waiting for the right worker, explanations.

Workers take 1 ms a prompt token and 0.5 ms a decoding sequence; a step costs nothing otherwise.
"""

from itertools import pairwise

import msgspec
import pytest

from disagg.proto.errors import OverloadedError
from disagg.proto.messages import Load, StepSample, Targets, WorkerInfo
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from tests.support.placing import samples
from tests.support.router import (
    EMPTY,
    PLAIN,
    Scenario,
    end_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_info,
    worker_report,
)

SPEED = samples(base_ms=0.0, prefill_token_ms=1.0, decode_ms=0.5)
NEVER = RouterConfig(local_prefill="never")


def measured(name: str, token_budget: int = 128) -> WorkerInfo:
    return worker_info(
        name, calibration=SPEED, token_budget=token_budget, num_blocks=1024, max_num_seqs=64, max_model_len=8192
    )


def wanted(name: str, num_tokens: int, ttft_s: float | None = None, *, priority: int = 0) -> RoutedRequest:
    return msgspec.structs.replace(routed_request(name, num_tokens, priority=priority), ttft_slo_s=ttft_s)


def retry_after_s(it: Scenario, name: str) -> float:
    error = it.errors[name]
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s is not None
    return error.retry_after_s


def confirm(it: Scenario) -> None:
    """A prompt is computed, so that predictions count as confirmed for a while."""
    it.start(wanted("first", 10), "p0", "d0")
    it.update("p0", prefilled_update("first", 0))


# ---------------------------------------------------------------- admission


def test_what_would_miss_its_target_is_refused_and_told_when_to_come_back() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    it.start(wanted("r0", 200), "p0", "d0")
    # 200 ms in front, 100 of its own.
    assert it.submit(wanted("r1", 100, 0.31)) == ["dispatch p0 r1/0 -> d0"]
    assert it.submit(wanted("r2", 100, 0.31)) == ["fail r2 OverloadedError"]
    assert str(it.errors["r2"]) == "the first token is expected after 0.4 s, the target is 0.31 s"
    assert retry_after_s(it, "r2") == pytest.approx(0.09, abs=0.002)
    assert it.core.holdings()["requests"] == 2
    refused = it.core.trace(wanted("r2", 1).request_id)
    assert refused is not None
    assert (refused.outcome, refused.ttft_slo_s, refused.marks) == ("slow_down", 0.31, [])


def test_the_queue_in_front_counts_too() -> None:
    """Two P with 300 tokens each, and 400 more in the queue, all due after 0.2 s."""
    config = msgspec.structs.replace(NEVER, queue_horizon_s=0.2)
    it = Scenario(measured("p0"), measured("p1"), measured("d0"), config=config)
    for name in ("r0", "r1"):
        assert it.submit(wanted(name, 300))[0].startswith("dispatch")
    assert [it.submit(wanted(name, 200)) for name in ("r2", "r3")] == [[], []]
    # Behind them: (600 + 400) / 2 + 100 ms.
    assert it.submit(wanted("r4", 100, 0.5)) == ["fail r4 OverloadedError"]
    assert retry_after_s(it, "r4") == pytest.approx(0.1, abs=0.002)
    assert it.submit(wanted("r5", 100, 0.65)) == []
    # In front of them all: 300 + 100 ms.
    assert it.submit(wanted("r6", 100, 0.45, priority=1)) == []
    assert it.submit(wanted("r7", 100, 0.45, priority=2)) == []
    assert it.submit(wanted("r8", 100, 0.35, priority=3)) == ["fail r8 OverloadedError"]
    # Behind r7 and r6 as well: (600 + 600) / 2 + 100 ms.
    assert it.submit(wanted("r9", 100, 0.65)) == ["fail r9 OverloadedError"]


def test_a_target_that_idle_workers_would_miss_is_refused_with_the_configured_pause() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=msgspec.structs.replace(NEVER, retry_after_s=7.0))
    confirm(it)
    assert it.submit(wanted("r0", 500, 0.4)) == ["fail r0 OverloadedError"]
    assert retry_after_s(it, "r0") == 7.0


def test_a_cached_prefix_lets_a_request_in() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    request = wanted("r0", 500, 0.4)
    it.holds("p0", request, 10)
    assert it.submit(request) == ["dispatch p0 r0/0 -> d0"]


def test_time_that_passed_before_counts() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    it.now = 1.0
    assert it.submit(wanted("r0", 100, 0.11), arrival=0.95) == ["fail r0 OverloadedError"]
    assert it.submit(wanted("r0", 100, 0.16), arrival=0.95) == ["dispatch p0 r0/0 -> d0"]


@pytest.mark.parametrize(
    "config", [msgspec.structs.replace(NEVER, ttft_slo_s=0.05), msgspec.structs.replace(NEVER, ttft_slo_s=0.2)]
)
def test_the_configured_target_is_for_those_that_bring_none(config: RouterConfig) -> None:
    it = Scenario(measured("p0"), measured("d0"), config=config)
    confirm(it)
    refused = config.ttft_slo_s == 0.05
    assert it.submit(wanted("r0", 100)) == (["fail r0 OverloadedError"] if refused else ["dispatch p0 r0/0 -> d0"])
    assert it.submit(wanted("r1", 100, 9.0)) == ["dispatch p0 r1/0 -> d0"]


def test_nothing_is_refused_by_prediction_without_a_target_a_measurement_or_when_told_not_to() -> None:
    without_admission = msgspec.structs.replace(NEVER, admission=False)
    assert Scenario(measured("p0"), measured("d0"), config=without_admission).submit(wanted("r0", 100, 0.001)) == [
        "dispatch p0 r0/0 -> d0"
    ]
    unmeasured = Scenario("p0", "d0", config=NEVER)
    assert unmeasured.submit(wanted("r0", 100, 0.001)) == ["dispatch p0 r0/0 -> d0"]
    busy = Scenario(measured("p0"), measured("d0"), config=NEVER)
    busy.start(wanted("r0", 5000), "p0", "d0")
    assert busy.submit(wanted("r1", 5000)) == []


def test_a_worker_that_was_measured_only_at_work_counts_as_measured() -> None:
    it = Scenario("p0", "d0", config=NEVER)
    it.report(worker_report("p0", 0, steps=SPEED))
    confirm(it)
    assert it.submit(wanted("r0", 100, 0.001)) == ["fail r0 OverloadedError"]


# ---------------------------------------------------------------- trials


def refusals(it: Scenario, name: str, until_s: float, step_s: float = 0.5) -> list[float]:
    """The times at which one of the requests that come every `step_s` is let in; its first token is late."""
    let_in, number = [], 0
    while it.now < until_s:
        request = f"{name}{number}"
        prompt = range(1000 * number, 1000 * number + 500)
        asked = msgspec.structs.replace(routed_request(request, prompt), ttft_slo_s=0.4)
        if it.submit(asked)[0].startswith("dispatch"):
            let_in.append(it.now)
            it.now += 0.45
            it.update("p0", prefilled_update(request, 0), tokens_update(request, 0, 0, 7))
        it.now, number = it.now + step_s, number + 1
    return let_in


def test_what_no_worker_is_believed_to_do_in_time_is_tried_more_and_more_seldom() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    times = refusals(it, "r", 60.0)
    gaps = [after - before for before, after in pairwise(times)]
    assert times[0] == 0.0
    assert [round(gap) for gap in gaps] == [5, 9, 17]
    assert it.core.view(it.now).stats.decisions["trial"] == len(times)


def test_a_trial_says_of_what() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    request = wanted("r0", 500, 0.4)
    assert it.submit(request) == ["dispatch p0 r0/0 -> d0"]
    trace = it.core.trace(request.request_id)
    assert trace is not None
    assert trace.trial == "of the prediction that its first token comes after 0.5 s, which is too late"
    assert it.submit(wanted("r1", 500, 0.4)) == ["fail r1 OverloadedError"]


def test_a_target_that_nothing_can_meet_is_no_trial() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    assert it.submit(wanted("r0", 500, 0.0004)) == ["fail r0 OverloadedError"]
    assert it.submit(wanted("r1", 500, 0.0006)) == ["dispatch p0 r1/0 -> d0"]


def test_what_was_computed_lately_is_no_trial() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    confirm(it)
    it.now = 1.9
    assert it.submit(wanted("r0", 500, 0.4)) == ["fail r0 OverloadedError"]
    it.now = 2.1
    assert it.submit(wanted("r1", 500, 0.4)) == ["dispatch p0 r1/0 -> d0"]


def test_a_trial_that_ends_without_a_first_token_is_followed_by_another() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    assert it.submit(wanted("r0", 500, 0.4)) == ["dispatch p0 r0/0 -> d0"]
    it.cancel("r0")
    it.now = 3.0
    assert it.submit(wanted("r1", 500, 0.4)) == ["fail r1 OverloadedError"]
    it.now = 7.5
    assert it.submit(wanted("r2", 500, 0.4)) == ["dispatch p0 r2/0 -> d0"]


def test_a_request_that_another_worker_is_in_time_for_is_let_in() -> None:
    """The idle prefill worker is slow. The other one is not, and neither is the decode worker."""
    slow = samples(base_ms=0.0, prefill_token_ms=20.0, decode_ms=0.5)
    late = msgspec.structs.replace(measured("p0"), calibration=slow)
    for name, others, config in (("p1", ("p1", "d0"), NEVER), ("d0", ("d0",), RouterConfig())):
        it = Scenario(late, *map(measured, others), config=msgspec.structs.replace(config, policy="joint"))
        (line,) = it.submit(wanted("r0", 100, 0.5))
        assert line.split()[1] == name
        trace = it.core.trace(wanted("r0", 1).request_id)
        assert trace is not None
        assert trace.trial == ""


# ---------------------------------------------------------------- the queue


def test_the_earlier_first_token_is_due_the_earlier_it_is_placed() -> None:
    it = Scenario(measured("p0", token_budget=32), measured("d0"), config=NEVER)
    it.start(wanted("r0", 64), "p0", "d0")
    for request in (
        wanted("none", 64),
        wanted("late", 64, 9.0),
        wanted("soon", 64, 5.0),
        wanted("low", 64, 5.0, priority=-1),
    ):
        assert it.submit(request) == []
    it.now = 4.5
    assert it.submit(wanted("fresh", 64, 5.2)) == []  # Due at 9.7: the one without a target is due at 10.
    order, running = [], "r0"
    for _ in range(5):
        (line,) = it.update("p0", prefilled_update(running, 0))
        running = line.split()[2].split("/")[0]
        order.append(running)
    assert order == ["soon", "late", "fresh", "none", "low"]


def test_a_request_without_a_target_is_not_starved_by_those_with_one() -> None:
    it = Scenario(measured("p0", token_budget=32), measured("d0"), config=NEVER)
    it.start(wanted("r0", 64), "p0", "d0")
    assert it.submit(wanted("patient", 64)) == []
    it.now = 9.5
    assert it.submit(wanted("hurried", 64, 1.0)) == []
    assert it.update("p0", prefilled_update("r0", 0)) == ["dispatch p0 patient/0 -> d0"]


def test_a_request_waits_for_the_holder_of_its_prefix_and_lets_others_pass() -> None:
    it = Scenario(measured("p0"), measured("p1"), measured("d0"), config=NEVER)
    hot = wanted("hot", 2000)
    it.holds("p0", hot, 120)
    it.start(wanted("r0", 300), "p0", "d0")
    it.start(wanted("r1", 200), "p1", "d0")
    # P0 has no slot for 300 ms; P1 has one, and would compute for 2 s.
    assert it.submit(hot) == []
    assert it.submit(wanted("r2", 40)) == ["dispatch p1 r2/0 -> d0"]
    assert it.update("p0", prefilled_update("r0", 0)) == ["dispatch p0 hot/0 -> d0"]


def test_a_slot_that_opens_within_a_prompt_is_seen_in_the_report() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    it.start(wanted("r0", 600), "p0", "d0")
    assert it.submit(wanted("r1", 64)) == []
    assert it.report(worker_report("p0", 0, load=Load(uncomputed_prompt_tokens=600))) == []
    assert it.report(worker_report("p0", 1, load=Load(uncomputed_prompt_tokens=300))) == []
    assert it.report(worker_report("p0", 2, load=Load(uncomputed_prompt_tokens=200))) == ["dispatch p0 r1/0 -> d0"]


def test_a_blocked_queue_costs_no_look_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Scenario(measured("p0"), measured("d0"), config=NEVER)
    it.start(wanted("r0", 300), "p0", "d0")
    for number in range(200):
        assert it.submit(wanted(f"q{number}", 300)) == []
    looks: list[object] = []
    try_start = it.core._attempts.try_start

    def counting(*args: object) -> object:
        looks.append(args)
        return try_start(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(it.core._attempts, "try_start", counting)
    it.update("d0", tokens_update("r0", 0, 0, 7))
    it.report(worker_report("d0", 0))
    assert it.submit(wanted("more", 300)) == []
    assert len(looks) == 0
    assert len(it.update("p0", prefilled_update("r0", 0))) == 1
    assert len(looks) == 1


def test_behind_a_long_queue_a_decode_worker_computes_a_prompt() -> None:
    it = Scenario(measured("p0"), measured("d0"), config=RouterConfig())
    assert it.submit(wanted("s0", 64)) == ["dispatch d0 s0/0 alone"]
    it.update("d0", prefilled_update("s0", 0))
    for name in ("s1", "s2"):
        it.start(wanted(name, 64), "p0", "d0")
        it.hand_over(name, "p0", "d0", 7)
    assert it.submit(wanted("r0", 300)) == ["dispatch p0 r0/0 -> d0"]
    # It would cost four sequences there 300 ms each. P has 300 in front, and the queue 300 for each that waits.
    for number in range(1, 5):
        assert it.submit(wanted(f"r{number}", 300)) == []
    assert it.submit(wanted("r5", 300)) == ["dispatch d0 r5/0 alone"]
    assert it.core.holdings()["queued"] == 4


# ---------------------------------------------------------------- targets and explanations


def test_a_trace_explains_the_placement() -> None:
    it = Scenario(measured("p0"), measured("p1"), measured("d0"), config=RouterConfig(local_prefill="never"))
    it.start(wanted("r0", 100), "p0", "d0")
    assert it.submit(routed_request("r1", 100, max_tokens=11)) == ["dispatch p1 r1/0 -> d0"]
    trace = it.core.trace(wanted("r1", 1).request_id)
    assert trace is not None
    why = trace.decision
    assert why is not None
    assert (why.policy, why.num_options) == ("joint", 2)
    assert why.ttft_ms == pytest.approx(100, rel=0.01)
    assert why.tpot_ms == pytest.approx(1.0, rel=0.01)
    assert (why.wait_ms, why.prefill_ms) == (0.0, why.ttft_ms)
    assert why.decode_ms == pytest.approx(10, rel=0.01)
    assert why.delay_ms == pytest.approx(5, rel=0.01)
    assert why.cost == pytest.approx(
        why.wait_ms + why.prefill_ms + why.transfer_ms + why.decode_ms + why.delay_ms + why.barrier_ms
    )


def test_a_policy_without_times_explains_no_times() -> None:
    it = Scenario("p0", "d0")
    it.start("r0", "p0", "d0")
    trace = it.core.trace(routed_request("r0").request_id)
    assert trace is not None
    assert trace.decision is not None
    assert (trace.decision.policy, trace.decision.ttft_ms, trace.decision.tpot_ms) == ("least_loaded", None, None)
    assert (trace.decision.num_options, trace.decision.cost) == (1, 64 + 5 / 64)


def test_a_retry_after_the_first_token_has_no_ttft_target_any_more() -> None:
    it = Scenario(measured("p0"), measured("d0"), measured("d1"), config=NEVER)
    it.start(wanted("r0", 100, 0.2), "p0", "d0")
    it.hand_over("r0", "p0", "d0", 7)
    it.now = 50.0
    assert it.update("d0", end_update("r0", 0, "failed")) == ["dispatch p0 r0/1 -> d1"]
    assert it.update("p0", tokens_update("r0", 1, 1, 8)) == ["emit r0 [8]"]
    assert it.cancel("r0")[-1] == "fail r0 RequestCancelledError"
    assert it.core.holdings() == EMPTY


# ---------------------------------------------------------------- what workers learn of it


def test_workers_get_targets_their_age_and_the_expected_length_also_with_a_retry() -> None:
    config = RouterConfig(local_prefill="never", tpot_slo_s=0.05, expected_output_tokens=30, admission=False)
    it = Scenario("c0", "c1", config=config)
    it.at(1.0)
    asked = msgspec.structs.replace(routed_request("r0", 64, max_tokens=20), ttft_slo_s=2.0)
    [line] = it.submit(asked, 0.75)
    first = line.split()[1]
    assert it.dispatched["r0/0"].message.spec.targets == Targets(2.0, 0.05, 0.25, None, 20.0)
    it.at(1.5)
    it.update(first, tokens_update("r0", 0, 0, 7, 8))
    it.at(1.75)
    assert len(it.lost(first)) == 1
    assert it.dispatched["r0/1"].message.spec.targets == Targets(2.0, 0.05, 1.0, 0.25, 20.0)


@pytest.mark.parametrize("speculation", [True, False])
def test_workers_get_with_each_attempt_whether_drafts_may_be_computed(speculation: bool) -> None:
    it = Scenario("c0", "c1")
    [line] = it.submit(msgspec.structs.replace(routed_request("r0"), speculation=speculation))
    it.at(1.0)
    it.lost(line.split()[1])
    specs = [it.dispatched[key].message.spec for key in ("r0/0", "r0/1")]
    assert [spec.speculation for spec in specs] == [speculation, speculation]


def test_requests_without_targets_bring_none_to_workers() -> None:
    it = Scenario("c0")
    it.submit("r0")
    assert it.dispatched["r0/0"].message.spec.targets is None


@pytest.mark.parametrize(("tpot_slo_s", "is_noted"), [(0.009, True), (0.011, False), (None, False)])
def test_a_configured_target_that_no_worker_can_meet_is_noted(tpot_slo_s: float | None, is_noted: bool) -> None:
    steps = tuple(StepSample(9.0 + rows, 0, 0, rows, rows * 64) for rows in (1, 8, 32) for _ in range(4))
    config = msgspec.structs.replace(PLAIN, tpot_slo_s=tpot_slo_s)
    it = Scenario("p0", worker_info("d0", calibration=steps), config=config)
    assert ["no answer can meet it" in note for note in it.core.view(0.0).notes] == [True] * is_noted


def test_what_prefill_workers_have_no_time_for_is_not_taken_by_decode_workers() -> None:
    """A decode worker would be in time for each of them, and its streams would pay for all."""
    it = Scenario(measured("p0"), measured("d0"), config=RouterConfig(policy="joint"))
    it.start(msgspec.structs.replace(wanted("r0", 400), pair=("p0", "d0")), "p0", "d0")
    assert it.submit(wanted("r1", 100, 0.3)) == ["fail r1 OverloadedError"]
