"""What a pair moves, rank by rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.sharding.kv_routes import MAX_RANKS, HeadSlice, PairPlan, Route, heads_sent, plan_pair
from disagg.proto.messages import KvLayout

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def layout_of(num_kv_heads: int, head_bytes: int = 24) -> KvLayout:
    return KvLayout.dense(
        num_layers=3, num_kv_heads=num_kv_heads, head_dim=2, dtype="bfloat16", bytes_per_token=head_bytes * num_kv_heads
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, PairPlan]:
    heads = draw(st.sampled_from(WIDTHS))
    fits = [tp for tp in WIDTHS if heads % tp == 0 or tp % heads == 0]
    return heads, plan_pair(layout_of(heads), draw(st.sampled_from(fits)), draw(st.sampled_from(fits)))


@given(plans())
def test_both_sides_see_the_same_bytes(case: tuple[int, PairPlan]) -> None:
    """Parts are filled without gap or overlap, and what a rank sends to another is what that one expects."""
    _, plan = case
    sent: dict[tuple[int, int], list[int]] = {}
    expected: dict[tuple[int, int], list[int]] = {}
    total = {"sender": 0, "receiver": 0}
    for rank in range(plan.sender_tp):
        for route in plan.routes("sender", rank):
            sent.setdefault((rank, route.peer), []).append(route.num_heads)
    for rank in range(plan.receiver_tp):
        for route in plan.routes("receiver", rank):
            expected.setdefault((route.peer, rank), []).append(route.num_heads)
    assert sent == expected
    for rank in range(plan.sender_tp):
        end = 0
        for route in plan.routes("sender", rank):
            assert route.first == end
            end += route.num_heads
        total["sender"] += end
    for rank in range(plan.receiver_tp):
        end = 0
        for route in plan.routes("receiver", rank):
            assert route.first == end
            end += route.num_heads
        total["receiver"] += end
    assert total == {"sender": heads_sent(plan.slices), "receiver": heads_sent(plan.slices)}
    assert plan.head_bytes(5 * plan.groups[0].token_bytes) == 5 * 24


@given(plans())
def test_every_receiver_gets_all_that_it_holds(case: tuple[int, PairPlan]) -> None:
    heads, plan = case
    held = max(1, heads // plan.receiver_tp)
    for rank in range(plan.receiver_tp):
        assert sum(route.num_heads for route in plan.routes("receiver", rank)) == held
    assert plan.ranks("receiver") == tuple(range(plan.receiver_tp))
    assert plan.ranks("sender") == tuple(r for r in range(plan.sender_tp) if plan.routes("sender", r))


@given(plans())
def test_checksums_of_both_sides_come_in_one_order(case: tuple[int, PairPlan]) -> None:
    _, plan = case
    number = {each: index for index, each in enumerate(plan.slices)}
    by_sender: dict[int, list[int]] = {}
    by_receiver: dict[int, list[int]] = {}
    for each in plan.slices:
        by_sender.setdefault(each.sender, []).append(number[each])
        by_receiver.setdefault(each.receiver, []).append(number[each])
    in_order = list(range(len(plan.slices)))
    assert plan.in_order("sender", by_sender) == plan.in_order("receiver", by_receiver) == in_order


def test_one_rank_on_both_sides_moves_the_layouts_bytes() -> None:
    layout = layout_of(8)
    plan = plan_pair(layout, 1, 1)
    assert plan.groups[0].token_bytes == layout.bytes_per_token
    assert plan.routes("sender", 0) == plan.routes("receiver", 0) == (Route(0, 0, 8),)


def test_heads_that_several_ranks_of_d_hold_are_sent_to_each() -> None:
    plan = plan_pair(layout_of(2), 1, 4)
    assert plan.groups[0].token_bytes == 4 * 24
    assert plan.routes("sender", 0) == tuple(Route(rank, rank, 1) for rank in range(4))


def test_heads_that_several_ranks_of_p_hold_are_sent_by_one() -> None:
    plan = plan_pair(layout_of(1), 4, 1)
    assert plan.slices == (HeadSlice(0, 0, 0, 1),)
    assert plan.ranks("sender") == (0,)
    assert plan.routes("sender", 3) == ()


@pytest.mark.parametrize(
    "checksums",
    [{0: [1]}, {0: [1], 1: [2, 3]}, {0: [1, 2], 1: []}, {0: [1], 1: [2], 2: [3]}, {}],
)
def test_a_rank_that_gives_too_few_or_too_many_checksums_shows(checksums: dict[int, list[int]]) -> None:
    with pytest.raises(ValueError, match="checksums for 2 slices"):
        plan_pair(layout_of(2), 2, 2).in_order("sender", checksums)


@pytest.mark.parametrize(
    ("heads", "sender_tp", "receiver_tp", "text"),
    [
        (4, 3, 1, r"tp 3 \(prefill\) and tp 1 \(decode\) do not go with 4 KV heads: 4 cannot be divided among 3"),
        (4, 1, 6, r"tp 1 \(prefill\) and tp 6 \(decode\) do not go with 4 KV heads: 4 KV heads cannot be shared by 6"),
        (4, 0, 1, "the prefill worker has tp 0"),
        (4, 1, -1, "the decode worker has tp -1"),
        (1, MAX_RANKS + 1, 1, "the prefill worker has tp 65; it must be from 1 to 64"),
    ],
)
def test_widths_that_do_not_go_with_the_heads_are_named(
    heads: int, sender_tp: int, receiver_tp: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        plan_pair(layout_of(heads), sender_tp, receiver_tp)


def test_a_layout_of_half_heads_is_refused() -> None:
    layout = KvLayout.dense(num_layers=1, num_kv_heads=2, head_dim=1, dtype="fake", bytes_per_token=7)
    with pytest.raises(ValueError, match="7 bytes for 2 heads"):
        plan_pair(layout, 1, 1)
