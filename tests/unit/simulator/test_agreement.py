"""Where the exact and the fast engine both run, they agree."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.loadtests.records import RequestRecord
from disagg.loadtests.verdict.goodput import Slo, evaluate
from disagg.loadtests.workload.workload import (
    MultiTurnWorkload,
    RandomWorkload,
    SharedPrefixWorkload,
    WorkloadConfig,
)
from disagg.router.config import RouterConfig
from disagg.simulator import cluster as cluster_module
from disagg.simulator.durations.overheads import Overheads, Sharing
from disagg.simulator.exact.exact_worker import ExactWorker
from disagg.simulator.fast.fast_slack import FastSlack
from disagg.simulator.world.settings import EngineKind
from disagg.simulator.world.users import Habits
from disagg.step_times.interface import StepWork
from tests.support.simulation import BYTES_PER_TOKEN, NO_LOCAL, LinearTimes, cluster_spec, planned, simulated

SLO = Slo(ttft_s=0.5, tpot_s=0.010)
LOOSE = Slo(ttft_s=1.0, tpot_s=0.020)
TIMES = LinearTimes(base_s=0.005, token_s=4e-4, decode_s=5e-4, context_s=1e-6)
VARIED = RandomWorkload(isl=(64, 900), osl=(8, 150))
FIXED = RandomWorkload(isl=512, osl=64)
LONG_ANSWERS = RandomWorkload(isl=512, osl=128)
TURNS = MultiTurnWorkload(turns=(2, 5), new_tokens=(30, 200), osl=(20, 100))
SHARED = SharedPrefixWorkload(num_prefixes=12, prefix_tokens=400, own_tokens=(20, 300), osl=(8, 80))
ANSWERS = RandomWorkload(isl=(64, 300), osl=(50, 200))
MESSAGES = Overheads(message_s=0.0005, step_s=0.0002)
SHARING = Sharing(
    prefill_by_prefill=0.06,
    prefill_by_decode=0.05,
    decode_by_prefill=0.04,
    decode_by_decode=0.2,
    update_s=5e-4,
    token_s=3e-4,
)
"""As on a machine of two cores."""
PREEMPTING = RouterConfig(local_prefill="never", decode_reserve_tokens=0, watermark=0)

Shape = dict[str, Any]
LARGER = {
    "preemption": 0.05,
    "one machine": 0.04,
    "one machine, colocated": 0.05,
    "slack, one machine": 0.04,
    "elastic": 0.05,
    "elastic, tight": 0.05,
    "elastic, long answers": 0.05,
}
"""Differences that are allowed."""
PAIR: Shape = {"prefill": 1, "decode": 1, "router": NO_LOCAL}
ELASTIC: Shape = {
    "workers": 2,
    "scheduling": "slack",
    "token_budget": 1024,
    "router": RouterConfig(policy="elastic"),
    "bandwidth_bytes_per_s": 1e9,
}
ROUND_ROBIN = RouterConfig(policy="round_robin", local_prefill="never")
SLACK: Shape = {"colocated": 2, "scheduling": "slack", "token_budget": 1024, "targets": LOOSE, "router": ROUND_ROBIN}
SMALL_CACHE: Shape = {**PAIR, "num_blocks": 250}
SHORT_OF_BLOCKS: Shape = {**PAIR, "router": PREEMPTING, "num_blocks": 120, "decode_reserve_tokens": 0}
SCENARIOS: dict[str, tuple[WorkloadConfig, float, Habits, Shape]] = {
    "pair": (VARIED, 2.0, Habits(), {**PAIR, "tail_tokens": 32}),
    "local prefill": (VARIED, 2.0, Habits(), {"prefill": 1, "decode": 1, "tail_tokens": 32}),
    "colocated": (VARIED, 1.5, Habits(), {"colocated": 1}),
    "prompts first": (VARIED, 1.5, Habits(), {"colocated": 1, "scheduling": "prefill_first"}),
    "static": (VARIED, 1.0, Habits(), {"colocated": 2, "scheduling": "static"}),
    "slack": (VARIED, 2.8, Habits(), SLACK),
    "slack, tight": (VARIED, 2.8, Habits(), {**SLACK, "targets": SLO}),
    "slack, all alike": (FIXED, 2.8, Habits(), {**SLACK, "targets": SLO}),
    "slack, unknown lengths": (VARIED, 2.8, Habits(max_tokens=600), SLACK),
    "slack, too much": (VARIED, 4.4, Habits(), SLACK),
    "slack, short pauses": (VARIED, 2.8, Habits(max_tokens=600), {**SLACK, "targets": SLO, "max_itl_ms": 18.0}),
    "slack, hopeless last": (VARIED, 3.6, Habits(), {**SLACK, "targets": Slo(ttft_s=0.5), "token_budget": 64}),
    "slack, placed by cost": (VARIED, 2.8, Habits(max_tokens=600), {**SLACK, "router": RouterConfig()}),
    "slack, one machine": (VARIED, 2.0, Habits(), {**SLACK, "sharing": SHARING}),
    "elastic": (VARIED, 2.8, Habits(max_tokens=600), {**ELASTIC, "targets": LOOSE}),
    "elastic, tight": (FIXED, 2.8, Habits(), {**ELASTIC, "targets": SLO}),
    "elastic, long answers": (LONG_ANSWERS, 2.8, Habits(max_tokens=600), {**ELASTIC, "targets": LOOSE}),
    "pair, hopeless last": (VARIED, 3.0, Habits(), {**PAIR, "scheduling": "slack", "targets": Slo(ttft_s=0.5)}),
    "conversations": (TURNS, 2.0, Habits(), {"colocated": 1, "block_size": 64, "num_blocks": 200}),
    "unknown lengths": (VARIED, 2.0, Habits(max_tokens=600), PAIR),
    "prefixes that are evicted": (SHARED, 3.0, Habits(), SMALL_CACHE),
    "round robin": (VARIED, 4.0, Habits(), {"prefill": 2, "decode": 2, "router": ROUND_ROBIN}),
    "one machine": (VARIED, 1.5, Habits(), {**PAIR, "sharing": SHARING}),
    "one machine, colocated": (VARIED, 1.5, Habits(), {"colocated": 2, "sharing": SHARING}),
    "preemption": (ANSWERS, 3.0, Habits(), {**SHORT_OF_BLOCKS, "swap_bytes": 1 << 24}),
}


SLOW = {
    "prompts first",
    "slack, unknown lengths",
    "unknown lengths",
    "elastic, long answers",
    "slack, tight",
    "slack, all alike",
    "slack, too much",
    "slack, short pauses",
    "slack, one machine",
    "one machine, colocated",
    "elastic, tight",
    "pair, hopeless last",
}
"""What others show in part; each takes a second or two."""


def run(engine: EngineKind, workload: WorkloadConfig, rate_per_s: float, habits: Habits, spec: dict[str, Any]) -> Any:
    shape = {"times": TIMES, "overheads": MESSAGES, "bandwidth_bytes_per_s": 1e7, **spec}
    requests = planned(workload, rate_per_s=rate_per_s, num_requests=200, targets=shape.pop("targets", None))
    return simulated(cluster_spec(engine=engine, **shape), requests, habits)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def figures(records: list[RequestRecord]) -> dict[str, float]:
    score = evaluate(records, SLO, 1.0)
    assert score.is_valid
    return {
        "ttft": mean([record.ttft_s for record in records if record.ttft_s is not None]),
        "tpot": mean([record.tpot_s for record in records if record.tpot_s is not None]),
        "good": score.num_good,
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SCENARIOS]
)
def test_the_fast_engine_agrees_with_the_exact_one(name: str) -> None:
    exact, fast = (figures(run(engine, *SCENARIOS[name]).records) for engine in ("exact", "fast"))
    assert 20 <= exact["good"] <= 195
    assert fast == pytest.approx(exact, rel=LARGER.get(name, 0.02))


def test_shared_hashes_change_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of 512 tokens, which 32 blocks share a hash of, are found as those whose blocks have one each."""
    workload = SharedPrefixWorkload(num_prefixes=6, prefix_tokens=512, own_tokens=(20, 200), osl=(8, 60))
    spec = {"prefill": 2, "decode": 2, "num_blocks": 4000}
    monkeypatch.setattr(cluster_module, "run_for", lambda num_tokens: 1)
    separate = run("fast", workload, 4.0, Habits(), spec)
    monkeypatch.setattr(cluster_module, "run_for", lambda num_tokens: 32)
    shared = run("fast", workload, 4.0, Habits(), spec)
    assert shared.records == separate.records
    assert shared.placements == separate.placements
    assert sum(record.cached_tokens for record in shared.records) > 50_000


