"""Limits of tenants in the router core, word for word: turns and places, answers that wait, requests and tokens a
minute."""

import math
from collections import Counter

import msgspec
import pytest

from disagg.proto.errors import LimitError
from disagg.proto.ids import RequestId
from disagg.proto.messages import StepSample
from disagg.router.api import CallDemand, Quota, RateView, RoutedRequest, TenantLimits
from disagg.router.config import RouterConfig
from disagg.router.queueing.tenants import EndTimes, Tenants
from disagg.router.queueing.token_bucket import TokenBucket
from disagg.router.requests.events import LimitsChanged
from disagg.router.statistics import TenantUsage
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

SHARED = TenantLimits(is_sole=False)


def of(
    tenant: str, name: str, prompt: int = 16, *, max_tokens: int = 16, limits: TenantLimits = SHARED, **more: object
) -> RoutedRequest:
    request = routed_request(name, prompt, max_tokens=max_tokens)
    return msgspec.structs.replace(request, tenant=tenant, limits=limits, **more)


def limit_error(it: Scenario, name: str) -> LimitError:
    error = it.errors[name]
    assert isinstance(error, LimitError)
    return error


def call(num_answers: int = 1, num_tokens: int = 0, *, limits: TenantLimits = SHARED) -> CallDemand:
    return CallDemand(tenant="a", limits=limits, num_answers=num_answers, num_tokens=num_tokens)


def end(it: Scenario, name: str, decode: str = "d0", attempt: int = 0) -> list[str]:
    assert it.update("p0", prefilled_update(name, attempt)) == []
    return it.update(decode, handed_over_update(name, attempt), end_update(name, attempt, "stop"))


def places(count: int, config: RouterConfig = PLAIN) -> Scenario:
    """A decode worker with so many places, and all else in plenty."""
    p0 = worker_info("p0", num_blocks=4096, max_num_seqs=512, token_budget=65536, max_model_len=16384)
    d0 = worker_info("d0", num_blocks=4096, max_num_seqs=count, max_model_len=16384)
    return Scenario(p0, d0, config=config)


# ---------------------------------------------------------------- turns and places


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    """The proof of finding S4: two calls with 16 long answers each. The other tenant is placed at once."""
    it = places(16)
    sent = [it.submit(of("a", f"a{number}", max_tokens=8000)) for number in range(32)]
    assert sum(bool(lines) for lines in sent) == 14  # The 15th: 14 for one free place and one that is kept free.
    assert it.submit(of("b", "b0")) == ["dispatch p0 b0/0 -> d0"]
    for number in range(1, 10):
        it.submit(of("b", f"b{number}"))
    # Where a place becomes free, it is b's: a has 14 times 8,016 tokens claimed.
    order = []
    for name in ("b0", "a0", "b1", "b2", "b3"):
        order += [line.split()[2] for line in end(it, name) if line.startswith("dispatch")]
    assert all(name.startswith("b") for name in order)
    assert it.core.check_integrity() == []


def test_what_a_tenant_asked_for_lately_is_kept_free_for_it() -> None:
    """Of 16 places b is sure of the three that it had at a time, not more than its half, for 30 to 60 s."""
    it = places(16)
    for number in range(3):
        it.submit(of("b", f"b{number}"))
    for number in range(3):
        end(it, f"b{number}")
    sent = [it.submit(of("a", f"a{number}", max_tokens=8000)) for number in range(20)]
    assert sum(bool(lines) for lines in sent) == 13
    assert [len(it.submit(of("b", f"b{number}"))) for number in range(3, 8)] == [1, 1, 1, 0, 0]
    for number in range(3, 8):
        it.cancel(f"b{number}")
    it.now = 31.0
    assert it.report(worker_report("d0", 0)) == []
    assert it.core.view(31.0).tenants == {"a": (7, 13)}
    it.now = 62.0
    assert it.report(worker_report("d0", 1)) == ["dispatch p0 a13/0 -> d0"]


