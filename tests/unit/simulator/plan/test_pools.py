"""The search for pools: what is refused, what is found, and that a judge has the last word."""

from __future__ import annotations

import math

import pytest

from disagg.autoscaler.queueing import Lengths
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import MultiTurnWorkload, RandomWorkload, SharedPrefixWorkload, outline
from disagg.proto.errors import ConfigError
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.devices import H100
from disagg.simulator.durations.model_shapes import MODEL_SHAPES
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.durations.roofline import RooflineStepTimes
from disagg.simulator.plan.candidates import Answer, Candidate, Judge, Judgement, Pool
from disagg.simulator.plan.judge import SimulatedJudge, lengths_of, steady_requests
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.pools import Planner
from disagg.simulator.plan.report import facts_of as facts
from disagg.simulator.plan.report import price_per_million_output, to_json, verdict
from disagg.simulator.plan.search import best_pools
from disagg.simulator.plan.workers import Site
from disagg.simulator.world.users import UserRequest
from disagg.step_times.interface import LinkTimes, StepTimes

LLAMA = MODEL_SHAPES["llama-3-8b"]
TIMES: dict[int, StepTimes] = {tp: RooflineStepTimes(LLAMA, H100, tp=tp) for tp in (1, 2, 4, 8)}


USUAL = Lengths(2048, 256)


def site(tps: tuple[int, ...] = (1,), max_devices: int = 32, modes: tuple[bool, ...] = (True, False)) -> Site:
    return Site(
        model=LLAMA,
        device=H100,
        times_of=lambda parallelism: TIMES[parallelism.tp],
        link=LinkTimes(bandwidth_bytes_per_s=50e9, latency_s=1e-4),
        tps=tps,
        token_budgets=(512, 2048),
        price_per_hour=2.0,
        max_devices=max_devices,
        modes=modes,
    )


def load(rate: float = 40.0, ttft_ms: float = 500.0, tpot_ms: float = 25.0, kind: Lengths = USUAL) -> Load:
    return Load(rate_per_s=rate, kinds=(kind,), slo=Slo(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3))


def judgement(attainment: float) -> Judgement:
    return Judgement(
        attainment=attainment, ttft_attainment=attainment, tpot_attainment=1.0, mean_ttft_s=0.1, mean_tpot_s=0.01
    )


# ---------------------------------------------------------------- refused


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--prompt-tokens, --output-tokens: 8193 tokens are more than the 8192 "):
        Planner(site(), load(kind=Lengths(8192, 1)))


def test_limits_below_an_idle_worker_are_refused_with_what_it_takes() -> None:
    with pytest.raises(
        ConfigError, match=r"^--ttft-ms: 20 ms cannot be met: a prompt of 2048 tokens takes \d+ ms on an idle"
    ):
        Planner(site(tps=(1, 2)), load(ttft_ms=20.0))
    with pytest.raises(
        ConfigError, match=r"^--tpot-ms: 5 ms cannot be met: a token of a single sequence takes 7.8 ms on an"
    ):
        Planner(site(), load(tpot_ms=5.0))


def test_a_limit_that_a_wider_worker_meets_is_not_refused() -> None:
    assert Planner(site(tps=(1, 4)), load(tpot_ms=5.0)).decoders == [Parallelism(1), Parallelism(4)]


def test_too_few_devices_for_any_worker_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--max-gpus: 1 device is too few for one worker of 2$"):
        best_pools(Planner(site(tps=(2,), max_devices=1), load()))


# ---------------------------------------------------------------- the estimate


def test_the_shortlist_has_each_kind_of_pools_once_and_the_cheapest_first() -> None:
    planner = Planner(site(tps=(1, 2)), load())
    found = planner.shortlist()
    assert len(found) == len({candidate.kind for candidate in found}) == 2 * 2 + 2 * 2
    serving = [each for each in found if planner.estimate(each).attainment >= 0.9]
    assert [each.num_devices for each in serving] == sorted(each.num_devices for each in serving)
    for candidate in serving:  # none is larger than it must be
        if candidate.prefill is None and candidate.decode.num_workers > 1:
            fewer = Candidate(None, candidate.decode._replace(num_workers=candidate.decode.num_workers - 1))
            assert planner.estimate(fewer).attainment < 0.9


def test_one_mode_only() -> None:
    assert all(each.is_disaggregated for each in Planner(site(modes=(True,)), load()).shortlist())
    assert not any(each.is_disaggregated for each in Planner(site(modes=(False,)), load()).shortlist())


