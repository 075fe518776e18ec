"""Windows of the fast engine as counts, and beside the exact engine, which has the real blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from disagg.engine.cache_groups import PoolLimits, window_pools
from disagg.loadtests.records import RequestRecord
from disagg.loadtests.workload.workload import OutlinedRequest, PromptPart
from disagg.proto.ids import BlockHash
from disagg.proto.messages import KvLayout, ResumeRemoved, ResumeStored, WindowKv
from disagg.router.config import RouterConfig
from disagg.simulator.cluster import Result, SimulatedCluster
from disagg.simulator.fast.fast_windows import FastWindows
from disagg.simulator.world.settings import EngineKind
from disagg.simulator.world.users import UserRequest
from tests.support.simulation import NO_LOCAL, LinearTimes, asked, cluster_spec

LAYOUT = KvLayout.sized(1000, [WindowKv(window=64, bytes_per_token=800)])
"""Of 1000 bytes a token 800 in layers with a window of 4 blocks: a sequence holds at most 6 of them."""
LIMITS = PoolLimits(max_num_seqs=2, token_budget=64)


def key(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def windows() -> FastWindows:
    """Two sequences and a step of 4 blocks, and what the share of resume points adds."""
    assert window_pools(LAYOUT, 100, 16, LIMITS) == (23,)
    return FastWindows(LAYOUT, 100, 16, LIMITS)


def test_windows_are_promised_up_to_what_they_hold() -> None:
    """19 of 23 blocks may be promised: 6 to a long sequence, however long it is, 3 to one of 3 blocks."""
    it = windows()
    for num_blocks in (1000, 6, 7):
        assert it.may_admit(num_blocks, is_alone=False)
        it.promise(0, num_blocks)
    assert it.num_promised == 18
    assert it.may_admit(1, is_alone=False)
    assert not it.may_admit(2, is_alone=False)
    it.promise(7, 0)
    it.promise(0, 3)
    assert it.num_promised == 15


def test_a_sequence_that_grows_is_promised_more_until_it_is_enough() -> None:
    it = windows()
    it.promise(0, 15)
    it.promise(0, 15)
    it.promise(0, 4)
    assert [it.has_room(4, num_blocks) for num_blocks in (5, 6, 7, 1000)] == [True] * 4
    assert [it.is_enough(num_blocks) for num_blocks in (5, 6, 1000)] == [False, True, True]
    it.promise(0, 2)
    assert it.num_promised == 18
    assert [it.has_room(4, num_blocks) for num_blocks in (4, 5, 6)] == [True, True, False]
    assert it.share_of(190) == 180
    it.promise(4, 5)
    assert it.num_promised == 19


def test_admission_leaves_the_watermark_unless_a_sequence_is_alone() -> None:
    it = FastWindows(LAYOUT, 100, 16, LIMITS, lambda num_blocks: num_blocks // 2)
    it.promise(0, 3)
    assert [it.may_admit(6, is_alone=is_alone) for is_alone in (False, True)] == [False, True]
    assert it.may_admit(5, is_alone=False)


def test_a_prefix_is_resumed_at_its_deepest_point() -> None:
    it = windows()
    keys = [key(number) for number in range(8)]
    assert it.resumable(keys, 8) == 0
    it.note_point(keys[2])
    it.note_point(keys[5])
    assert [it.resumable(keys, num_cached) for num_cached in (8, 6, 5, 3, 2)] == [6, 6, 3, 3, 0]
    it.evicted([keys[5]])
    assert it.resumable(keys, 8) == 3
    assert it.drain_events() == (
        ResumeStored(hashes=(keys[2],)),
        ResumeStored(hashes=(keys[5],)),
        ResumeRemoved(hashes=(keys[5],)),
    )
    assert it.drain_events() == ()


def test_points_take_what_promises_leave_and_the_least_recently_used_goes_first() -> None:
    """23 blocks are five points of 4 blocks; beside a promise of 6 there are four."""
    it = windows()
    for number in range(5):
        it.note_point(key(number))
    it.resumable([key(0)], 1)
    it.drain_events()
    it.promise(0, 6)
    assert it.drain_events() == (ResumeRemoved(hashes=(key(1),)),)
    it.note_point(key(9))
    assert it.drain_events() == (ResumeStored(hashes=(key(9),)), ResumeRemoved(hashes=(key(2),)))


def test_what_another_worker_need_not_send() -> None:
    """Of 10 blocks the last 4 are the window: the 6 before it are not needed, nor what is before a point."""
    it = windows()
    keys = [key(number) for number in range(10)]
    assert [it.received_to(keys, num_cached, 10, 1) for num_cached in (3, 6, 9)] == [3, 6, 6]
    it.note_point(keys[7])
    assert [it.received_to(keys, num_cached, 10, 1) for num_cached in (7, 8, 9)] == [7, 8, 8]
    it.note_point(keys[9])  # of the same prompt, which was received before
    assert [it.received_to(keys, num_cached, 10, 1) for num_cached in (7, 9)] == [7, 9]


# ---------------------------------------------------------------- beside the exact engine


def simulated(engine: EngineKind, requests: list[UserRequest], layout: KvLayout = LAYOUT, **shape: Any) -> Result:
    spec = dataclasses.replace(cluster_spec(engine=engine, times=LinearTimes(), **shape), kv_layout=layout)
    result = SimulatedCluster(spec, requests).run()
    assert result.problems == []
    return result


def cached(records: list[RequestRecord]) -> list[int]:
    return [record.cached_tokens for record in records]


SHAPES: dict[str, dict[str, Any]] = {
    "colocated": {"colocated": 1},
    "pair": {"prefill": 1, "decode": 1, "router": NO_LOCAL},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_is_hit_at_its_end(shape: str) -> None:
    requests = asked((0.0, 320, 20), (5.0, 320, 20), (10.0, 320, 20), same=True)
    found = [simulated("exact", requests, **SHAPES[shape]), simulated("fast", requests, **SHAPES[shape])]
    assert cached(found[0].records) == cached(found[1].records) == [0, 304, 304]
    assert found[0].kv_bytes_moved == found[1].kv_bytes_moved


def test_more_sequences_than_the_pool_of_windows_holds_wait() -> None:
    """Sequences of 10 blocks: the first group has room for eight of them, the pool of the window for four."""
    requests = asked(*[(0.0, 96, 60)] * 12)
    shape = {"colocated": 1, "max_num_seqs": 12, "token_budget": 64, "num_blocks": 84, "decode_reserve_tokens": 60}
    plain, wide = KvLayout.sized(1000), KvLayout.sized(1000, [WindowKv(window=256, bytes_per_token=800)])
    exact, exact_plain = (simulated("exact", requests, layout, **shape).end_s for layout in (wide, plain))
    fast, fast_plain = (simulated("fast", requests, layout, **shape).end_s for layout in (wide, plain))
    assert exact > 1.05 * exact_plain
    assert fast == pytest.approx(exact, rel=0.03)
    assert fast_plain == pytest.approx(exact_plain, rel=0.03)


def test_a_shared_beginning_is_hit_from_its_third_use_on() -> None:
    """The second prompt computes it again, and leaves a point where it parts from the first one. A real worker, whose
    cache has room, happens to have the blocks still."""
    requests = [
        UserRequest(
            OutlinedRequest(
                index=number,
                due_s=5.0 * number,
                parts=(PromptPart(320, ("system",)), PromptPart(100, ("own", number))),
                max_tokens=10,
            )
        )
        for number in range(4)
    ]
    assert cached(simulated("fast", requests, colocated=1).records) == [0, 0, 320, 320]
    assert cached(simulated("exact", requests, colocated=1).records) == [0, 320, 320, 320]


def test_answers_that_outgrow_the_pool_of_windows_are_preempted() -> None:
    """Four prompts of 6 blocks fit; with their answers each takes 10, of which the pool has 46."""
    requests = asked(*[(0.0, 90, 70)] * 7)
    wide = KvLayout.sized(1000, [WindowKv(window=256, bytes_per_token=800)])
    shape = cluster_spec(
        engine="fast",
        router=RouterConfig(watermark=0),
        colocated=1,
        max_num_seqs=12,
        token_budget=64,
        num_blocks=84,
        decode_reserve_tokens=0,
    )
    spec = dataclasses.replace(shape, kv_layout=wide)
    cluster = SimulatedCluster(spec, requests)
    assert cluster.run().problems == []
    assert cluster.num_preemptions > 0
    plain = SimulatedCluster(dataclasses.replace(spec, kv_layout=KvLayout.sized(1000)), requests)
    assert plain.run().problems == []
    assert plain.num_preemptions == 0