@pytest.mark.parametrize(("at_a_time", "num_running"), [(1, 14), (12, 13)])
def test_places_are_kept_where_answers_end_together(at_a_time: int, num_running: int) -> None:
    """B is sure of three of 16 places. 60 answers of a end, one after another every 40 ms, or twelve at a time and then
    none for 480 ms. A, which has more waiting, leaves all of b's places free only in the second case."""
    it = places(16)
    for number in range(3):
        it.submit(of("b", f"b{number}"))
    for number in range(3):
        end(it, f"b{number}")
    for number in range(80):
        it.submit(of("a", f"a{number}"))
    assert it.core.view(0.0).tenants["a"] == (67, 13)
    for number in range(60):
        if number % at_a_time == 0:
            it.now += 0.04 * at_a_time
        end(it, f"a{number}")
    assert it.core.view(it.now).tenants["a"][1] == num_running


def test_a_target_is_not_refused_for_what_others_queued_while_a_place_is_kept() -> None:
    """B is sure of three places and has one, a fills the others. By turns all that a has waiting is before b."""
    it = places(16)
    exact = (StepSample(10.0, 0, 0, 1, 0), StepSample(10.0, 0, 0, 8, 0), StepSample(10.0, 64, 2080, 0, 0))
    assert it.report(worker_report("p0", 0, steps=exact)) == []
    assert it.report(worker_report("d0", 0, steps=exact)) == []
    for number in range(3):
        it.submit(of("b", f"b{number}", max_tokens=8000))
    for number in range(2):
        end(it, f"b{number}")
    for number in range(40):
        it.submit(of("a", f"a{number}"))
    assert it.core.view(0.0).tenants == {"a": (27, 13), "b": (0, 1)}
    sent = [it.submit(of("b", f"b{number}", ttft_slo_s=0.05)) for number in range(3, 6)]
    assert sent[:2] == [["dispatch p0 b3/0 -> d0"], ["dispatch p0 b4/0 -> d0"]]
    assert it.core.view(0.0).tenants["b"][1] == 3
    assert sent[2] == ["fail b5 OverloadedError"]  # It has all that it is sure of, and stands behind a.


def test_a_part_of_all_places_by_weight_is_the_most_that_is_kept() -> None:
    it = places(16)
    heavy = TenantLimits(is_sole=False, weight=3.0)
    for number in range(16):
        it.submit(of("a", f"a{number}", limits=heavy))
        it.submit(of("b", f"b{number}"))
    # A quarter is b's, and none of it could be had by a.
    assert it.core.view(0.0).tenants["b"][1] >= 4
    tenants = it.core._tenants
    parts = [tenants.get(name, limits, 0.0).places for name, limits in (("a", heavy), ("b", SHARED))]
    assert [tenants._places.guaranteed(part) for part in parts] == [12, 4]


def test_a_sole_tenant_may_have_all_places() -> None:
    it = places(4)
    sole = TenantLimits()
    assert [bool(it.submit(of("a", f"a{number}", limits=sole))) for number in range(5)] == [True] * 4 + [False]


def test_the_least_tenant_may_always_run_one() -> None:
    it = places(1)
    assert it.submit(of("a", "a0")) == ["dispatch p0 a0/0 -> d0"]
    assert it.submit(of("a", "a1")) == []
    assert end(it, "a0") == ["finish a0 stop 0 cached=0", "dispatch p0 a1/0 -> d0"]


def test_answers_above_the_limit_of_running_ones_wait() -> None:
    it = places(16)
    two = TenantLimits(running=2, is_sole=False)
    assert [len(it.submit(of("a", f"a{number}", limits=two))) for number in range(4)] == [1, 1, 0, 0]
    assert it.submit(of("b", "b0")) == ["dispatch p0 b0/0 -> d0"]
    assert it.core.view(0.0).tenants == {"a": (2, 2), "b": (0, 1)}
    assert end(it, "a1") == ["finish a1 stop 0 cached=0", "dispatch p0 a2/0 -> d0"]
    for name in ("a0", "a2", "b0"):
        end(it, name)
    assert end(it, "a3") == ["finish a3 stop 0 cached=0"]
    assert it.core.holdings() == EMPTY


# ---------------------------------------------------------------- the queue