def test_a_small_load_is_not_disaggregated() -> None:
    asked = load(rate=0.1, kind=Lengths(200, 20))
    answer = best_pools(Planner(site(), asked))
    assert answer.best.candidate == Candidate(None, Pool(1, 1, 512))
    assert answer.is_met
    assert verdict(answer, asked) == (
        "do not disaggregate: 1x1 colocated, 512-token steps (1 device) meet the limits of 100.0 % of the requests; "
        "the other way takes 1x1 prefill + 1x1 decode (2 devices)"
    )
    assert price_per_million_output(answer.best, asked) == pytest.approx(2.0 / 3600 / 2.0 * 1e6)


def test_tight_limits_on_tokens_beside_long_prompts_are_disaggregated() -> None:
    asked = load(rate=10.0, ttft_ms=1500.0, tpot_ms=12.0, kind=Lengths(7000, 200))
    answer = best_pools(Planner(site(), asked))
    assert answer.is_met
    assert answer.best.candidate.is_disaggregated


def test_a_rate_that_cannot_be_served_is_answered_with_what_comes_closest() -> None:
    asked = load(rate=1000.0)
    answer = best_pools(Planner(site(max_devices=4), asked))
    assert not answer.is_met
    assert verdict(answer, asked).startswith("no pools within --max-gpus meet the limits for 90 % of the requests; ")


def test_the_report_is_plain_data() -> None:
    asked = load(rate=1000.0)
    planner = Planner(site(max_devices=4), asked)
    found = facts(planner)
    report = to_json(found, best_pools(planner), asked, H100.power_w)
    assert report["meets_limits"] is False
    assert report["best"]["estimate"]["mean_ttft_s"] is None  # infinite
    assert report["facts"]["kv_bytes_per_token"] == 131072
    assert [row["batch"] for row in report["facts"]["sweep"]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [row["fits"] for row in report["facts"]["sweep"]] == [True] * 8 + [False]
    assert (found.critical_batch, found.critical_batch_without_context) == (None, 296)
    assert found.hidden_from_tokens == 1


# ---------------------------------------------------------------- the search


def found_by(judge: Judge, max_judged: int = 200, max_devices: int = 32) -> Answer:
    return best_pools(Planner(site(max_devices=max_devices), load()), judge, max_judged)


def test_the_judge_is_believed_when_it_takes_more_than_the_estimate() -> None:
    answer = found_by(lambda candidate: judgement(1.0 if candidate.num_devices >= 9 else 0.05 * candidate.num_devices))
    assert answer.is_met
    assert answer.best.candidate.num_devices == 9


def test_the_judge_is_believed_when_it_takes_less() -> None:
    answer = found_by(lambda candidate: judgement(1.0 if candidate.num_devices >= 2 else 0.5))
    assert answer.is_met
    assert answer.best.candidate.num_devices == 2


def test_workers_are_moved_between_pools() -> None:
    def judge(candidate: Candidate) -> Judgement:
        prefill = candidate.prefill
        return judgement(1.0 if prefill and prefill.num_workers >= 3 and candidate.decode.num_workers >= 1 else 0.5)

    answer = found_by(judge)
    assert (answer.best.candidate.prefill, answer.best.candidate.decode.num_workers) == (Pool(3, 1, 2048), 1)
    assert answer.is_met


def test_of_equal_price_and_attainment_colocated_comes_first() -> None:
    answer = found_by(lambda candidate: judgement(0.991 if candidate.num_devices >= 4 else 0.5))
    assert not answer.best.candidate.is_disaggregated
    assert answer.best_other is not None
    assert answer.best_other.candidate.num_devices == 4


def test_no_candidate_is_judged_twice_and_not_more_than_allowed() -> None:
    asked: list[Candidate] = []

    def judge(candidate: Candidate) -> Judgement:
        asked.append(candidate)
        return judgement(0.1)

    answer = found_by(judge, max_judged=20, max_devices=64)
    assert len(asked) == len(set(asked)) == 20
    assert not answer.is_met


# ---------------------------------------------------------------- the simulator as the judge


def test_estimate_and_simulator_agree() -> None:
    asked = load()
    planner = Planner(site(), asked)
    requests, counted_from_s = steady_requests(asked)
    judge = SimulatedJudge(planner, requests, counted_from_s=counted_from_s)
    for candidate in (Candidate(Pool(3, 1, 2048), Pool(2, 1, 2048)), Candidate(None, Pool(5, 1, 2048))):
        estimate, simulated = planner.estimate(candidate), judge(candidate)
        assert simulated.attainment == pytest.approx(estimate.attainment, abs=0.02)
        assert simulated.mean_tpot_s == pytest.approx(estimate.mean_tpot_s, rel=0.1)
        assert simulated.mean_ttft_s == pytest.approx(estimate.mean_ttft_s, rel=0.35)
    overloaded = Candidate(Pool(2, 1, 2048), Pool(1, 1, 2048))
    assert judge(overloaded).attainment < 0.1
    assert planner.estimate(overloaded).attainment == 0.0


def test_pools_that_are_overloaded_serve_every_request_in_the_end() -> None:
    """A decode worker is held for a request that has others of its size before it in the queue."""
    asked = load()
    planner = Planner(site(), asked)
    requests, _ = steady_requests(asked)
    spec = SimulatedJudge(planner, requests).spec(Candidate(Pool(2, 1, 2048), Pool(1, 1, 2048)))
    cluster = SimulatedCluster(spec, [UserRequest(each) for each in requests.requests])
    assert cluster.advance(100_000.0)
    assert {record.status for record in cluster.users.records} == {"ok"}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(load(rate=20.0, kind=Lengths(1024, 64)), id="short"),
        pytest.param(
            load(rate=6.0, ttft_ms=1500.0, tpot_ms=12.0, kind=Lengths(6000, 64)), id="long", marks=pytest.mark.slow
        ),
    ],
)
def test_the_choice_is_within_three_percent_of_the_best_of_a_grid(asked: Load) -> None:
    planner = Planner(site(max_devices=4), asked)
    requests, counted_from_s = steady_requests(asked)
    judge = SimulatedJudge(planner, requests, counted_from_s=counted_from_s)
    seen: dict[Candidate, Judgement] = {}

    def remembered(candidate: Candidate) -> Judgement:
        if candidate not in seen:
            seen[candidate] = judge(candidate)
        return seen[candidate]

    answer = best_pools(planner, remembered, 12)
    grid = [Candidate(None, Pool(number, 1, budget)) for number in range(1, 5) for budget in (512, 2048)]
    grid += [
        Candidate(Pool(prefill, 1, 2048), Pool(decode, 1, 2048))
        for prefill in range(1, 4)
        for decode in range(1, 5 - prefill)
    ]
    serving = [each for each in grid if planner.is_met(remembered(each))]
    assert serving
    cheapest = min(planner.price(each) for each in serving)
    assert answer.is_met
    assert answer.best.price_per_hour <= 1.03 * cheapest
    best = max(remembered(each).attainment for each in serving if planner.price(each) == cheapest)
    assert answer.best.judgement.attainment >= 0.97 * best


