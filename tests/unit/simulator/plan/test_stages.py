"""Which stages and ranks a plan chooses for each pool, and why: memory, candidates, reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg.autoscaler.queueing import Lengths, prefill_estimate
from disagg.engine.cache_groups import PoolLimits
from disagg.engine.checkpoint.model_config import ExpertsConfig
from disagg.kernels.routing import Routing
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.arrivals import ArrivalConfig
from disagg.loadtests.workload.workload import RandomWorkload, outline
from disagg.proto.errors import ConfigError
from disagg.simulator.durations.devices import CPU_CORE, H100, L40S, Device
from disagg.simulator.durations.model_shapes import MODEL_SHAPES, ExpertsShape, ModelShape
from disagg.simulator.durations.parallelism import Parallelism
from disagg.simulator.durations.roofline import RooflineStepTimes
from disagg.simulator.durations.stages import StagedStepTimes
from disagg.simulator.plan.candidates import Answer, Candidate, Judgement, Pool
from disagg.simulator.plan.judge import SimulatedJudge, steady_requests
from disagg.simulator.plan.load import Load
from disagg.simulator.plan.memory import expert_choices, stage_counts, weight_bytes, worker_memory
from disagg.simulator.plan.pools import STAGED_SHARE, Planner
from disagg.simulator.plan.reasons import reasons
from disagg.simulator.plan.search import best_pools
from disagg.simulator.plan.workers import NUM_STAGED, Site
from disagg.step_times.interface import LinkTimes, StepTimes

LLAMA_8B, LLAMA_70B = MODEL_SHAPES["llama-3.1-8b"], MODEL_SHAPES["llama-3.1-70b"]
LIMITS = PoolLimits(max_num_seqs=64, token_budget=2048)
USUAL = Lengths(6000, 200)
PAIR = Candidate(Pool(2, 1, 8192), Pool(1, 1, 8192))


def planner(
    model: ModelShape = LLAMA_8B,
    device: Device = H100,
    *,
    tps: tuple[int, ...] = (1, 2, 4, 8),
    pps: tuple[int, ...] = (1, 2, 4),
    rate: float = 12.0,
    ttft_ms: float = 1500.0,
    tpot_ms: float = 15.0,
    lengths: Lengths = USUAL,
    modes: tuple[bool, ...] = (True, False),
) -> Planner:
    def times_of(parallelism: Parallelism) -> StepTimes:
        whole = RooflineStepTimes(model, device, tp=parallelism.tp, ep=parallelism.ep)
        return whole if parallelism.pp == 1 else StagedStepTimes(whole, parallelism.pp)

    site = Site(
        model=model,
        device=device,
        times_of=times_of,
        link=LinkTimes(bandwidth_bytes_per_s=50e9, latency_s=1e-4),
        tps=tps,
        pps=pps,
        token_budgets=(512, 2048, 8192),
        price_per_hour=2.0,
        max_devices=64,
        modes=modes,
    )
    slo = Slo(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)
    return Planner(site, Load(rate_per_s=rate, kinds=(lengths,), slo=slo))


# ---------------------------------------------------------------- memory


def test_the_stage_with_least_room_decides() -> None:
    """80 layers on two stages, embedding and head on the ends: both halves are equal but for the final norm."""
    memory = worker_memory(LLAMA_70B, H100, 4, limits=LIMITS, pp=2)
    assert memory.weight_bytes == pytest.approx(weight_bytes(LLAMA_70B) / 8, rel=1e-6)
    assert memory.kv_bytes_per_token == 327_680 / 4 / 2
    assert memory.kv_tokens == int((0.9 * 80e9 - 2e9 - memory.weight_bytes) // (327_680 / 8))


def test_the_weights_of_all_stages_are_those_of_the_model() -> None:
    tied = replace(LLAMA_8B, tied_embeddings=True)
    for model, copies in ((LLAMA_8B, 0), (tied, 1)):
        # A model of one layer a stage has nothing but its layer in the middle.
        four = [worker_memory(replace(model, num_layers=4), H100, limits=LIMITS, pp=pp).weight_bytes for pp in (1, 4)]
        layer = 2 * (218_103_808 + 2 * 4096)
        embedding = 2 * model.vocab_size * 4096
        assert four[0] == 4 * layer + (2 - copies) * embedding + 2 * 4096
        assert four[1] == layer + embedding + 2 * 4096  # the last stage: head and final norm


def test_groups_of_windows_have_the_blocks_of_the_tightest_stage() -> None:
    windows = replace(LLAMA_8B, windows=(512, 512, 512, 0) * 8)
    one, two = (worker_memory(windows, H100, limits=LIMITS, pp=pp) for pp in (1, 2))
    assert [group.window for group in two.groups] == [0, 512]
    assert two.kv_tokens > 2 * one.kv_tokens
    # Of two stages three steps of 2048 tokens are under way.
    assert [memory.groups[1].step_blocks for memory in (one, two)] == [128, 384]
    # All layers without a window on the second stage.
    uneven = worker_memory(replace(windows, windows=(512,) * 16 + (0,) * 16), H100, limits=LIMITS, pp=2)
    assert uneven.kv_tokens < two.kv_tokens


def test_stages_that_are_tried() -> None:
    assert stage_counts(LLAMA_8B, H100) == [1, 2, 4, 8]
    assert stage_counts(replace(LLAMA_8B, num_layers=3), H100) == [1, 2]
    assert stage_counts(LLAMA_8B, CPU_CORE) == [1]


# ---------------------------------------------------------------- candidates


def test_workers_that_decode_have_the_fewest_stages_that_fit() -> None:
    assert planner().decoders == [Parallelism(1), Parallelism(2), Parallelism(4), Parallelism(8)]
    # 141 GB on devices of 48 GB, of which 8 are in a node: four are enough as stages of one, or as ranks.
    found = planner(LLAMA_70B, L40S, tps=(1, 2), ttft_ms=60_000, tpot_ms=500, rate=0.1)
    assert found.decoders == [Parallelism(2, 2)]
    assert [str(pool) for pool in found.prefillers] == ["1x(pp 2 x tp 2)", "1x(pp 4)", "1x(pp 4 x tp 2)"]


def test_few_kinds_of_prefill_workers_have_more_stages() -> None:
    found = planner()
    assert [pool.parallelism for pool in found.prefillers[:4]] == found.decoders
    assert all(pool.pp > 1 for pool in found.prefillers[4:])
    assert len(found.prefillers) == 4 + NUM_STAGED
    assert len(found.shortlist()) == 4 * 3 + (4 + NUM_STAGED) * 4


def test_colocated_workers_and_one_stage_are_as_before() -> None:
    assert len(planner(modes=(False,)).prefillers) == 4
    assert len(planner(pps=(1,)).prefillers) == 4


def test_a_chunk_is_chosen_for_the_stages() -> None:
    """With a tight limit a prompt of 6000 tokens has to be on several stages at once, in chunks of 2048 or 512."""
    found = planner(ttft_ms=120.0, rate=1.0)
    staged = [pool for pool in found.prefillers if pool.pp > 1]
    assert all(pool.token_budget < 8192 for pool in staged if pool.pp == 4)


def test_stages_serve_as_many_prompts_as_devices_of_their_own_and_each_one_sooner() -> None:
    found = planner()
    four, one = found.worker(Parallelism(1, 4), 2048), found.worker(Parallelism(1), 8192)
    kind = found.load.kinds[0]
    assert four.busy_s(kind) == pytest.approx(one.busy_s(kind) / 4, rel=0.2)
    assert four.prompt_s(kind) < 0.6 * one.prompt_s(kind)
    (staged, single) = (prefill_estimate(found.load, each, number) for each, number in ((four, 1), (one, 4)))
    assert staged is not None
    assert single is not None
    assert staged[2] == pytest.approx(single[2], rel=0.2)


# ---------------------------------------------------------------- places among what is judged


class Strict:
    """A judge that goes by the estimate, and by which pools with and without stages attain less than that."""

    def __init__(self, planner: Planner, *, plain: float = 1.0, staged: float = 1.0) -> None:
        self.planner, self.plain, self.staged = planner, plain, staged
        self.asked: list[Candidate] = []

    def __call__(self, candidate: Candidate) -> Judgement:
        self.asked.append(candidate)
        share = self.staged if candidate.num_stages > 1 else self.plain
        judged = self.planner.as_judgement(candidate)
        return replace(judged, attainment=share * judged.attainment)


def judged(pps: tuple[int, ...], max_judged: int = 12, **shares: float) -> tuple[Strict, Answer]:
    """The plan of a load for which stages save devices by the estimate."""
    found = planner(LLAMA_70B, pps=pps, ttft_ms=2000.0, tpot_ms=40.0, rate=4.0, lengths=Lengths(4000, 300))
    judge = Strict(found, **shares)
    return judge, best_pools(found, judge, max_judged)


@pytest.mark.parametrize("max_judged", [1, 3, 12])
@pytest.mark.parametrize("shares", [{}, {"plain": 0.92}, {"plain": 0.85}, {"staged": 0.85}])
def test_kinds_with_more_stages_are_judged_behind_all_others(max_judged: int, shares: dict[str, float]) -> None:
    """So that no plan is worse than with one stage, and none takes much longer."""
    (one, plain), (several, answer) = (judged(pps, max_judged, **shares) for pps in ((1,), (1, 2, 4)))
    assert several.asked[: len(one.asked)] == one.asked
    more = several.asked[len(one.asked) :]
    assert all(candidate.num_stages > 1 for candidate in more)
    assert len(more) <= several.planner.most_staged(len(one.asked)) <= STAGED_SHARE * len(one.asked)
    assert one.planner.most_staged(12) == 0
    rank = several.planner.rank
    assert rank(answer.best) <= rank(plain.best)


def test_stages_that_save_devices_are_found() -> None:
    """Eight devices in place of twelve."""
    (_, plain), (several, answer) = (judged(pps) for pps in ((1,), (1, 2, 4)))
    assert str(plain.best.candidate) == "3x4 colocated, 512-token steps"
    assert str(answer.best.candidate) == "1x(pp 4) prefill + 1x4 decode"
    assert several.asked[-1] == answer.best.candidate


def test_the_search_goes_on_from_pools_with_more_stages_that_miss_the_limits() -> None:
    """No other pools meet the limits. A worker more is tried."""
    judge, answer = judged((1, 2, 4), plain=0.5, staged=0.91)
    staged = [str(each) for each in judge.asked if each.num_stages > 1]
    assert staged[:2] == ["1x(pp 4) prefill + 1x4 decode", "2x(pp 4) prefill + 1x4 decode"]
    assert str(answer.best.candidate) == staged[1]


def test_what_can_be_no_better_is_not_judged() -> None:
    """On an H100 stages need as many devices, and all requests meet their limits without."""
    found = planner()
    judge = Strict(found)
    answer = best_pools(found, judge, 12)
    assert answer.best.candidate.num_stages == 1
    staged = [each for each in judge.asked if each.num_stages > 1]
    assert all(found.price(each) <= answer.best.price_per_hour for each in staged)


# ---------------------------------------------------------------- whole experts


def test_whole_experts_are_a_choice_where_ranks_divide_them() -> None:
    config = ExpertsConfig(routing=Routing(num_experts=16, top_k=2), intermediate_size=1001)
    model = replace(LLAMA_8B, experts=ExpertsShape(config=config, num_layers=32))
    assert [expert_choices(model, tp) for tp in (1, 2, 3)] == [[False], [True], []]
    assert expert_choices(LLAMA_8B, 2) == [False]
    found = planner(model, tps=(1, 2), tpot_ms=50.0)
    assert found.decoders == [Parallelism(1), Parallelism(2, 1, True)]
    assert str(Pool(3, 2, 512, ep=True)) == "3x(tp 2 with ep)"
    with pytest.raises(ConfigError, match="1001 columns of an expert"):
        model.check_tp(2)


def test_the_quicker_of_whole_and_divided_experts_is_taken() -> None:
    config = ExpertsConfig(routing=Routing(num_experts=16, top_k=2), intermediate_size=1024)
    model = replace(LLAMA_8B, experts=ExpertsShape(config=config, num_layers=32))
    found = planner(model, tps=(4,), tpot_ms=50.0)
    times = {ep: found._workers._token_s(Parallelism(4, 1, ep)) for ep in (False, True)}
    assert found.decoders == [Parallelism(4, 1, times[True] < times[False])]


# ---------------------------------------------------------------- the answer


def test_devices_without_a_fast_link_take_stages_for_prompts() -> None:
    """PCIe: an all-reduce of 6000 rows takes longer than the layers between two of them."""
    found = planner(LLAMA_8B, L40S, ttft_ms=250.0, tpot_ms=60.0, rate=4.0)
    answer = best_pools(found)
    assert answer.is_met
    prefill = answer.best.candidate.prefill
    assert prefill is not None
    assert (prefill.tp, prefill.pp) == (1, 4)
    why = reasons(found, answer.best)
    assert why[0].startswith("prefill with pp 4: a prompt of 6000 tokens takes ")
    assert "of which filling and draining the stages " in why[0]
    assert "; with tp 4 " in why[0]
    assert "all-reduces within a node " in why[0]
    assert why[1].startswith("decode with tp ")


def test_colocated_pools_have_one_reason() -> None:
    found = planner(rate=0.1, lengths=Lengths(200, 20), modes=(False,))
    (why,) = reasons(found, best_pools(found).best)
    assert why.startswith("colocated with tp 1: a token of 1 sequences takes 7.")
    assert "; with tp 2 " in why


def test_nothing_is_compared_with_that_is_not_searched() -> None:
    """One rank of a processor core, whose nodes have one."""
    found = planner(tps=(1,), pps=(1,))
    prefill, decode = reasons(found, found.judged(PAIR, found.as_judgement(PAIR)))
    assert prefill == "prefill with tp 1: a prompt of 6000 tokens takes 138 ms"
    assert ";" not in decode


def test_the_judge_takes_models_whose_token_is_larger_than_a_usual_payload() -> None:
    """4.7 MB of KV a token, as OPT-175B has it."""
    wide = replace(LLAMA_8B, num_layers=36, num_heads=128, num_kv_heads=128, head_dim=256)
    found = planner(wide, tps=(8,), pps=(1,), rate=0.1, tpot_ms=100.0, lengths=Lengths(200, 20))
    requests, _ = steady_requests(found.load)
    pools = SimulatedJudge(found, requests).spec(Candidate(Pool(1, 8, 512), Pool(1, 8, 512))).pools
    assert [pool.worker.transfer.chunk_bytes for pool in pools] == [2 * 36 * 128 * 256 * 2] * 2


def test_the_simulator_judges_stages() -> None:
    """As many prompts are computed as by one worker a device, each one sooner."""
    found = planner(rate=10.0, lengths=Lengths(6000, 20))
    arrivals = ArrivalConfig(kind="poisson", rate_per_s=10.0, num_requests=40)
    judge = SimulatedJudge(found, outline(RandomWorkload(isl=6000, osl=20), arrivals, max_model_len=8192))
    pairs = [Candidate(pool, Pool(2, 1, 8192)) for pool in (Pool(1, 1, 2048, pp=4), Pool(4, 1, 8192))]
    assert [judge.spec(pair).pools[0].worker.step_tokens for pair in pairs] == [5 * 2048, 8192]
    staged, single = map(judge, pairs)
    assert staged.ttft_attainment == single.ttft_attainment == 1.0
    assert staged.mean_ttft_s < single.mean_ttft_s