def test_one_tenant_never_fills_the_queue() -> None:
    it = places(1, msgspec.structs.replace(PLAIN, max_queued=8, retry_after_s=2.0))
    it.submit(of("b", "b0"))
    lines = [it.submit(of("a", f"a{number}")) for number in range(8)]
    assert lines == [[]] * 6 + [["fail a6 LimitError"], ["fail a7 LimitError"]]
    error = limit_error(it, "a6")
    assert (error.limit, error.code, error.retry_after_s) == ("queued", "rate_limit_exceeded", 2.0)
    assert str(error) == "queued: 6 answers of tenant a wait and one more is asked for; at most 6 may; try again in 2 s"
    assert it.submit(of("b", "b1")) == []
    assert it.submit(of("b", "b2")) == ["fail b2 LimitError"]
    assert it.submit(of("c", "c0")) == []


def test_a_sole_tenant_may_fill_the_queue() -> None:
    it = places(1, msgspec.structs.replace(PLAIN, max_queued=4))
    lines = [it.submit(of("a", f"a{number}", limits=TenantLimits())) for number in range(6)]
    assert lines == [["dispatch p0 a0/0 -> d0"], [], [], [], [], ["fail a5 OverloadedError"]]


def test_a_limit_of_waiting_answers() -> None:
    it = places(1)
    two = TenantLimits(queued=2, is_sole=False)
    lines = [it.submit(of("a", f"a{number}", limits=two)) for number in range(4)]
    assert lines == [["dispatch p0 a0/0 -> d0"], [], [], ["fail a3 LimitError"]]


def test_a_call_of_more_answers_than_may_wait_is_refused_as_a_whole() -> None:
    it = places(4)
    limits = TenantLimits(queued=10, running=2, is_sole=False)
    assert it.core.admit(call(12, limits=limits), 0.0) is None
    it.core.refund("a", 0, 12, 0.0)
    error = it.core.admit(call(13, limits=limits), 0.0)
    assert error is not None
    assert error.retry_after_s is None
    assert error.message == (
        "queued: 0 answers of tenant a wait and 13 more are asked for; at most 10 may, with 12 in all at a time; "
        "ask for fewer answers in one call"
    )


def test_a_call_that_waits_for_places_may_be_tried_again() -> None:
    it = places(2)
    limits = TenantLimits(queued=2, is_sole=False)
    it.submit(of("b", "b0"))
    error = it.core.admit(call(4, limits=limits), 0.0)
    assert error is not None
    assert error.retry_after_s == 1.0
    error = it.core.admit(call(5, limits=limits), 0.0)
    assert error is not None
    assert error.retry_after_s is None


def test_a_call_of_more_answers_than_a_tenant_alone_may_have_waiting() -> None:
    it = places(1, msgspec.structs.replace(PLAIN, max_queued=8))
    it.submit(of("b", "b0"))
    for num_answers, retry_s in ((7, 1.0), (8, None)):
        error = it.core.admit(call(num_answers), 0.0)
        assert error is not None
        assert error.retry_after_s == retry_s


def test_an_admitted_call_is_never_refused_half_way() -> None:
    """Its answers are counted as waiting from its admission on, so that a later call does not take their places."""
    it = places(1)
    limits = TenantLimits(queued=4, is_sole=False)
    it.submit(of("b", "b0"))
    assert it.core.admit(call(4, 4 * 32, limits=limits), 0.0) is None
    error = it.core.admit(call(1, 32, limits=limits), 0.0)
    assert error is not None
    assert (
        error.message == "queued: 4 answers of tenant a wait and one more is asked for; at most 4 may; try again in 1 s"
    )
    assert it.submit(of("a", "late", limits=limits)) == ["fail late LimitError"]
    assert it.core.holdings()["admitted"] == 4
    lines = [it.submit(of("a", f"a{number}", limits=limits, prepaid_tokens=32)) for number in range(4)]
    assert lines == [[]] * 4
    assert it.core.holdings()["admitted"] == 0
    # What its call was charged is used up: this one has to fit into the queue itself.
    assert it.submit(of("a", "a4", limits=limits, prepaid_tokens=32)) == ["fail a4 LimitError"]
    for name in ("a0", "a1", "a2", "a3", "b0"):
        it.cancel(name)
    assert it.core.holdings() == EMPTY


