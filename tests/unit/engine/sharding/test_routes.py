"""What a pair moves, rank by rank."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.cache_groups import LayerKv, layout_of
from disagg.engine.sharding.kv_routes import (
    MAX_RANKS,
    KvSlice,
    LocalSlice,
    PairGroup,
    PairPlan,
    Route,
    part_bytes,
    plan_pair,
    slices_to_receive,
    slices_to_send,
    stage_places,
)
from disagg.engine.sharding.shards import WHOLE, Shard
from disagg.proto.handover import Side
from disagg.proto.messages import ONE_RANK, CacheGroup, KvLayout, ParallelShape

SIDES: tuple[Side, Side] = ("sender", "receiver")
ELEMENT_BYTES = 24


def layout_of_heads(num_kv_heads: int, num_layers: int = 3) -> KvLayout:
    return layout_of([LayerKv(0, num_kv_heads, 3, 3)] * num_layers, "float32", 4)


def shape(tp: int, *stage_ends: int) -> ParallelShape:
    return ParallelShape(tp=tp, stage_ends=stage_ends)


def shards(of: ParallelShape) -> list[Shard]:
    return [Shard.of_number(number, of.tp, of.pp) for number in range(of.num_ranks)]


def held(shard: Shard, of: ParallelShape, group: CacheGroup) -> set[tuple[int, int]]:
    """(model layer, head) of a group that a rank has, from the definition of a stage and a rank."""
    bounds = (0, *(of.stage_ends or (1 << 30,)))
    first, last = bounds[shard.stage], bounds[shard.stage + 1]
    return {
        (layer, head) for layer in group.layers if first <= layer < last for head in shard.kv_heads(group.num_heads)
    }


@st.composite
def pairs(draw: st.DrawFn) -> PairPlan:
    """Of 4 to 7 layers that attend to all tokens, have one of two windows, or are latent; stages of any layers."""
    num_layers = draw(st.integers(4, 7))
    if draw(st.booleans()):
        heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
        kinds = [LayerKv(window, heads, 3, 3) for window in (0, 32, 64)]
    else:
        heads, kinds = 1, [LayerKv(0, 1, 6, 0, 4)]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=num_layers, max_size=num_layers))

    def drawn() -> ParallelShape:
        pp, tp = (
            draw(st.integers(1, 4)),
            draw(st.sampled_from([t for t in range(1, 5) if not heads % t or not t % heads])),
        )
        ends = draw(st.sets(st.integers(1, num_layers - 1), min_size=pp - 1, max_size=pp - 1))
        return shape(tp, *sorted(ends), num_layers) if pp > 1 else shape(tp)

    return plan_pair(layout_of(layers, "float32", 4), drawn(), drawn())


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_every_element_reaches_every_rank_that_holds_it_once(plan: PairPlan) -> None:
    for moved in plan.groups:
        came: dict[int, Counter[tuple[int, int]]] = {rank: Counter() for rank in range(plan.receiver.num_ranks)}
        for each in moved.slices:
            layers = [moved.group.layers[place] for place in each.layers]
            elements = [(layer, head) for layer in layers for head in range(each.start, each.end)]
            assert len(elements) == each.num_elements > 0
            came[each.receiver].update(elements)
            assert set(elements) <= held(shards(plan.sender)[each.sender], plan.sender, moved.group)
        for shard in shards(plan.receiver):
            assert came[shard.number] == dict.fromkeys(held(shard, plan.receiver, moved.group), 1)
        assert list(moved.slices) == sorted(moved.slices, key=lambda e: (e.receiver, e.layers.start, e.start))


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_both_sides_see_the_same_bytes(plan: PairPlan) -> None:
    """Parts are filled without gap or overlap, what a rank sends to another is what that one expects, in one order, and
    no part has more than `part_bytes`."""
    layout = KvLayout(groups=tuple(moved.group for moved in plan.groups))
    for moved in plan.groups:
        nbytes = 5 * moved.token_bytes
        element_bytes = moved.element_bytes(nbytes)
        assert element_bytes == 5 * moved.group.bytes_per_token // (moved.group.num_heads * len(moved.group.layers))
        between: dict[Side, dict[tuple[int, int], list[int]]] = {side: {} for side in SIDES}
        for side in SIDES:
            sent = 0
            of = plan.shape(side)
            for shard in shards(of):
                end = 0
                for route in moved.routes(side, shard.number):
                    assert route.first == end
                    end += route.num_elements
                    ends = (shard.number, route.peer) if side == "sender" else (route.peer, shard.number)
                    between[side].setdefault(ends, []).append(route.num_elements)
                assert element_bytes * end <= part_bytes(layout, of, shard.stage, nbytes)
                sent += element_bytes * end
            assert sent == nbytes
        assert between["sender"] == between["receiver"]


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_what_a_rank_copies_is_what_the_plan_says(plan: PairPlan) -> None:
    """In the numbers of its own layers and heads."""
    for moved in plan.groups:
        for side, local in zip(SIDES, (slices_to_send, slices_to_receive), strict=True):
            own, peer = plan.shape(side), plan.receiver if side == "sender" else plan.sender
            for shard in shards(own):
                place = stage_places(moved.group, own)[shard.stage].start
                head = shard.kv_heads(moved.group.num_heads).start
                mine = [each for each in moved.slices if getattr(each, side) == shard.number]
                assert local(moved.group, own, shard, peer) == tuple(
                    LocalSlice(
                        range(each.layers.start - place, each.layers.stop - place),
                        range(each.start - head, each.end - head),
                    )
                    for each in mine
                )


@given(pairs())
def test_checksums_of_both_sides_come_in_one_order(plan: PairPlan) -> None:
    for moved in plan.groups:
        by_sender: dict[int, list[int]] = {}
        by_receiver: dict[int, list[int]] = {}
        for number, each in enumerate(moved.slices):
            by_sender.setdefault(each.sender, []).append(number)
            by_receiver.setdefault(each.receiver, []).append(number)
        in_order = list(range(len(moved.slices)))
        assert moved.in_order("sender", by_sender) == moved.in_order("receiver", by_receiver) == in_order


@given(pairs())
def test_channels_join_the_ranks_with_something_in_common(plan: PairPlan) -> None:
    common = {(each.sender, each.receiver) for moved in plan.groups for each in moved.slices}
    assert {(rank, peer) for rank in plan.ranks("sender") for peer in plan.peers("sender", rank)} == common
    assert {(peer, rank) for rank in plan.ranks("receiver") for peer in plan.peers("receiver", rank)} == common


def the_group(plan: PairPlan) -> PairGroup:
    (moved,) = plan.groups
    return moved


def test_one_rank_on_both_sides_moves_the_layouts_bytes() -> None:
    layout = layout_of_heads(8)
    moved = the_group(plan_pair(layout, ONE_RANK, ONE_RANK))
    assert moved.token_bytes == layout.bytes_per_token
    assert moved.slices == (KvSlice(0, 0, range(3), 0, 8),)
    assert moved.routes("sender", 0) == moved.routes("receiver", 0) == (Route(0, 0, 24),)


def test_heads_that_several_ranks_of_d_hold_are_sent_to_each() -> None:
    moved = the_group(plan_pair(layout_of_heads(2), ONE_RANK, shape(4)))
    assert moved.token_bytes == 4 * 3 * ELEMENT_BYTES
    assert moved.routes("sender", 0) == tuple(Route(rank, 3 * rank, 3) for rank in range(4))


def test_heads_that_several_ranks_of_p_hold_are_sent_by_one() -> None:
    moved = the_group(plan_pair(layout_of_heads(1), shape(4), ONE_RANK))
    assert moved.slices == (KvSlice(0, 0, range(3), 0, 1),)
    assert moved.ranks("sender") == (0,)
    assert moved.routes("sender", 3) == ()


def test_stages_and_heads_that_cross() -> None:
    """Two stages of one rank send three layers of two heads to two stages of two ranks, cut elsewhere."""
    moved = the_group(plan_pair(layout_of_heads(2), shape(1, 1, 3), shape(2, 2, 3)))
    assert moved.slices == (
        KvSlice(0, 0, range(0, 1), 0, 1),
        KvSlice(1, 0, range(1, 2), 0, 1),
        KvSlice(0, 1, range(0, 1), 1, 2),
        KvSlice(1, 1, range(1, 2), 1, 2),
        KvSlice(1, 2, range(2, 3), 0, 1),
        KvSlice(1, 3, range(2, 3), 1, 2),
    )
    assert moved.routes("sender", 1) == (Route(0, 0, 1), Route(1, 1, 1), Route(2, 2, 1), Route(3, 3, 1))
    assert moved.routes("receiver", 1) == (Route(0, 0, 1), Route(1, 1, 1))


def test_a_group_without_layers_on_a_stage_moves_nothing_there() -> None:
    full, window = LayerKv(0, 2, 3, 3), LayerKv(32, 2, 3, 3)
    layout = layout_of([full, full, window, full], "float32", 4)
    plan = plan_pair(layout, shape(1, 2, 4), shape(2))
    assert [moved.ranks("sender") for moved in plan.groups] == [(0, 1), (1,)]
    assert plan.groups[1].routes("sender", 0) == ()
    assert slices_to_send(layout.groups[1], plan.sender, Shard(0, 1, 0, 2), plan.receiver) == ()
    assert [part_bytes(layout, plan.sender, stage, 120) for stage in range(2)] == [80, 120]


def test_the_largest_part_is_that_of_the_stage_with_most_layers() -> None:
    layout = layout_of_heads(4)
    assert [part_bytes(layout, shape(1, 2, 3), stage, 300) for stage in range(2)] == [200, 100]
    assert [part_bytes(layout, shape(2, 2, 3), stage, 300) for stage in range(2)] == [100, 50]
    assert part_bytes(layout, shape(8), 0, 301) == 76  # all of one of four heads
    assert part_bytes(layout, ONE_RANK, 0, 301) == 301


def test_a_ranks_heads_are_counted_from_its_own_first_one() -> None:
    group = layout_of_heads(6, 1).groups[0]
    one = range(1)
    assert slices_to_send(group, shape(3), Shard(1, 3), shape(2)) == (
        LocalSlice(one, range(0, 1)),
        LocalSlice(one, range(1, 2)),
    )
    assert slices_to_receive(group, shape(2), Shard(1, 2), shape(3)) == (
        LocalSlice(one, range(0, 1)),
        LocalSlice(one, range(1, 3)),
    )
    assert slices_to_send(group, ONE_RANK, WHOLE, ONE_RANK) == (LocalSlice(one, range(0, 6)),)


# ---------------------------------------------------------------- what peers may not say


@pytest.mark.parametrize(
    "checksums",
    [{0: [1]}, {0: [1], 1: [2, 3]}, {0: [1, 2], 1: []}, {0: [1], 1: [2], 2: [3]}, {}],
)
def test_a_rank_that_gives_too_few_or_too_many_checksums_shows(checksums: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="checksums for 2 slices"):
        the_group(plan_pair(layout_of_heads(2), shape(2), shape(2))).in_order("sender", checksums)


@pytest.mark.parametrize(
    ("heads", "sender", "receiver", "text"),
    [
        (4, shape(3), ONE_RANK, r"tp 3 \(prefill\) and tp 1 \(decode\) do not go with 4 KV heads: 4 cannot be divided"),
        (
            4,
            ONE_RANK,
            shape(6),
            r"tp 1 \(prefill\) and tp 6 \(decode\) do not go with 4 KV heads: 4 KV heads cannot be",
        ),
        (4, shape(0), ONE_RANK, "the prefill worker has tp 0"),
        (4, ONE_RANK, shape(-1), "the decode worker has tp -1"),
        (1, shape(MAX_RANKS + 1), ONE_RANK, "the prefill worker has tp 65; it must be from 1 to 64"),
        (32, shape(32, 1, 2, 3), ONE_RANK, "the prefill worker has tp 32 and pp 3; there may be at most 64 ranks"),
        (4, ONE_RANK, shape(1, *range(1, 66)), "the decode worker has tp 1 and pp 65; there may be at most 64 ranks"),
        (4, ONE_RANK, shape(1, 2), r"the decode worker has stages up to layers \[2\]; they must ascend and end at 3"),
        (4, ONE_RANK, shape(1, 2, 4), r"stages up to layers \[2, 4\]"),
        (4, shape(1, 2, 2, 3), ONE_RANK, r"the prefill worker has stages up to layers \[2, 2, 3\]"),
        (4, shape(1, 2, 1, 3), ONE_RANK, r"stages up to layers \[2, 1, 3\]"),
        (4, shape(1, 0, 3), ONE_RANK, r"stages up to layers \[0, 3\]"),
        (4, shape(1, -5, 3), ONE_RANK, r"stages up to layers \[-5, 3\]"),
        (4, shape(1, 1, 2**62), ONE_RANK, r"stages up to layers \[1, 4611686018427387904\]"),
    ],
)
def test_shapes_that_do_not_go_with_the_model_are_named(
    heads: int, sender: ParallelShape, receiver: ParallelShape, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        plan_pair(layout_of_heads(heads), sender, receiver)


def test_heads_that_differ_are_not_divided_but_their_layers_are() -> None:
    layout = layout_of([LayerKv(0, 2, 3, 3), LayerKv(32, 4, 3, 3)], "float32", 4)
    with pytest.raises(ValueError, match="do not go with cache groups of different numbers of KV heads"):
        plan_pair(layout, ONE_RANK, shape(2, 1, 2))
    plan = plan_pair(layout, ONE_RANK, shape(1, 1, 2))
    assert [moved.slices for moved in plan.groups] == [
        (KvSlice(0, 0, range(1), 0, 2),),
        (KvSlice(0, 1, range(1), 0, 4),),
    ]


def test_a_layout_of_half_elements_is_refused() -> None:
    layout = KvLayout.dense(num_layers=1, num_kv_heads=2, head_dim=1, dtype="fake", bytes_per_token=7)
    with pytest.raises(ValueError, match="7 bytes for 2 heads of 1 layers"):
        plan_pair(layout, ONE_RANK, ONE_RANK)
    with pytest.raises(ValueError, match="25 bytes are no payload of 24 heads of layers"):
        the_group(plan_pair(layout_of_heads(8), ONE_RANK, ONE_RANK)).element_bytes(25)


def test_the_stages_of_a_group_follow_each_other() -> None:
    group = layout_of([LayerKv(0, 1, 3, 3), LayerKv(32, 1, 3, 3)] * 3, "float32", 4).groups[1]
    assert group.layers == (1, 3, 5)
    assert stage_places(group, ONE_RANK) == (range(0, 3),)
    places = stage_places(group, shape(1, 1, 2, 5, 6))
    assert places == (range(0, 0), range(0, 1), range(1, 2), range(2, 3))
    assert all(before.stop == after.start for before, after in pairwise(places))
