"""Workers of several stages in whole runs: a step takes 16 ms, and 1 ms for each prompt token and 2 ms for each decode,
divided evenly among the stages. Times follow by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from disagg.engine.cache_groups import PoolLimits, window_pools
from disagg.proto.messages import KvLayout, WindowKv
from disagg.simulator.durations.overheads import Sharing
from disagg.simulator.exact.exact_engine import register
from disagg.simulator.exact.timed_runner import TimedRunner
from disagg.simulator.fast.fast_room import FastRoom
from disagg.simulator.world.settings import ClusterSpec
from disagg.simulator.world.slow_times import SlowTime
from disagg.simulator.world.surroundings import Answers
from disagg.step_times.interface import StepWork
from tests.support.simulation import NO_LOCAL, LinearTimes, asked, cluster_spec, simulated


class EvenStages(LinearTimes):
    """As many stages as a class says, each with an equal part of a step."""

    num_stages = 2

    def stages_s(self, work: StepWork) -> tuple[float, ...]:
        return (self.step_s(work) / self.num_stages,) * self.num_stages


def spec(engine: str = "fast", **pools: Any) -> ClusterSpec:
    return cluster_spec(engine=engine, times=EvenStages(base_s=0.016), token_budget=64, **pools)  # type: ignore[arg-type]


def times(spec: ClusterSpec, *requests: tuple[float, int, int]) -> list[list[float]]:
    result = simulated(spec, asked(*requests))
    assert result.problems == []
    return [[round(time_s, 9) for time_s in record.token_times_s] for record in result.records]


def test_chunks_of_a_prompt_are_under_way_at_once() -> None:
    """Three chunks of 80 ms in two stages: (3 + 2 - 1) * 40 ms. A token passes both stages: 18 ms."""
    assert times(spec(colocated=1), (0.0, 192, 3)) == [[0.160, 0.178, 0.196]]


def test_prompts_follow_each_other_through_the_stages_of_a_prefill_worker() -> None:
    found = times(spec(prefill=1, decode=1, router=NO_LOCAL), *[(0.0, 64, 1)] * 6)
    assert sorted(first for (first,) in found) == [0.080, 0.120, 0.160, 0.200, 0.240, 0.280]


def test_a_decode_waits_until_no_step_is_under_way() -> None:
    """The first prompt ends at 80 ms, the second one at 120; then both decode, 20 ms."""
    assert times(spec(colocated=1), (0.0, 64, 2), (0.0, 64, 2)) == [[0.080, 0.140], [0.120, 0.140]]


def test_a_prompt_beside_decodes_passes_the_stages_alone() -> None:
    """The request decodes from 80 ms on; the step from 98 ms on has a token of it and three blocks of the prompt, 16 +
    48 + 2 ms, the one behind it the fourth block, 16 + 16 + 2 ms."""
    found = times(spec(colocated=1), (0.0, 64, 5), (0.085, 64, 1))
    assert found == [[0.080, 0.098, 0.164, 0.198, 0.216], [0.198]]


def test_kv_goes_out_behind_the_last_stage() -> None:
    """A prompt of two chunks ends at 120 ms. Its KV, 128,000 bytes at 100 MB/s, is one payload, which goes out then;
    the decode worker's step takes 18 ms."""
    (found,) = times(spec(prefill=1, decode=1, router=NO_LOCAL), (0.0, 128, 2))
    assert found == [0.120, pytest.approx(0.120 + 0.001_28 + 0.018)]


def test_many_requests_leave_nothing_behind() -> None:
    requests = [(0.01 * number, 40 + 7 * (number % 9), 1 + number % 5) for number in range(60)]
    found = times(spec(prefill=2, decode=1), *requests)
    assert [len(each) for each in found] == [output for _, _, output in requests]


def test_what_is_not_simulated_of_stages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^pools.colocated: the exact engine knows no stages; take the fast one$"):
        spec(engine="exact", colocated=1)
    for changes in ({"sharing": Sharing()}, {"slow_times": (SlowTime(begins_s=0.0, factor=2.0),)}):
        with pytest.raises(ValueError, match=r"^pools.colocated: workers of several stages share no machine"):
            replace(spec(colocated=1), **changes)


@pytest.mark.parametrize(("pp", "step_blocks"), [(1, 4), (2, 12)])
def test_pools_of_windows_leave_room_for_all_steps_under_way(pp: int, step_blocks: int) -> None:
    """Steps of 64 tokens, four blocks: of two stages three steps are under way."""
    layout = KvLayout.sized(1000, [WindowKv(window=64, bytes_per_token=800)])
    staged = replace(spec(prefill=1, decode=1, pp=pp, router=NO_LOCAL), kv_layout=layout)
    result = simulated(staged, asked(*[(0.0, 192, 3)] * 4))
    assert (result.problems, len(result.records)) == ([], 4)
    worker = msgspec.structs.replace(staged.pools[0].worker, worker_id="p-0")
    timed = TimedRunner(EvenStages(), Answers(), layout=layout, num_blocks=100, block_size=16, max_model_len=512)
    windows = FastRoom(worker, register(worker, timed, 512, (), "p-0.1"), timed._answers).windows
    assert windows is not None
    (pool,) = windows._pools
    assert pool.num_blocks - pool.capacity == step_blocks
    assert (pool.num_blocks,) == window_pools(layout, 100, 16, PoolLimits(worker.num_places, 16 * step_blocks))