def test_answers_of_a_call_that_are_not_submitted_wait_no_longer() -> None:
    it = places(1)
    limits = TenantLimits(queued=4, is_sole=False)
    it.submit(of("b", "b0"))
    assert it.core.admit(call(4, 4 * 32, limits=limits), 0.0) is None
    assert it.submit(of("a", "a0", limits=limits, prepaid_tokens=32)) == []
    it.core.refund("a", 3 * 32, 3, 0.0)
    assert it.core.admit(call(4, 4 * 32, limits=limits), 0.0) is not None
    assert it.core.admit(call(3, 3 * 32, limits=limits), 0.0) is None
    it.core.refund("a", 3 * 32, 3, 0.0)
    it.cancel("a0")
    it.cancel("b0")
    assert it.core.holdings() == EMPTY


def test_admitted_answers_of_one_tenant_leave_the_others_their_share_of_the_queue() -> None:
    it = places(1, msgspec.structs.replace(PLAIN, max_queued=8))
    it.submit(of("b", "b0"))
    assert it.core.admit(call(6), 0.0) is None
    assert it.core.admit(call(1), 0.0) is not None
    assert it.submit(of("b", "b1")) == []
    assert it.submit(of("b", "b2")) == ["fail b2 LimitError"]


# ---------------------------------------------------------------- by the minute


def test_requests_per_minute() -> None:
    it = places(64)
    limits = TenantLimits(requests_per_minute=6)
    assert it.core.admit(call(5, limits=limits), 0.0) is None
    error = it.core.admit(call(3, limits=limits), 5.0)  # 1.5 are left.
    assert error is not None
    assert error.limit == "requests_per_minute"
    assert error.retry_after_s == pytest.approx(15.0)
    assert error.message == (
        "requests_per_minute: tenant a asks for 3 requests, and of 6 a minute has 1 left; try again in 15 s"
    )
    assert it.core.admit(call(3, limits=limits), 20.0) is None
    never = it.core.admit(call(7, limits=limits), 99.0)
    assert never is not None
    assert never.retry_after_s is None
    assert never.message == (
        "requests_per_minute: tenant a asks for 7 requests at once, and may have 6 a minute; ask for fewer answers in "
        "one call"
    )
    # Keys of one tenant share it; a request whose call was charged is not charged again.
    assert it.core.admit(call(4, limits=limits), 40.0) is not None
    it.now = 40.0
    assert it.submit(of("a", "a0", limits=limits, prepaid_tokens=0)) == ["dispatch p0 a0/0 -> d0"]
    usage = it.core.view(40.0).stats.tenants["a"]
    assert usage.refused == {"requests_per_minute": 3}


def test_tokens_per_minute_are_charged_whole_and_what_was_not_taken_is_given_back() -> None:
    it = places(64)
    limits = TenantLimits(tokens_per_minute=600)
    assert it.submit(of("a", "a0", 100, max_tokens=400, limits=limits)) == ["dispatch p0 a0/0 -> d0"]
    assert it.submit(of("a", "a1", 50, max_tokens=100, limits=limits)) == ["fail a1 LimitError"]
    error = limit_error(it, "a1")
    assert str(error) == (
        "tokens_per_minute: tenant a asks for 150 tokens, and of 600 a minute has 100 left; try again in 5 s"
    )
    assert error.retry_after_s == pytest.approx(5.0)
    it.update("p0", prefilled_update("a0", 0), tokens_update("a0", 0, 0, 7))
    it.update("d0", handed_over_update("a0", 0), tokens_update("a0", 0, 0, 7, 8), end_update("a0", 0, "stop"))
    # 102 were taken.
    assert it.submit(of("a", "a2", 98, max_tokens=400, limits=limits)) == ["dispatch p0 a2/0 -> d0"]
    assert it.submit(of("a", "a3", 1, max_tokens=1, limits=limits)) == ["fail a3 LimitError"]
    assert it.submit(of("a", "a4", 1, max_tokens=600, limits=limits)) == ["fail a4 LimitError"]
    assert limit_error(it, "a4").retry_after_s is None
    it.cancel("a2")
    usage = it.core.view(0.0).stats.tenants["a"]
    assert usage == TenantUsage(
        Counter(stop=1, cancelled=1, rate_limit_exceeded=3), 198, 2, Counter(tokens_per_minute=3)
    )