def test_requests_count_when_the_pools_are_full() -> None:
    requests, counted_from_s = steady_requests(load(rate=100.0))
    assert counted_from_s == pytest.approx(256 * 0.025 + 0.5)
    assert len(requests.requests) == math.ceil(690 + 345)
    few, from_s = steady_requests(load(rate=1.0))
    assert len(few.requests) == 307
    assert from_s == pytest.approx(6.9)


# ---------------------------------------------------------------- lengths of scenarios


def test_lengths_of_unrelated_prompts() -> None:
    arrivals = ArrivalConfig(kind="uniform", rate_per_s=1.0, num_requests=2)
    requests = outline(RandomWorkload(isl=40, osl=8), arrivals, max_model_len=100).requests
    assert lengths_of(requests) == [Lengths(40, 8, 0)] * 2


def test_lengths_of_shared_prefixes() -> None:
    arrivals = ArrivalConfig(kind="uniform", rate_per_s=1.0, num_requests=3)
    workload = SharedPrefixWorkload(num_prefixes=1, prefix_tokens=40, own_tokens=10, osl=8)
    requests = outline(workload, arrivals, max_model_len=100).requests
    assert lengths_of(requests) == [Lengths(50, 8, 0), Lengths(50, 8, 32), Lengths(50, 8, 32)]


def test_lengths_of_conversations() -> None:
    arrivals = ArrivalConfig(kind="uniform", rate_per_s=1.0, num_requests=3)
    workload = MultiTurnWorkload(turns=3, new_tokens=10, osl=8)
    requests = outline(workload, arrivals, max_model_len=100).requests
    assert sorted(lengths_of(requests)) == [Lengths(10, 8, 0), Lengths(28, 8, 16), Lengths(46, 8, 32)]
