"""The policies, on reports of a made-up cluster whose load is known."""

from __future__ import annotations

import pytest

from disagg.autoscaler.config import AutoscalerOptions
from disagg.autoscaler.demand import Arrivals
from disagg.autoscaler.policies import make_policy
from disagg.autoscaler.policy import Observation, Policy, PoolLimits, PoolObservation
from disagg.proto.autoscaling import Decision, LoadReport, RequestSample, WorkerSample
from disagg.proto.ids import Incarnation, WorkerId
from disagg.proto.messages import KvLayout, StepCoefficients

STEPS = StepCoefficients(5.0, 0.4, 1e-4, 0.5, 1e-3)
LAYOUT = KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=23_040)
LOOK_S = 5.0


class World:
    """A cluster that does at once what its policy decides; requests come evenly."""

    def __init__(self, policy: Policy, pools: dict[str, int], *, output_tokens: int = 200) -> None:
        self.policy, self.sizes = policy, dict(pools)
        self.now, self.arrived = 1000.0, 0.0
        self.output_tokens = output_tokens
        self.queued = 0
        self.blocks_used = 0

    def look(self, rate: float) -> Decision:
        self.now += LOOK_S
        self.arrived += rate * LOOK_S
        sample = RequestSample(1.0, 1500, 0, self.output_tokens, self.output_tokens, 3.0, 0.02)
        workers = tuple(
            WorkerSample(
                WorkerId(f"{pool}-{n}"), Incarnation("i"), 4000, 16, 64, 512, LAYOUT, 0, 0, self.blocks_used, STEPS
            )
            for pool, size in self.sizes.items()
            for n in range(size)
        )
        report = LoadReport(
            num_arrived=round(self.arrived),
            num_queued=self.queued,
            num_running=0,
            requests=(sample,) * 20 if self.arrived else (),
            workers=workers,
        )
        pools = {name: PoolObservation(desired=size, ready=size) for name, size in self.sizes.items()}
        decision = self.policy.decide(Observation(reports={"g": report}, pools=pools), self.now)
        self.sizes |= decision.sizes
        return decision

    def after(self, seconds: float, rate: float) -> dict[str, int]:
        for _ in range(round(seconds / LOOK_S)):
            self.look(rate)
        return self.sizes


def made(min_size: int = 1, *, policy: str = "attainment", pools: tuple[str, ...] = ("prefill", "decode")) -> Policy:
    options = AutoscalerOptions(policy="threshold" if policy == "threshold" else "attainment")
    return make_policy(options, {pool: PoolLimits(min_size=min_size, max_size=10) for pool in pools})


def test_pools_follow_the_rate_up_and_down() -> None:
    world = World(made(), {"prefill": 1, "decode": 1})
    assert world.after(200, 1.0) == {"prefill": 2, "decode": 1}
    assert world.after(60, 4.0) == {"prefill": 4, "decode": 3}
    assert world.after(400, 1.0) == {
        "prefill": 2,
        "decode": 2,
    }  # one decode worker is enough up to 1.09, less the margin


def test_decode_grows_alone_where_answers_become_longer() -> None:
    world = World(made(), {"prefill": 2, "decode": 1})
    assert world.after(200, 1.0) == {"prefill": 2, "decode": 1}
    world.output_tokens = 800
    assert world.after(60, 1.0) == {"prefill": 2, "decode": 4}


def test_nothing_is_removed_before_it_has_been_enough_for_a_while() -> None:
    world = World(made(), {"prefill": 5, "decode": 3})
    assert world.after(100, 1.0) == {"prefill": 5, "decode": 3}
    assert world.after(100, 1.0) == {"prefill": 2, "decode": 2}


def test_a_queue_asks_for_more() -> None:
    world = World(made(), {"prefill": 2, "decode": 1})
    world.after(200, 1.0)
    world.queued = 60
    assert world.look(1.0).sizes == {"prefill": 3, "decode": 3}


def test_pools_are_emptied_and_come_back_with_the_first_request() -> None:
    world = World(made(0), {"prefill": 1, "decode": 1})
    world.after(100, 1.0)
    assert world.after(295, 0.0) == {"prefill": 1, "decode": 1}
    assert world.after(10, 0.0) == {"prefill": 0, "decode": 0}
    assert world.after(600, 0.0) == {"prefill": 0, "decode": 0}
    assert min(world.look(0.4).sizes.values()) >= 1


def test_nothing_is_changed_before_anything_was_measured() -> None:
    world = World(made(), {"prefill": 3, "decode": 2})
    assert world.after(300, 0.0) == {"prefill": 3, "decode": 2}
    assert world.look(0.0).pools[0].reason == "nothing was measured yet"


def test_the_reason_and_what_would_change_it_are_told() -> None:
    world = World(made(), {"prefill": 1, "decode": 1})
    world.after(200, 1.0)
    pool = world.look(1.0).pools[1]
    assert pool.reason.startswith("1 requests/s arrive")
    assert pool.change.endswith("min_size is 1")
    assert pool.change.startswith("more from 1.")


@pytest.mark.parametrize(("used", "wanted"), [(1400, 2), (2800, 2), (4000, 3)])
def test_the_threshold_is_the_formula_of_the_pod_autoscaler(used: int, wanted: int) -> None:
    """2 workers at 35, 70 and 100 % of KV in use, for a target of 70 %; fewer only after a while."""
    world = World(made(policy="threshold", pools=("colocated",)), {"colocated": 2})
    world.blocks_used = used
    assert world.look(1.0).sizes == {"colocated": wanted}


def test_fewer_by_the_threshold_only_after_a_while() -> None:
    world = World(made(policy="threshold", pools=("colocated",)), {"colocated": 2})
    world.blocks_used = 2800
    world.look(1.0)
    world.blocks_used = 1400
    assert world.after(115, 1.0) == {"colocated": 2}
    assert world.after(15, 1.0) == {"colocated": 1}


# ---------------------------------------------------------------- demand


def counted(rates: list[float]) -> tuple[Arrivals, float]:
    arrivals, total, now = Arrivals(), 0.0, 0.0
    for rate in rates:
        now += LOOK_S
        total += rate * LOOK_S
        arrivals.take({"g": LoadReport(num_arrived=round(total), num_queued=0, num_running=0)}, now)
    return arrivals, now


def test_a_jump_is_seen_within_a_quarter_of_a_minute() -> None:
    arrivals, now = counted([4.0] * 40 + [12.0] * 3)
    assert arrivals.rate(now, 30.0).level == pytest.approx(12.0)


def test_a_trend_is_continued() -> None:
    arrivals, now = counted([4.0 + 0.1 * step for step in range(60)])
    rate = arrivals.rate(now, 50.0)
    assert rate.level == pytest.approx(10.0, abs=0.2)
    assert rate.forecast == pytest.approx(11.0, abs=0.2)


def test_a_gateway_that_starts_again_counts_from_its_start() -> None:
    arrivals, now = counted([4.0] * 10)
    arrivals.take({"g": LoadReport(num_arrived=3, num_queued=0, num_running=0)}, now + LOOK_S)
    assert arrivals.rate(now + LOOK_S, 0.0).level < 4.0