def test_what_a_call_was_charged_is_not_charged_again() -> None:
    it = places(64)
    limits = TenantLimits(tokens_per_minute=600)
    assert it.core.admit(call(2, 2 * 250, limits=limits), 0.0) is None
    assert it.core.admit(call(1, 150, limits=limits), 0.0) is not None
    assert it.submit(of("a", "a0", 50, max_tokens=240, limits=limits, prepaid_tokens=250)) != ["fail a0 LimitError"]
    it.core.refund("a", 250, 1, 0.0)
    assert it.core.admit(call(1, 310, limits=limits), 0.0) is None
    it.cancel("a0")
    assert it.core.admit(call(1, 240, limits=limits), 0.0) is None
    assert it.core.admit(call(1, 1, limits=limits), 0.0) is not None


def test_a_request_that_never_ran_costs_nothing() -> None:
    it = places(1)
    limits = TenantLimits(tokens_per_minute=100)
    it.submit(of("b", "b0"))
    assert it.submit(of("a", "a0", 50, max_tokens=50, limits=limits)) == []
    it.cancel("a0")
    assert it.submit(of("a", "a1", 50, max_tokens=50, limits=limits)) == []


def test_the_mean_wait_for_an_end() -> None:
    ends = EndTimes()
    for number in range(EndTimes.MIN_GAPS):
        assert ends.wait_s(float(number)) == math.inf
        ends.add(float(number))
    assert ends.wait_s(15.0) == math.inf
    ends.add(16.0)
    assert ends.wait_s(16.0) == pytest.approx(0.5)
    assert ends.wait_s(20.0) == pytest.approx((16 + 4 * 4) / 2 / 20)  # the gap that is open counts
    for _ in range(3):
        ends.add(16.0)
    assert ends.wait_s(16.0) == pytest.approx(0.5)  # ends at one time shorten no gap
    for number in range(EndTimes.MAX_GAPS):
        ends.add(16.0 + 0.1 * (number + 1))
    assert ends.wait_s(22.4) == pytest.approx(0.05)  # the gaps before are forgotten
    simultaneous = EndTimes()
    for _ in range(2 * EndTimes.MIN_GAPS):
        simultaneous.add(1.0)
    assert simultaneous.wait_s(1.0) == 0.0


def test_a_bucket_fills_evenly_and_not_beyond_its_size() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(60, 0.0)
    assert [bucket.level(now) for now in (0.0, 1.0, 1.0, 30.0, 99.0)] == [0.0, 1.0, 1.0, 30.0, 60.0]
    bucket.take(-5, 99.0)
    assert (bucket.level(99.0), bucket.missing_s(61, 99.0), bucket.missing_s(-1, 99.0)) == (60.0, None, 0.0)


def test_a_bucket_of_another_size_stays_as_full_as_it_is() -> None:
    """Neither a quarter that is left nor a debt is forgotten, whichever way the size changes."""
    bucket = TokenBucket(60, 0.0)
    bucket.take(45, 0.0)
    bucket.resize(120, 0.0)
    assert (bucket.level(0.0), bucket.level(1.0), bucket.per_minute) == (30.0, 32.0, 120)
    bucket.take(62, 1.0)
    bucket.resize(60, 1.0)
    assert (bucket.level(1.0), bucket.missing_s(0, 1.0)) == (-15.0, 15.0)


def test_a_tenant_sees_what_is_left_and_looking_changes_nothing() -> None:
    it = places(4)
    limits = TenantLimits(requests_per_minute=60, tokens_per_minute=600)

    def seen(now: float, stated: TenantLimits = limits) -> Quota:
        return it.core.remaining_quota("a", stated, now)

    assert seen(0.0) == Quota(RateView(60, 60, 0.0), RateView(600, 600, 0.0))
    assert it.core.view(0.0).tenants == {}
    assert it.core.admit(call(3, 90, limits=limits), 0.0) is None
    assert seen(0.0) == Quota(RateView(60, 57, 3.0), RateView(600, 510, 9.0))
    assert seen(1.5) == Quota(RateView(60, 58, 1.5), RateView(600, 525, 7.5))
    assert seen(0.0) == Quota(RateView(60, 57, 3.0), RateView(600, 510, 9.0))  # the time of a look is not kept
    it.core.refund("a", 90, 3, 1.5)
    assert seen(9.0) == Quota(RateView(60, 60, 0.0), RateView(600, 600, 0.0))
    assert it.core.admit(call(1, 600, limits=limits), 9.0) is None
    it.core.handle(LimitsChanged({"a": TenantLimits(tokens_per_minute=60)}), 9.0)
    assert seen(9.0) == Quota(None, RateView(60, 0, 60.0))
    assert it.core.remaining_quota("b", TenantLimits(), 9.0) == Quota()