@pytest.mark.parametrize(
    "name",
    [
        "round robin",
        "conversations",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("colocated", "unknown lengths")),
    ],
)
def test_exact_steps_that_are_taken_together_change_nothing(name: str) -> None:
    """Where placements do not depend on what workers report, all times are those of steps that are taken one by one."""
    workload, rate_per_s, habits, spec = SCENARIOS[name]
    spec = {**spec, "overheads": Overheads(message_s=0.0005, step_s=0.0002, token_s=0.0001)}
    together, one_by_one = (run("exact", workload, rate_per_s, habits, {**spec, "jump_s": s}) for s in (1.0, 0.0))
    assert together.records == one_by_one.records
    assert together.num_events < one_by_one.num_events


def test_a_jump_bends_with_the_step_times() -> None:
    """Steps that grow faster and faster with the context are not jumped over in one line."""

    class Quadratic:
        def step_s(self, work: StepWork) -> float:
            return 0.005 + 4e-4 * work.prefill_tokens + 1e-8 * work.decode_context**2

    workload = RandomWorkload(isl=100, osl=1000)
    results = []
    for engine in ("exact", "fast"):
        spec = cluster_spec(colocated=1, engine=engine, times=Quadratic())  # type: ignore[arg-type]
        results.append(simulated(spec, planned(workload, rate_per_s=1.0, num_requests=2)))
    exact, fast = results
    for one, other in zip(exact.records, fast.records, strict=True):
        assert other.token_times_s == pytest.approx(one.token_times_s, rel=0.002)


