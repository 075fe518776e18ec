"""What the assigned blocks permit, real decode engines accept; what they have no room for waits, and is never failed
for it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.proto.ids import AttemptKey, RequestId, WorkerId
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.workers.assignments import MARK_BLOCKS, Assignment, Assignments, marks_of, num_held
from tests.support.engine_world import EngineWorld
from tests.support.router import routed_request

NEVER = RouterConfig(local_prefill="never", watermark=0.0)
PREFIX = list(range(1000, 1320))


def request(name: str, *, shared: int = 0, own: int = 0, max_tokens: int = 4) -> RoutedRequest:
    """A prompt that begins with `shared` tokens of `PREFIX`."""
    start = 2_000 + 500 * sum(name.encode())
    return routed_request(name, [*PREFIX[:shared], *range(start, start + own)], max_tokens=max_tokens)


@pytest.mark.parametrize("shared", [320, 0])
def test_a_request_whose_prefix_is_cached_on_a_busy_worker_waits_like_another(shared: int) -> None:
    """The cached blocks are free ones for as long as no sequence holds them: it fits no sooner than without them."""
    it = EngineWorld(NEVER, num_blocks=40)
    it.submit(request("warm", shared=320, max_tokens=2))
    it.run()
    it.submit(request("long", own=64, max_tokens=400))
    it.run_until(it.now + 0.2)
    it.submit(request("hot", shared=shared, own=320 - shared, max_tokens=64))
    it.run()
    assert it.ended == {"warm": "finished", "long": "finished", "hot": "finished"}
    assert not it.num_refused_by
    assert it.first_token_at["hot"] > it.ended_at["long"]
    it.assert_nothing_held()


def test_requests_share_a_prefix_that_one_of_them_holds() -> None:
    """Of 40 blocks each needs 20 for the prefix and 4 beside it: two that share it, and a third, fit at a time."""
    it = EngineWorld(NEVER, num_blocks=40)
    it.submit(request("warm", shared=320, max_tokens=2))
    it.run()
    arrivals = [(it.now + 0.05 * i, request(name, shared=320, own=16, max_tokens=48)) for i, name in enumerate("abc")]
    it.run(arrivals)
    assert set(it.ended.values()) == {"finished"}
    assert not it.num_refused_by
    assert max(it.first_token_at.values()) < min(it.ended_at[name] for name in "abc")
    it.assert_nothing_held()


def test_a_worker_offers_the_places_that_it_has() -> None:
    """A step of 16 tokens has no place for a 17th sequence, whatever `max_num_seqs` says."""
    it = EngineWorld(NEVER, num_prefills=4, num_blocks=4096, max_num_seqs=256, token_budget=16)
    it.run([(0.01 * i, request(f"r{i}", own=32, max_tokens=300)) for i in range(20)])
    assert list(it.ended.values()) == ["finished"] * 20
    assert not it.num_refused_by
    it.assert_nothing_held()


def test_nothing_is_sent_to_a_worker_while_preempted_sequences_wait_there() -> None:
    config = msgspec.structs.replace(NEVER, decode_reserve_tokens=0)
    it = EngineWorld(config, num_prefills=4, num_blocks=40, decode_reserve_tokens=0, swap_bytes=1 << 20)
    for i in range(6):
        it.submit(request(f"r{i}", own=80, max_tokens=300))
    while not it.decodes["d0"].core.load().num_preempted:
        it.run_until(it.now + 0.01)
    it.report(it.decodes["d0"])
    it.submit(request("late", own=16, max_tokens=2))
    it.run()
    assert list(it.ended.values()) == ["finished"] * 7
    assert not it.num_refused_by
    it.assert_nothing_held()


def test_a_refusal_is_learned_until_the_next_report_and_never_the_end_where_waiting_helps() -> None:
    """Half of the blocks are another router's, and reports do not show it. The other half is `small`'s for 3 s."""
    config = msgspec.structs.replace(NEVER, max_refusals=3)
    it = EngineWorld(config, num_blocks=40, reports_load=False)
    it.occupy("d0", request("x", own=300, max_tokens=21))
    it.submit(request("small", own=16, max_tokens=300))
    it.submit(request("large", own=100, max_tokens=4))
    it.run_until(3.0)
    assert it.ended == {}
    assert it.num_refused_by["not enough free KV blocks"] > config.max_refusals
    it.run()
    assert it.ended == {"small": "finished", "large": "finished"}
    it.leave("d0", "x")
    it.assert_nothing_held()


own_sizes = st.integers(1, 150), st.integers(1, 120)
request_sizes = st.one_of(
    st.lists(st.tuples(st.just(0), *own_sizes), min_size=1, max_size=12),
    st.lists(st.tuples(st.sampled_from([0, 128, 256, 320]), *own_sizes), min_size=1, max_size=12),
)


@settings(max_examples=30, deadline=None)
@given(
    sizes=request_sizes,
    num_blocks=st.sampled_from([40, 64, 100]),
    max_num_seqs=st.integers(1, 8),
    token_budget=st.sampled_from([4, 32]),
    reserves=st.tuples(st.sampled_from([0, 16, 512]), st.sampled_from([0, 512])),
    watermarks=st.tuples(st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.1])),
    gaps_s=st.lists(st.sampled_from([0.0, 0.005, 0.3, 2.0]), min_size=12, max_size=12),
)
def test_what_the_assigned_blocks_permit_is_accepted(
    sizes: list[tuple[int, int, int]],
    num_blocks: int,
    max_num_seqs: int,
    token_budget: int,
    reserves: tuple[int, int],
    watermarks: tuple[float, float],
    gaps_s: list[float],
) -> None:
    """With reports that are up to date the engine refuses nothing whose whole answer is reserved, whatever the two
    sides leave free. Where answers outgrow their reserves, or prefixes are shared, it may refuse; then the request
    waits. Everything is answered."""
    config = msgspec.structs.replace(NEVER, decode_reserve_tokens=reserves[0], watermark=watermarks[0])
    it = EngineWorld(
        config,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        token_budget=token_budget,
        decode_reserve_tokens=reserves[1],
        watermark=watermarks[1],
        swap_bytes=1 << 20,
        reports_at_once=True,
    )
    when, arrivals = 0.0, []
    for number, (shared, own, max_tokens) in enumerate(sizes):
        when += gaps_s[number]
        arrivals.append((when, request(f"r{number}", shared=shared, own=own, max_tokens=max_tokens)))
    it.run(arrivals)
    assert list(it.ended.values()) == ["finished"] * len(sizes)
    is_exact = max(reserves) == 512 and not any(shared for shared, _, _ in sizes)
    assert not (is_exact and it.num_refused_by)
    it.assert_nothing_held()


# ---------------------------------------------------------------- marks


@pytest.mark.parametrize(
    ("num_booked", "num_asked", "found"),
    [(0, 40, 0), (40, 40, 40), (40, 20, 16), (20, 40, 16), (15, 40, 0), (40, 32, 32), (20, 20, 20), (20, 0, 0)],
)
def test_marks_show_what_is_held_of_a_chain_and_never_too_much(num_booked: int, num_asked: int, found: int) -> None:
    chain = request("any", shared=320, own=16 * 20).block_hashes
    assignments, worker_id, key = Assignments(), WorkerId("d0"), AttemptKey(RequestId("r0"), 0)
    assigned = assignments.of_worker(worker_id)
    assignments.open(worker_id, key, Assignment(marks=marks_of(chain[:num_booked], num_booked)))
    assignments.open(worker_id, AttemptKey(RequestId("r1"), 0), Assignment(marks=marks_of(chain[:MARK_BLOCKS], 0)))
    assignments.close(worker_id, AttemptKey(RequestId("r1"), 0))
    assert num_held(chain, num_asked, assigned.held) == found
    assert assignments.check_integrity() == []
    assignments.close(worker_id, key)
    assert (assigned.held, assignments.check_integrity()) == ({}, [])


# ---------------------------------------------------------------- waiting for a place to decode


def test_a_place_that_opens_soon_is_waited_for_where_others_are_taken_for_long() -> None:
    """The worker whose place opens first gets the next request, though more of its KV is in use than of the other."""
    it = EngineWorld(NEVER, num_decodes=2, num_blocks=128, max_num_seqs=1)
    it.submit(request("long", own=16, max_tokens=400))
    it.submit(request("short", own=640, max_tokens=60))
    it.submit(request("next", own=16, max_tokens=40))
    it.run()
    assert it.ended_at["short"] < it.first_token_at["next"] < it.ended_at["short"] + 0.1
    assert it.ended_at["next"] < it.ended_at["long"]
    it.assert_nothing_held()


def test_the_worker_with_room_soonest_is_kept_for_a_request_that_waits_for_room() -> None:
    """Not the one with the fewest blocks in use, whose answer is long: smaller requests go there meanwhile."""
    it = EngineWorld(NEVER, num_decodes=2, num_blocks=64)
    it.run([(it.now, request(f"warm{number}", own=16, max_tokens=400)) for number in range(4)])
    now = it.now + 0.1
    it.run_until(now)
    it.submit(request("long", own=16, max_tokens=480))
    it.submit(request("short", own=500, max_tokens=100))
    it.run_until(now + 0.2)
    it.submit(request("large", own=800, max_tokens=20))
    it.run([(now + 0.25 + 0.1 * number, request(f"small{number}", own=16, max_tokens=60)) for number in range(60)])
    assert it.first_token_at["large"] < it.ended_at["short"] + 1.0
    assert it.ended_at["large"] < it.ended_at["long"]
    assert set(it.ended.values()) == {"finished"}
    it.assert_nothing_held()