def test_a_debt_is_no_negative_rest() -> None:
    bucket = TokenBucket(60, 0.0)
    bucket.take(90, 0.0)
    assert bucket.view(0.0) == RateView(60, 0, 90.0)


def test_new_limits_count_from_the_next_request_on() -> None:
    it = places(4)
    few, more = TenantLimits(requests_per_minute=1), TenantLimits(requests_per_minute=60)
    assert it.core.admit(call(limits=few), 0.0) is None
    assert it.core.admit(call(limits=few), 0.0) is not None
    assert it.core.admit(call(limits=more), 0.0) is not None
    assert it.core.admit(call(limits=more), 1.0) is None


def test_a_higher_limit_of_running_answers_places_those_that_wait() -> None:
    it = places(8)
    one, three = TenantLimits(running=1, is_sole=False), TenantLimits(running=3, is_sole=False)
    assert [len(it.submit(of("a", f"a{number}", limits=one))) for number in range(4)] == [1, 0, 0, 0]
    assert it.handle(LimitsChanged({"a": three, "b": SHARED})) == ["dispatch p0 a1/0 -> d0", "dispatch p0 a2/0 -> d0"]
    # A call that began before the change brings the older limits.
    assert it.submit(of("a", "a4", limits=one)) == []
    assert it.cancel("a1")[-1] == "dispatch p0 a3/0 -> d0"
    assert it.handle(LimitsChanged({"b": SHARED})) == []


# ---------------------------------------------------------------- caps


def order_of(it: Scenario, *requests: RoutedRequest) -> list[str]:
    """In which order they are placed, one at a time."""
    it.submit(of("x", "first"))
    assert [it.submit(request) for request in requests] == [[]] * len(requests)
    order, running = [], "first"
    for _ in requests:
        running = end(it, running)[-1].split()[2].split("/")[0]
        order.append(running)
    return order


def test_a_priority_is_capped() -> None:
    it = places(1)
    limits = TenantLimits(max_priority=1)
    a1, a9, b2 = (
        of("a", "a1", limits=limits, priority=1),
        of("a", "a9", limits=limits, priority=9),
        of("b", "b2", priority=2),
    )
    assert order_of(it, a1, a9, b2) == ["b2", "a1", "a9"]
    assert it.dispatched["a9/0"].message.spec.priority == 1


def test_a_tight_target_gets_ahead_as_far_as_its_tenant_may() -> None:
    limits = TenantLimits(min_ttft_s=2.0)
    requests = [of("a", f"a{n}", limits=limits, ttft_slo_s=ttft_s) for n, ttft_s in enumerate((3.0, 2.1, 0.1))]
    assert order_of(places(1), *requests) == ["a2", "a1", "a0"]
    requests = [of("a", f"a{n}", limits=limits, ttft_slo_s=ttft_s) for n, ttft_s in enumerate((1.9, 0.2, 0.1))]
    assert order_of(places(1), *requests) == ["a0", "a1", "a2"]


def test_few_requests_at_a_time_are_boosted() -> None:
    limits = TenantLimits(boosted=1)
    it = places(1)
    requests = [of("a", f"a{n}", limits=limits, ttft_slo_s=ttft_s) for n, ttft_s in enumerate((None, 5.0, 0.1))]
    assert order_of(it, *requests) == ["a1", "a0", "a2"]
    it.cancel("a2")
    assert it.core._tenants.get("a", limits, 0.0).num_boosted == 0
    assert it.core.trace(RequestId("a2")) is not None


# ---------------------------------------------------------------- looks


