"""Which of a rank's own heads it sends to a worker of another width, or receives from one. Pure; see `slices.py`.

A rank's part of a staging buffer holds its slices one after the other, in the order given here.
"""

from __future__ import annotations

import functools

from disagg.engine.sharding.shards import Shard
from disagg.engine.sharding.slices import HeadSlice, head_slices


@functools.lru_cache(maxsize=64)
def heads_to_send(num_kv_heads: int, shard: Shard, peer_tp: int) -> tuple[range, ...]:
    """For each slice that this rank sends to a worker of `peer_tp` ranks, its heads among those that the rank holds.

    Raises:
        ValueError: if the heads cannot be divided among the ranks of either side.
    """
    slices = head_slices(num_kv_heads, shard.size, peer_tp)
    return _local([each for each in slices if each.sender == shard.rank], num_kv_heads, shard)


@functools.lru_cache(maxsize=64)
def heads_to_receive(num_kv_heads: int, shard: Shard, peer_tp: int) -> tuple[range, ...]:
    """For each slice that this rank receives from a worker of `peer_tp` ranks, its heads among those that it holds.

    Raises:
        ValueError: if the heads cannot be divided among the ranks of either side.
    """
    slices = head_slices(num_kv_heads, peer_tp, shard.size)
    return _local([each for each in slices if each.receiver == shard.rank], num_kv_heads, shard)


def _local(slices: list[HeadSlice], num_kv_heads: int, shard: Shard) -> tuple[range, ...]:
    first = shard.kv_heads(num_kv_heads).start
    return tuple(range(each.start - first, each.end - first) for each in slices)
