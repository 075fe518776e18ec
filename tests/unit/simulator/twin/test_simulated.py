"""A twin in a simulated cluster whose load changes: it must end up with the better setting, in time."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest

from disagg.loadtests.verdict.goodput import Slo, meets
from disagg.loadtests.workload.arrivals import ArrivalConfig, due_times
from disagg.loadtests.workload.randomness import Stream
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.router.config import Decodes, RouterConfig
from disagg.simulator.cluster import SimulatedCluster
from disagg.simulator.durations.overheads import Overheads
from disagg.simulator.twin.comparison import Comparison
from disagg.simulator.twin.simulated import watch
from disagg.simulator.twin.twin import Twin
from disagg.simulator.world.settings import ClusterSpec
from disagg.simulator.world.users import UserRequest
from tests.support.simulation import LinearTimes, cluster_spec

TIMES = LinearTimes(base_s=0.005, token_s=0.0004, decode_s=0.0005, context_s=1e-6)
"""About a small model on one core a worker."""
SETTLES_S = 90.0


class Phase(NamedTuple):
    """A stationary load."""

    better: Decodes
    slo: Slo
    rate_per_s: float
    duration_s: float
    is_varied: bool


PHASES = (
    Phase("spread", Slo(ttft_s=0.5, tpot_s=0.05), 4.5, 120.0, is_varied=False),  # by 0.13
    Phase("split:1", Slo(ttft_s=1.0, tpot_s=0.012), 3.0, 240.0, is_varied=True),  # by 0.05 and 0.14
)


def spec(decodes: Decodes) -> ClusterSpec:
    return cluster_spec(
        workers=2,
        times=TIMES,
        router=RouterConfig(policy="elastic", decodes=decodes),
        bandwidth_bytes_per_s=1e10,
        latency_s=1e-4,
        overheads=Overheads(message_s=0.001, step_s=0.00025),
        token_budget=1024,
        scheduling="slack",
        num_blocks=2000,
    )


def schedule() -> list[UserRequest]:
    """Prompts of 512 and answers of 64 tokens; or log-normal and exponential with means of 512 and 96, not told."""
    found: list[UserRequest] = []
    start_s = 0.0
    for number, phase in enumerate(PHASES):
        draws = Stream("twin", number)
        for due_s in due_times(ArrivalConfig(rate_per_s=phase.rate_per_s, num_requests=2000, seed=number + 10)):
            if due_s >= phase.duration_s:
                break
            index, prompt, answer = len(found), 512, 64
            if phase.is_varied:
                prompt = min(2048, max(16, round(512 * math.exp(0.6 * draws.normal() - 0.18))))
                answer = min(768, max(2, round(1 + 95 * draws.exponential())))
            outlined = OutlinedRequest(
                index=index,
                due_s=start_s + due_s,
                parts=(PromptPart(prompt, ("prompt", index)),),
                max_tokens=answer,
            )
            found.append(UserRequest(outlined, phase.slo, 1024 if phase.is_varied else answer))
        start_s += phase.duration_s
    return found


@pytest.mark.slow
def test_after_a_change_of_the_load_the_better_setting_is_there_within_ninety_seconds() -> None:
    asked, seen = schedule(), list[Comparison]()
    clusters = {name: SimulatedCluster(spec(name), asked) for name in ("spread", "gather", "split:1")}
    twin = SimulatedCluster(spec("spread"), asked)
    watch(twin, Twin(), seen.append)
    records = {name: cluster.run().records for name, cluster in clusters.items()}
    records["twin"] = twin.run().records

    def attained(name: str, first_s: float, last_s: float) -> float:
        met = [meets(each, asked[each.index].targets) for each in records[name] if first_s <= each.due_s < last_s]
        return sum(met) / len(met)

    changes = [(each.at_s, each.chosen) for each in seen if each.is_change]
    assert [chosen for _, chosen in changes] == ["split:1"]
    change_s = PHASES[0].duration_s
    assert change_s < changes[0][0] <= change_s + SETTLES_S
    start_s = 0.0
    for phase in PHASES:
        first_s, last_s = start_s + SETTLES_S, start_s + phase.duration_s
        fixed = {name: attained(name, first_s, last_s) for name in clusters}
        assert max(fixed, key=fixed.__getitem__) == phase.better
        assert attained("twin", first_s, last_s) >= fixed[phase.better] - 0.03
        start_s = last_s
    # What the comparisons claim, once enough requests came.
    assert min(each.claim for each in seen) <= 0.03