def test_a_placement_that_changes_the_order_hides_nobody_from_the_looks() -> None:
    """a0 waits for room, a1 is placed and takes the rest of a's round, so that b0 comes to stand before a0."""
    config = msgspec.structs.replace(PLAIN, fair_quantum_tokens=2000, decode_reserve_tokens=0)
    p0 = worker_info("p0", num_blocks=4096, max_num_seqs=512, token_budget=65536, max_model_len=4096)
    d0 = worker_info("d0", num_blocks=100, max_num_seqs=64, max_model_len=4096)
    it = Scenario(p0, d0, config=config)
    for name, num_blocks in (("x0", 55), ("x1", 40)):
        assert it.submit(of("x", name, num_blocks * 16 - 4, limits=TenantLimits())) == [f"dispatch p0 {name}/0 -> d0"]
    assert it.submit(of("a", "a0", 70 * 16)) == []
    assert it.submit(of("a", "a1", 10 * 16, max_tokens=1900)) == []
    assert it.submit(of("b", "b0", 10 * 16)) == []
    assert end(it, "x1") == ["finish x1 stop 0 cached=0", "dispatch p0 a1/0 -> d0", "dispatch p0 b0/0 -> d0"]


# ---------------------------------------------------------------- several routers


LIMITED = TenantLimits(requests_per_minute=6, tokens_per_minute=600, is_sole=False)


def replicas(count: int = 2) -> list[Tenants]:
    found = [Tenants(RouterConfig(), lambda: 8, lambda: (4096, 0)) for _ in range(count)]
    for tenants in found:
        tenants.charges = []
    return found


def spread(source: Tenants, others: list[Tenants], now: float) -> None:
    """As the routers of one gateway do it."""
    charges, source.charges = source.charges or [], []
    for other in others:
        if other is not source:
            other.charged_elsewhere(charges, now)


def left(tenants: Tenants, now: float, limits: TenantLimits = LIMITED) -> tuple[int, int]:
    quota = tenants.remaining_quota("a", limits, now)
    assert quota.requests is not None
    assert quota.tokens is not None
    return quota.requests.remaining, quota.tokens.remaining


def test_limits_for_a_minute_are_of_all_models_together() -> None:
    """Whatever charges and gives back: calls, refunds, requests that no call was charged for."""
    both = first, second = replicas()
    assert first.admit(call(4, 100, limits=LIMITED), 0, 0.0) is None
    spread(first, both, 0.0)
    assert [left(each, 0.0) for each in both] == [(2, 500)] * 2
    refused = second.admit(call(3, limits=LIMITED), 0, 0.0)
    assert refused is not None
    assert (refused.limit, refused.retry_after_s) == ("requests_per_minute", 10.0)
    spread(second, both, 0.0)
    assert second.admit(call(2, limits=LIMITED), 0, 0.0) is None
    spread(second, both, 0.0)
    first.refund("a", 60, 1, 0.0)
    spread(first, both, 0.0)
    assert [left(each, 0.0) for each in both] == [(0, 560)] * 2
    tenant = second.get("a", LIMITED, 30.0)
    assert second.refusal(tenant, 70, None, 0, 30.0) is None
    second.charge(tenant, 70, None, 30.0)
    spread(second, both, 30.0)
    assert [left(each, 30.0) for each in both] == [(2, 530)] * 2
    assert first.charges == second.charges == []


def test_what_waits_and_runs_is_counted_by_each_model() -> None:
    both = first, second = replicas()
    limits = TenantLimits(requests_per_minute=60, queued=1, running=1, is_sole=False)
    for tenants in both:
        tenant = tenants.get("a", limits, 0.0)
        tenants.charge(tenant, 10, None, 0.0)
        tenants.entered(tenant, 10, 0.0)
        tenants.started(tenant, 10)
        spread(tenants, both, 0.0)
        assert not tenants.may_run("a")
    assert (first.in_flight(), second.in_flight()) == ({"a": (0, 1)}, {"a": (0, 1)})


def test_tenants_without_limits_for_a_minute_and_gateways_of_one_model_note_nothing() -> None:
    (shared,), alone = replicas(1), Tenants(RouterConfig(), lambda: 8, lambda: (4096, 0))
    assert shared.admit(call(4, 100, limits=TenantLimits(running=4)), 0, 0.0) is None
    assert alone.admit(call(4, 100, limits=LIMITED), 0, 0.0) is None
    assert (shared.charges, alone.charges) == ([], None)
