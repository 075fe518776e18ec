"""The estimate: queues whose results are in textbooks, and what a load makes of workers."""

from __future__ import annotations

import math

import pytest

from disagg.autoscaler.queueing import (
    Lengths,
    Wait,
    WorkerModel,
    colocated,
    decode_context,
    disaggregated,
    erlang_c,
    prefill_estimate,
    representative,
    sharing,
    wait_of,
)
from disagg.loadtests.verdict.goodput import Slo
from disagg.proto.errors import ConfigError
from disagg.simulator.plan.load import Load
from disagg.step_times.interface import LinkTimes, StepWork

INSTANT = LinkTimes(bandwidth_bytes_per_s=1e30, latency_s=0.0)


class Steps:
    """10 ms, and 0.1 ms for each prompt token; decodes cost nothing more."""

    def step_s(self, work: StepWork) -> float:
        return 0.010 + 1e-4 * work.prefill_tokens


def worker(token_budget: int = 512, max_num_seqs: int = 64, kv_tokens: int = 1_000_000) -> WorkerModel:
    return WorkerModel(times=Steps(), token_budget=token_budget, max_num_seqs=max_num_seqs, kv_tokens=kv_tokens)


def load(rate: float, ttft_s: float | None = None, tpot_s: float | None = None, *kinds: Lengths) -> Load:
    return Load(rate_per_s=rate, kinds=kinds or (Lengths(400, 101),), slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s))


# ---------------------------------------------------------------- textbooks


def test_erlangs_c() -> None:
    assert erlang_c(1, 0.5) == 0.5
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(3, 2.0) == pytest.approx(4 / 9)
    assert erlang_c(2, 2.0) == 1.0
    assert erlang_c(4, 0.0) == 0.0


def test_the_mean_wait_before_one_worker_is_that_of_pollaczek_and_khinchine() -> None:
    for services, rate in (([2.0], 0.25), ([1.0, 3.0], 0.25), ([0.1, 0.2, 0.9], 1.0)):
        wait = wait_of(1, rate, services)
        second_moment = sum(each * each for each in services) / len(services)
        mean = sum(services) / len(services)
        assert wait is not None
        assert wait.chance * wait.mean_s == pytest.approx(rate * second_moment / (2 * (1 - rate * mean)))


def test_a_queue_that_grows_without_end_has_no_wait() -> None:
    assert wait_of(2, 1.0, [2.0]) is None
    assert wait_of(2, 0.99, [2.0]) is not None


def test_a_wait_is_zero_or_exponential() -> None:
    wait = Wait(chance=0.5, mean_s=2.0)
    assert [wait.within(limit) for limit in (-1.0, 0.0, 2.0, math.inf)] == [0.0, 0.5, 1.0 - 0.5 / math.e, 1.0]
    assert Wait(chance=0.0, mean_s=0.0).within(0.0) == 1.0


def test_steps_that_take_the_same_for_any_batch_are_a_queue_with_a_place_for_everybody() -> None:
    found = sharing(2.0, 100.0, 1, 200, lambda batch: 0.05)
    assert found is not None
    assert found.mean_batch == pytest.approx(10.0, rel=1e-9)  # M/G/inf
    assert found.mean_tpot_s == pytest.approx(0.05)
    assert found.tpot_deviation_s == pytest.approx(0.0, abs=1e-9)
    halves = sharing(2.0, 100.0, 2, 200, lambda batch: 0.05)
    assert halves is not None
    assert halves.mean_batch == pytest.approx(5.0, rel=1e-9)


def test_steps_as_long_as_their_batch_are_one_server_that_is_shared() -> None:
    found = sharing(1.0, 100.0, 1, 200, lambda batch: 0.005 * batch)
    assert found is not None
    assert found.mean_batch == pytest.approx(1.0, rel=1e-9)  # rho / (1 - rho) for rho = 0.5


def test_few_places_are_full_with_erlangs_probability() -> None:
    found = sharing(1.0, 100.0, 1, 2, lambda batch: 0.01)
    assert found is not None
    assert found.full == pytest.approx(0.5 / 2.5)  # Erlang's B with 1 erlang and 2 places


def test_more_work_than_the_largest_batch_does_is_refused() -> None:
    assert sharing(1.0, 100.0, 1, 10, lambda batch: 0.1) is None
    assert sharing(0.99, 100.0, 1, 10, lambda batch: 0.1) is not None
    assert sharing(1.0, 100.0, 1, 0, lambda batch: 0.1) is None


# ---------------------------------------------------------------- workers