def test_the_exact_engine_is_the_real_one() -> None:
    cluster = cluster_module.SimulatedCluster(cluster_spec(colocated=1), [])
    (member,) = cluster._members.values()
    assert isinstance(member.worker, ExactWorker)
    assert type(member.worker.core).__module__ == "disagg.engine.core.engine_core"
    assert type(cluster.gateway.core).__module__ == "disagg.router.requests.router_core"


def test_decode_steps_are_jumped_over_while_no_prompt_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast engine looks again when the answer with the least slack may have saved enough, and misses nothing."""
    requests = planned(
        RandomWorkload(isl=(64, 512), osl=200), rate_per_s=20.0, num_requests=12, targets=Slo(tpot_s=0.006)
    )
    spec = cluster_spec(engine="fast", times=TIMES, colocated=1, scheduling="slack", token_budget=1024)
    jumping = simulated(spec, requests)
    monkeypatch.setattr(FastSlack, "num_alike", lambda self, most, growth_ms, until: 1)
    one_by_one = simulated(spec, requests)
    for one, other in zip(one_by_one.records, jumping.records, strict=True):
        assert other.token_times_s == pytest.approx(one.token_times_s, abs=1e-6)
    assert jumping.num_events < one_by_one.num_events / 2


@pytest.mark.parametrize("engine", ["exact", "fast"])
def test_workers_with_both_roles_hand_over(engine: EngineKind) -> None:
    workload, rate_per_s, habits, spec = SCENARIOS["elastic, long answers"]
    gather = {**spec, "router": RouterConfig(policy="elastic", decodes="gather")}
    result = run(engine, workload, rate_per_s, habits, gather)
    assert result.placements["pair"] >= 20
    assert result.kv_bytes_moved >= 20 * 400 * BYTES_PER_TOKEN
