"""Whole workloads on toy workers: what the policies make of shared prefixes and bursts, and what a loss leaves."""

import random
from collections.abc import Iterator

import pytest

from disagg.proto.ids import WorkerId
from disagg.router.api import RoutedRequest
from disagg.router.config import PolicyName, RouterConfig
from tests.support.router import EMPTY, reported_blocks, routed_request
from tests.unit.router.toy_cluster import ToyCluster

NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS, NUM_REQUESTS = 16, 1024, 64, 400
CACHE_BLOCKS = 10 * (PREFIX_TOKENS + OWN_TOKENS) // 16
"""Ten of the prefixes, each with the end of one prompt."""


def shared_prefixes(rate: float, seed: int = 1) -> Iterator[tuple[float, RoutedRequest]]:
    """Poisson arrivals; each prompt begins with one of the prefixes."""
    rng = random.Random(seed)
    when = 0.0
    for number in range(NUM_REQUESTS):
        when += rng.expovariate(rate)
        prefix = rng.randrange(NUM_PREFIXES)
        own = [1_000_000 + number * OWN_TOKENS + i for i in range(OWN_TOKENS)]
        prompt = [*range(prefix * PREFIX_TOKENS, (prefix + 1) * PREFIX_TOKENS), *own]
        yield when, routed_request(f"r{number}", prompt, max_tokens=16)


def run(policy: PolicyName, rate: float, **settings: object) -> ToyCluster:
    config = RouterConfig(policy=policy, **settings)  # type: ignore[arg-type]
    cluster = ToyCluster(["p0", "p1", "d0", "d1"], config, CACHE_BLOCKS)
    cluster.run(shared_prefixes(rate))
    assert list(cluster.ended.values()) == ["finished"] * NUM_REQUESTS
    assert cluster.core.holdings() == EMPTY
    assert cluster.core.check_integrity() == []
    return cluster


@pytest.mark.parametrize(
    ("local_prefill", "rate"),
    [
        ("auto", 8.0),
        ("never", 40.0),
        pytest.param("auto", 40.0, marks=pytest.mark.slow),
        pytest.param("never", 8.0, marks=pytest.mark.slow),
    ],
)
def test_joint_computes_at_most_half_of_what_round_robin_does(local_prefill: str, rate: float) -> None:
    """Local prefill counts too. At the higher rate the prefill workers are always busy with round robin."""
    joint = run("joint", rate, local_prefill=local_prefill)
    round_robin = run("round_robin", rate, local_prefill=local_prefill)
    assert joint.num_computed_tokens <= 0.5 * round_robin.num_computed_tokens
    assert sum(joint.ttft_s.values()) < 0.5 * sum(round_robin.ttft_s.values())


# ---------------------------------------------------------------- a burst


def burst(policy: PolicyName, **settings: object) -> ToyCluster:
    cluster = ToyCluster(["p0", "p1", "d0", "d1"], RouterConfig(policy=policy, **settings), CACHE_BLOCKS)  # type: ignore[arg-type]
    prompts = (range(n * 1000, n * 1000 + 300) for n in range(64))
    cluster.run((1.0, routed_request(f"r{n}", prompt, max_tokens=16)) for n, prompt in enumerate(prompts))
    assert list(cluster.ended.values()) == ["finished"] * 64
    return cluster


@pytest.mark.parametrize("policy", ["joint", "prefix", "least_loaded", "round_robin"])
@pytest.mark.parametrize("prefill_chunks", [2, 100])
def test_a_burst_of_distinct_prompts_spreads_evenly(policy: PolicyName, prefill_chunks: int) -> None:
    """With 100 chunks all are placed at once; with 2, as slots open one by one."""
    counts = burst(policy, local_prefill="never", prefill_chunks=prefill_chunks).num_placed
    assert counts["p0"] + counts["p1"] == counts["d0"] + counts["d1"] == 64
    assert abs(counts["p0"] - counts["p1"]) <= 2
    assert abs(counts["d0"] - counts["d1"]) <= 2


@pytest.mark.parametrize("prefill_chunks", [2, 100])
def test_a_burst_spreads_evenly_where_decode_workers_help_with_prompts(prefill_chunks: int) -> None:
    counts = burst("joint", prefill_chunks=prefill_chunks).num_placed
    assert counts["d0"] + counts["d1"] == 64
    assert abs(counts["p0"] - counts["p1"]) <= 2
    assert abs(counts["d0"] - counts["d1"]) <= 2


# ---------------------------------------------------------------- a loss


@pytest.mark.parametrize("victim", ["p0", "d0"])
def test_a_killed_worker_takes_its_entries_with_it_and_no_others(victim: str) -> None:
    cluster = ToyCluster(["p0", "p1", "d0", "d1"], RouterConfig(), CACHE_BLOCKS)
    index = cluster.core._fleet.index
    seen: list[str] = []

    def kill() -> None:
        others = {name: reported_blocks(index, WorkerId(name)) for name in cluster.workers if name != victim}
        assert reported_blocks(index, WorkerId(victim))
        cluster.lose(victim)
        assert reported_blocks(index, WorkerId(victim)) == frozenset()
        assert {name: reported_blocks(index, WorkerId(name)) for name in others} == others
        assert all(others.values())
        request = routed_request("x", range(PREFIX_TOKENS))
        assert WorkerId(victim) not in index.match(request.block_hashes)
        seen.append("killed")

    cluster.at(20.0, kill)
    cluster.at(25.0, lambda: cluster.come_up(victim))
    cluster.run(shared_prefixes(10.0))
    assert seen == ["killed"]
    assert list(cluster.ended.values()) == ["finished"] * NUM_REQUESTS
    assert (cluster.core.holdings(), cluster.core.check_integrity()) == (EMPTY, [])
    for worker in cluster.workers.values():
        cluster.report_now(worker)
        assert reported_blocks(index, WorkerId(worker.name)) == frozenset(worker.cache)
