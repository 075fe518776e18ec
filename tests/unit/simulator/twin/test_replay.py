"""From what a gateway told to a simulated run."""

from __future__ import annotations

import msgspec
import pytest

from disagg.engine.config import DiskTier, TierOptions
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.workload.workload import PromptPart
from disagg.proto.messages import EXTENT_TOKENS, KvLayout, StepCoefficients, WindowKv
from disagg.router.telemetry.recent_load import TierCapacity
from disagg.simulator.twin.replay import parts_of, replay, requests_of, spec_of
from disagg.step_times.interface import StepWork
from tests.support.twins import WORKERS, arrival, evenly, load

STEPS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)


def test_equal_marks_are_equal_parts_and_the_rest_is_its_own() -> None:
    assert parts_of((7, 8), 40, 3) == (
        PromptPart(16, ("mark", 7)),
        PromptPart(16, ("mark", 8)),
        PromptPart(8, ("own", 3)),
    )
    assert parts_of((), 40, 3) == (PromptPart(40, ("own", 3)),)
    assert parts_of((7, 8), 32, 3) == (PromptPart(16, ("mark", 7)), PromptPart(16, ("mark", 8)))
    # Cut to less than its marks are for.
    assert parts_of((7, 8), 20, 3) == (PromptPart(16, ("mark", 7)), PromptPart(4, ("own", 3)))


def test_answers_that_are_not_complete_have_the_mean_length_or_what_is_there() -> None:
    arrivals = [
        arrival(10.0, output_tokens=20, most_output_tokens=100),
        arrival(11.0, output_tokens=40, most_output_tokens=100),
        arrival(12.0, output_tokens=3, is_complete=False, most_output_tokens=100),
        arrival(13.0, output_tokens=90, is_complete=False, most_output_tokens=100),
        arrival(14.0, output_tokens=0, is_complete=False, most_output_tokens=10),
    ]
    asked = requests_of(arrivals, WORKERS, 1.0)
    assert [each.outlined.max_tokens for each in asked] == [20, 40, 30, 90, 10]
    assert [each.max_tokens for each in asked] == [100, 100, 100, 100, 10]
    assert [each.targets for each in asked] == [Slo(ttft_s=2.0, tpot_s=0.02)] * 5


def test_a_higher_rate_is_the_same_requests_sooner() -> None:
    arrivals = evenly(3, start_s=50.0, gap_s=2.3)
    assert [round(each.outlined.due_s, 9) for each in requests_of(arrivals, WORKERS, 1.0)] == [0.0, 2.3, 4.6]
    assert [round(each.outlined.due_s, 9) for each in requests_of(arrivals, WORKERS, 1.15)] == [0.0, 2.0, 4.0]


def test_what_no_worker_could_hold_is_cut() -> None:
    found = requests_of([arrival(0.0, prompt_tokens=5000, most_output_tokens=500)], WORKERS, 1.0)
    assert found[0].outlined.num_prompt_tokens + found[0].outlined.max_tokens == 4096


def test_windows_and_experts_are_those_of_the_workers() -> None:
    window = WindowKv(window=512, bytes_per_token=900)
    steps = STEPS._replace(experts_ms=4.0, expert_share=0.25)
    worker = msgspec.structs.replace(WORKERS[0], windows=(window,), steps=steps)
    spec = spec_of(load([], 0.0, workers=[worker]), "spread")
    assert spec.kv_layout == KvLayout.sized(1000, [window])
    (pool,) = spec.pools
    assert pool.expert_share == 0.25
    assert pool.times.step_s(StepWork(0, 0, 2, 0)) * 1e3 == pytest.approx(5.0 + 2 * 0.5 + 4.0 * 0.4375)
    arrivals = evenly(3, prompt_tokens=700)
    assert replay(load(arrivals, 3.0, workers=[worker, worker]), arrivals, 0, "spread", 1.0) == [
        (0, True),
        (1, True),
        (2, True),
    ]


def test_tiers_and_fetches_are_those_of_the_workers() -> None:
    tiers = (
        TierCapacity(name="host", num_bytes=1 << 30, extent_ms=0.5),
        TierCapacity(name="disk", num_bytes=1 << 31, extent_ms=4.0),
    )
    worker = msgspec.structs.replace(WORKERS[0], tiers=tiers, fetches=True)
    slower = msgspec.structs.replace(worker, tiers=(msgspec.structs.replace(tiers[0], extent_ms=2.0),))
    spec = spec_of(load([], 0.0, workers=[worker, slower, WORKERS[1]]), "spread")

    first, second, third = (pool.worker for pool in spec.pools)
    disk = DiskTier(path="simulated", bytes=1 << 31)
    assert first.tiers == TierOptions(host_bytes=1 << 30, disk=disk)
    assert second.tiers == TierOptions(host_bytes=1 << 30)
    assert (third.tiers, first.fetch, third.fetch) == (None, True, False)
    assert spec.tier_times.copy_s(EXTENT_TOKENS * 1000) == pytest.approx(0.002)
    assert spec.tier_times.file_s(EXTENT_TOKENS * 1000) == pytest.approx(0.004)
    arrivals = evenly(3, prompt_tokens=700)
    assert len(replay(load(arrivals, 3.0, workers=[worker, slower]), arrivals, 0, "spread", 1.0)) == 3


def test_each_worker_has_its_own_step_times() -> None:
    slow = msgspec.structs.replace(WORKERS[1], steps=STEPS._replace(base_ms=9.0))
    spec = spec_of(load([], 0.0, workers=[WORKERS[0], slow]), "gather")
    assert [(pool.name, pool.size, pool.num_blocks) for pool in spec.pools] == [
        ("worker0", 1, 1000),
        ("worker1", 1, 1000),
    ]
    assert [pool.times.base_ms for pool in spec.pools] == [5.0, 9.0]  # type: ignore[attr-defined]  # of `LinearSteps`
    assert (spec.router.policy, spec.router.decodes) == ("elastic", "gather")
    assert spec.pools[0].worker.scheduling == "slack"


def test_a_replay_counts_those_with_targets_behind_the_lead_in() -> None:
    arrivals = [*evenly(6, gap_s=1.0), arrival(6.0, ttft_s=None, tpot_s=None), arrival(7.0, ttft_s=0.01)]
    found = replay(load(arrivals, 8.0), arrivals, 2, "spread", 1.0)
    assert found == [(2, True), (3, True), (4, True), (5, True), (7, False)]


def test_what_has_not_ended_in_time_is_missed() -> None:
    # Of 40 prompts of 200 ms that come at once two workers compute 20 in two seconds, and nothing goes on after that.
    arrivals = evenly(40, gap_s=0.0)
    met = [is_met for _, is_met in replay(load(arrivals, 1.0), arrivals, 0, "spread", 1.0)]
    assert 10 <= sum(met) <= 20