def test_a_prompt_alone_is_in_time_or_not() -> None:
    idle = prefill_estimate(load(1e-9, ttft_s=0.051), worker(), 1)
    assert idle is not None
    assert list(idle) == pytest.approx([1.0, 0.050, 0.0], abs=1e-9)
    late = prefill_estimate(load(1e-9, ttft_s=0.049), worker(), 1)
    assert late is not None
    assert late[0] == 0.0


def test_short_prompts_share_a_step_when_there_are_many() -> None:
    short = load(50.0, None, None, Lengths(100, 10))
    assert prefill_estimate(short, worker(token_budget=100), 1) is None  # 50 x 20 ms
    shared = prefill_estimate(short, worker(token_budget=500), 1)
    assert shared is not None
    assert shared[2] == pytest.approx(50 * (0.010 + 0.050) / 5)


def test_more_prefill_workers_are_better_until_all_is_in_time() -> None:
    shares = [prefill_estimate(load(40.0, ttft_s=0.1), worker(), number) for number in (2, 3, 4, 8)]
    assert shares[0] is None  # 40 x 50 ms = 2
    found = [share[0] for share in shares[1:] if share is not None]
    assert found == sorted(found)
    assert found[-1] > 0.999


def test_a_pool_that_cannot_keep_up_is_overloaded() -> None:
    busy = disaggregated(load(40.0), worker(), 1, worker(), 10, float, INSTANT)
    assert busy.attainment == 0.0
    assert busy.utilization == pytest.approx(2.0)
    busy = disaggregated(load(40.0), worker(), 4, worker(max_num_seqs=10), 1, float, INSTANT)
    assert busy.attainment == 0.0
    assert busy.utilization == pytest.approx(40 * 100 * 0.010 / 10)
    busy = colocated(load(100.0), worker(), 1)
    assert busy.attainment == 0.0


def test_decode_alone_is_not_delayed_and_beside_prompts_it_is() -> None:
    asked = load(4.0, ttft_s=1.0, tpot_s=0.011)
    apart = disaggregated(asked, worker(), 1, worker(), 1, float, INSTANT)
    together = colocated(asked, worker(), 2)
    assert apart.tpot_attainment == 1.0
    assert apart.mean_tpot_s == pytest.approx(0.010)
    # On each worker 2 prompts a second, each of which delays by 40 ms what has 1 ms a token to spare: two delays at
    # most. assert together.mean_tpot_s == pytest.approx(0.010 / 0.92, rel=0.01)
    expected = 2.0 * 1.0 / 0.92
    poisson = sum(math.exp(-expected) * expected**number / math.factorial(number) for number in range(3))
    assert together.tpot_attainment == pytest.approx(poisson, abs=0.02)


def test_what_a_slow_link_adds_is_spread_over_the_answer() -> None:
    slow = LinkTimes(bandwidth_bytes_per_s=4000.0, latency_s=0.0)  # 0.1 s for the prompt
    found = disaggregated(load(1.0, tpot_s=0.0105), worker(), 1, worker(), 1, float, slow)
    assert found.mean_tpot_s == pytest.approx(0.010 + 0.1 / 100)
    assert found.tpot_attainment == 0.0


def test_the_context_of_a_step_is_weighted_by_steps() -> None:
    assert decode_context([Lengths(100, 11)]) == 105.5
    assert decode_context([Lengths(100, 11), Lengths(1000, 1)]) == 105.5
    assert decode_context([Lengths(100, 1)]) == 100.0


# ---------------------------------------------------------------- load


def test_a_few_requests_stand_for_many() -> None:
    kinds = representative([Lengths(number, 1) for number in range(1000, 0, -1)], 4)
    assert [kind.prompt for kind in kinds] == [126, 376, 626, 876]
    assert representative([Lengths(2, 1), Lengths(1, 1)], 4) == (Lengths(1, 1), Lengths(2, 1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate_per_s": 0.0}, "--rate: expected requests per second above 0, not 0"),
        ({"min_attainment": 1.0}, "--min-attainment: expected a share between 0 and 1, not 1"),
        ({"kinds": ()}, "--scenario: it has no request"),
        ({"kinds": (Lengths(0, 1),)}, "--prompt-tokens, --output-tokens: expected at least 1 each"),
        ({"kinds": (Lengths(4, 1, 4),)}, "--prompt-tokens, --output-tokens: expected at least 1 each"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_flag(values: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"rate_per_s": 1.0, "kinds": (Lengths(1, 1),), "slo": Slo()}
    with pytest.raises(ConfigError) as refused:
        Load(**(fields | values))  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)
