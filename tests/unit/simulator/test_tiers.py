"""Tiers of simulated workers: the real tiers, whose copies and files take time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from disagg.engine.config import DiskTier, TierOptions
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.proto.messages import EXTENT_TOKENS
from disagg.router.telemetry.recent_load import load_of
from disagg.simulator.cluster import Result, SimulatedCluster
from disagg.simulator.durations.tier_times import TierTimes
from disagg.simulator.world.settings import ClusterSpec, Fault
from disagg.simulator.world.users import UserRequest
from tests.support.simulation import BYTES_PER_TOKEN, NO_LOCAL, LinearTimes, asked, cluster_spec, simulated

PROMPT_TOKENS = 512
NUM_BLOCKS = 56
"""Of 16 tokens: a prompt, and the half of them that loads may take, are fewer; two prompts are more."""
NUM_LOADED = 3
"""Extents of a prompt that can be loaded: at least one token is computed."""
EXTENT_BYTES = EXTENT_TOKENS * BYTES_PER_TOKEN
TIMES = TierTimes(host_bytes_per_s=1e7, disk_bytes_per_s=4e6, disk_latency_s=0.001)
COPY_S = EXTENT_BYTES / 1e7
FILE_S = 0.001 + EXTENT_BYTES / 4e6
STEP_S = LinearTimes().base_s + (PROMPT_TOKENS - NUM_LOADED * EXTENT_TOKENS) * LinearTimes().token_s
"""The step of a prompt whose prefix was loaded."""
MANY_BYTES = 100 * EXTENT_BYTES
HOST = TierOptions(host_bytes=MANY_BYTES, min_tokens=128)
DISK = TierOptions(disk=DiskTier(path="/nowhere", bytes=MANY_BYTES), min_tokens=128)
BOTH = TierOptions(host_bytes=MANY_BYTES, disk=DISK.disk, min_tokens=128)


def _spec(tiers: TierOptions | None, **settings: Any) -> ClusterSpec:
    """One worker, whose device cache has nothing left of a prompt after two others."""
    return replace(cluster_spec(colocated=1, num_blocks=NUM_BLOCKS, tiers=tiers, **settings), tier_times=TIMES)


def _prompts(*chosen: tuple[float, int]) -> list[UserRequest]:
    """Requests (due, number of the prompt), each with an answer of one token."""
    return [
        UserRequest(
            OutlinedRequest(
                index=index, due_s=due_s, parts=(PromptPart(PROMPT_TOKENS, ("prompt", number)),), max_tokens=1
            )
        )
        for index, (due_s, number) in enumerate(chosen)
    ]


def _ttft_s(result: Result) -> float:
    found = result.records[-1].ttft_s
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("tiers", "cached", "ttft_s"),
    [
        (None, 0, 0.010 + 0.512),
        (HOST, NUM_LOADED * EXTENT_TOKENS, NUM_LOADED * COPY_S + STEP_S),
        # The first file is read alone; the copy of each is made while the next one is read.
        (DISK, NUM_LOADED * EXTENT_TOKENS, NUM_LOADED * FILE_S + COPY_S + STEP_S),
        (BOTH, NUM_LOADED * EXTENT_TOKENS, NUM_LOADED * COPY_S + STEP_S),
    ],
    ids=["none", "host", "disk", "both"],
)
def test_a_prefix_that_was_evicted_is_loaded_from_a_tier(tiers: TierOptions | None, cached: int, ttft_s: float) -> None:
    result = simulated(_spec(tiers), _prompts((0.0, 0), (10.0, 1), (20.0, 2), (30.0, 0)))

    assert [record.cached_tokens for record in result.records] == [0, 0, 0, cached]
    assert _ttft_s(result) == pytest.approx(ttft_s)


def test_a_tier_that_takes_longer_than_computing_is_read_once() -> None:
    """The first load shows how long a copy takes, and ends when it is late."""
    spec = replace(_spec(HOST), tier_times=TierTimes(host_bytes_per_s=EXTENT_BYTES / 0.2))
    result = simulated(spec, _prompts((0.0, 0), (10.0, 1), (20.0, 2), (30.0, 0), (40.0, 1)))

    assert [record.cached_tokens for record in result.records] == [0, 0, 0, 3 * EXTENT_TOKENS, 0]
    assert _ttft_s(result) == pytest.approx(0.010 + 0.512)


@pytest.mark.parametrize(("tiers", "cached"), [(HOST, 0), (DISK, NUM_LOADED * EXTENT_TOKENS)], ids=["host", "disk"])
def test_a_worker_that_comes_back_finds_its_files_and_no_memory(tiers: TierOptions, cached: int) -> None:
    fault = Fault(at_s=5.0, worker_id="colocated-0", back_after_s=1.0)
    result = simulated(_spec(tiers, faults=[fault]), _prompts((0.0, 0), (20.0, 0)))

    assert [record.cached_tokens for record in result.records] == [0, cached]


def test_the_router_learns_what_tiers_hold_and_how_long_they_take() -> None:
    """Two prompts come at a time, each for one of two workers. They come back in the other order, and each is placed
    where its prefix can be loaded."""
    spec = cluster_spec(prefill=2, decode=1, num_blocks=NUM_BLOCKS, tiers=HOST, router=NO_LOCAL)
    spec = replace(spec, tier_times=TIMES)
    order = [0, 1, 2, 3, 4, 5, 6, 7, 1, 0, 3, 2, 5, 4]
    cluster = SimulatedCluster(spec, _prompts(*((10.0 * (index // 2), prompt) for index, prompt in enumerate(order))))
    result = cluster.run()

    assert result.problems == []
    assert [record.cached_tokens for record in result.records[8:]] == [NUM_LOADED * EXTENT_TOKENS] * 6
    workers = load_of(cluster.gateway.core.view(cluster.loop.now), (), cluster.loop.now).workers
    assert [[tier.name for tier in worker.tiers] for worker in workers if worker.worker_id == "prefill-0"] == [["host"]]


def test_the_same_run_twice_is_the_same() -> None:
    requests = _prompts(*((0.3 * index, index * 5 % 7) for index in range(40)))

    first, second = (simulated(_spec(BOTH), requests) for _ in range(2))

    assert first.records == second.records
    assert first.num_events == second.num_events


def test_the_fast_engine_refuses_tiers() -> None:
    with pytest.raises(ValueError, match=r"^kv_cache.tiers: the fast engine knows no tiers; take the exact one$"):
        _spec(HOST, engine="fast")


def test_without_tiers_no_worker_reports_any() -> None:
    cluster = SimulatedCluster(_spec(None), asked((0.0, 100, 1)))
    cluster.run()

    assert cluster.gateway.core.view(cluster.loop.now).workers[0].info.tiers == ()
