"""Who holds which heads, and who sends which: every thing has its place, once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.engine.sharding.kv_routes import HeadSlice, head_slices
from disagg.engine.sharding.shards import Shard


def widths(num_kv_heads: int) -> st.SearchStrategy[int]:
    """Numbers of ranks that `num_kv_heads` heads go with."""
    return st.sampled_from([tp for tp in range(1, 17) if not num_kv_heads % tp or not tp % num_kv_heads])


HEADS = st.sampled_from([1, 2, 3, 4, 6, 8])
PAIRS = HEADS.flatmap(lambda heads: st.tuples(st.just(heads), widths(heads), widths(heads)))


def shards(size: int) -> list[Shard]:
    return [Shard(rank, size) for rank in range(size)]


@given(size=st.integers(1, 12), share=st.integers(1, 9))
def test_equal_shares_follow_each_other(size: int, share: int) -> None:
    parts = [shard.part(size * share) for shard in shards(size)]
    assert [index for part in parts for index in part] == list(range(size * share))
    assert {len(part) for part in parts} == {share}


def test_what_cannot_be_shared_equally_is_refused() -> None:
    with pytest.raises(ValueError, match="10 cannot be divided among 4 ranks"):
        Shard(0, 4).part(10)
    with pytest.raises(ValueError, match="6 cannot be divided among 4 ranks"):
        Shard(0, 4).kv_heads(6)
    with pytest.raises(ValueError, match="4 KV heads cannot be shared by 6 ranks"):
        Shard(0, 6).kv_heads(4)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"there is no rank {rank} of stage 0 among 1 stage of {size} ranks"):
        Shard(rank, size)


@given(pair=PAIRS, group=st.integers(1, 4))
def test_query_heads_are_with_the_kv_heads_that_they_read(pair: tuple[int, int, int], group: int) -> None:
    """Query head n reads KV head n // heads per KV head."""
    num_kv_heads, size, _ = pair
    num_heads = num_kv_heads * group * size  # a number that the ranks can share
    held = Counter(head for shard in shards(size) for head in shard.kv_heads(num_kv_heads))
    assert held == dict.fromkeys(range(num_kv_heads), max(1, size // num_kv_heads))
    for shard in shards(size):
        read = {head // (num_heads // num_kv_heads) for head in shard.part(num_heads)}
        assert read == set(shard.kv_heads(num_kv_heads))


def test_known_slices() -> None:
    assert head_slices(4, 1, 1) == (HeadSlice(0, 0, 0, 4),)
    assert head_slices(4, 2, 1) == (HeadSlice(0, 0, 0, 2), HeadSlice(1, 0, 2, 4))
    assert head_slices(4, 1, 2) == (HeadSlice(0, 0, 0, 2), HeadSlice(0, 1, 2, 4))
    assert head_slices(6, 3, 2) == (
        HeadSlice(0, 0, 0, 2),
        HeadSlice(1, 0, 2, 3),
        HeadSlice(1, 1, 3, 4),
        HeadSlice(2, 1, 4, 6),
    )
    assert head_slices(2, 4, 1) == (HeadSlice(0, 0, 0, 1), HeadSlice(2, 0, 1, 2))
    assert head_slices(2, 2, 4) == tuple(HeadSlice(rank // 2, rank, rank // 2, rank // 2 + 1) for rank in range(4))


@settings(max_examples=300)
@given(pair=PAIRS)
def test_every_head_reaches_every_rank_that_holds_it_once(pair: tuple[int, int, int]) -> None:
    num_kv_heads, sender_tp, receiver_tp = pair
    slices = head_slices(num_kv_heads, sender_tp, receiver_tp)
    for receiver in shards(receiver_tp):
        sent = [head for each in slices if each.receiver == receiver.rank for head in range(each.start, each.end)]
        assert sent == list(receiver.kv_heads(num_kv_heads))
    for each in slices:
        held = Shard(each.sender, sender_tp).kv_heads(num_kv_heads)
        assert held.start <= each.start < each.end <= held.stop
    assert sum(each.num_heads for each in slices) == max(num_kv_heads, receiver_tp)
    assert sorted(slices, key=lambda each: (each.receiver, each.start)) == list(slices)


@settings(max_examples=300)
@given(pair=PAIRS)
def test_those_who_hold_a_head_share_the_work(pair: tuple[int, int, int]) -> None:
    num_kv_heads, sender_tp, receiver_tp = pair
    slices = head_slices(num_kv_heads, sender_tp, receiver_tp)
    for head in range(num_kv_heads):
        sent = Counter(each.sender for each in slices if each.start <= head < each.end)
        counts = [sent[shard.rank] for shard in shards(sender_tp) if head in shard.kv_heads(num_kv_heads)]
        assert max(counts) - min(counts) <= 1


@given(pair=PAIRS)
def test_ranks_of_equally_wide_workers_send_to_their_like(pair: tuple[int, int, int]) -> None:
    num_kv_heads, size, _ = pair
    held = [shard.kv_heads(num_kv_heads) for shard in shards(size)]
    assert head_slices(num_kv_heads, size, size) == tuple(
        HeadSlice(rank, rank, heads.start, heads.stop) for rank, heads in enumerate(held)
    )
