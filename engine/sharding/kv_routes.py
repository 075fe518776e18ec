"""Which KV heads which rank of a prefill worker (P) sends to which rank of a decode worker (D). Pure.

    head_slices     all slices of a pair: a sender, a receiver, a range of heads
    plan_pair       the same with bytes: what each rank has of a payload (`PairPlan`, `Route`)
    heads_to_send, heads_to_receive     one rank's slices, in its own head numbers

The two workers may have different numbers of ranks. Each rank of D gets every head that it holds exactly once; where
several ranks of P hold a head, the one next to the receiver in proportion sends it, so that the work is spread. With
equal numbers of ranks, each sends to the rank of its own number only.

Both workers compute the same plan from the layouts that they exchanged when the pair was formed. So no message names a
rank: a chunk is a range of tokens, and the plan gives each rank's part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from disagg.engine.sharding.shards import Shard
from disagg.proto.handover import Side
from disagg.proto.messages import CacheGroup, KvLayout


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """KV heads [start, end) of all layers, numbered as in the whole model, from one rank to another."""

    sender: int
    receiver: int
    start: int
    end: int

    @property
    def num_heads(self) -> int:
        """Heads that are sent."""
        return self.end - self.start


def head_slices(num_kv_heads: int, sender_tp: int, receiver_tp: int) -> tuple[HeadSlice, ...]:
    """All slices of a pair, ordered by receiver and head. With one rank on both sides, one slice of all heads.

    Raises:
        ValueError: if the heads cannot be divided among the ranks of either side.
    """
    slices: list[HeadSlice] = []
    for receiver in range(receiver_tp):
        for head in Shard(receiver, receiver_tp).kv_heads(num_kv_heads):
            sender = _sender_of(head, receiver, num_kv_heads, sender_tp, receiver_tp)
            last = slices[-1] if slices else None
            if last is not None and (last.sender, last.receiver, last.end) == (sender, receiver, head):
                slices[-1] = HeadSlice(sender, receiver, last.start, head + 1)
            else:
                slices.append(HeadSlice(sender, receiver, head, head + 1))
    return tuple(slices)


def heads_sent(slices: tuple[HeadSlice, ...]) -> int:
    """Heads that travel, each copy counted: the payload of a token is this many heads' KV."""
    return sum(each.num_heads for each in slices)


def _sender_of(head: int, receiver: int, num_kv_heads: int, sender_tp: int, receiver_tp: int) -> int:
    holders, receivers = (
        [rank for rank in range(tp) if head in Shard(rank, tp).kv_heads(num_kv_heads)]
        for tp in (sender_tp, receiver_tp)
    )
    return holders[receivers.index(receiver) * len(holders) // len(receivers)]


MAX_RANKS = 64
"""Maximum number of ranks of a worker. The cost of a plan is proportional to the product of both sides' ranks, and a
peer announces its own number."""


@dataclass(frozen=True, slots=True)
class Route:
    """The KV heads that this rank exchanges with rank `peer` of the other worker. In a payload with n bytes of each
    head they are bytes [n * first, n * (first + num_heads)) of this rank's part of the staging buffer."""

    peer: int
    """Rank of the other worker."""
    first: int
    """Heads before it in this rank's part."""
    num_heads: int


class PairGroup(NamedTuple):
    """A cache group as a pair moves it."""

    token_bytes: int
    """Bytes of one token's KV in a payload: all layers of the group, all slices of heads."""
    group: CacheGroup

    def first_token(self, num_tokens: int, cached_tokens: int) -> int:
        """The first token to send to a worker that has `cached_tokens` and is to have `num_tokens`."""
        return max(cached_tokens, self.group.kept_from(num_tokens))


@dataclass(frozen=True, slots=True)
class PairPlan:
    """All slices of a pair. Made by `plan_pair`."""

    slices: tuple[HeadSlice, ...]
    """In the order of `head_slices`."""
    groups: tuple[PairGroup, ...]
    """The cache groups. Their slices are the same."""
    sender_tp: int
    receiver_tp: int

    def head_bytes(self, nbytes: int) -> int:
        """Bytes of each head in a payload of `nbytes` bytes.

        Raises:
            ValueError: if the heads cannot be equal parts of it.
        """
        head_bytes, rest = divmod(nbytes, heads_sent(self.slices))
        if rest:
            raise ValueError(f"{nbytes} bytes are no payload of {heads_sent(self.slices)} heads")
        return head_bytes

    def ranks(self, side: Side) -> tuple[int, ...]:
        """The ranks of a side that have something to send or to receive, in order."""
        return tuple(sorted({_rank(each, side) for each in self.slices}))

    def routes(self, side: Side, rank: int) -> tuple[Route, ...]:
        """The slices of a rank, in the order in which its part of the buffer holds them."""
        routes: list[Route] = []
        first = 0
        for each in self.slices:
            if _rank(each, side) == rank:
                peer = each.receiver if side == "sender" else each.sender
                routes.append(Route(peer, first, each.num_heads))
                first += each.num_heads
        return tuple(routes)

    def in_order(self, side: Side, checksums: Mapping[int, Sequence[int]]) -> list[int]:
        """The checksums of all slices in the order of `slices`, from those of each rank in the order of its routes.

        Raises:
            ValueError: if a rank did not give as many as it has slices.
        """
        left = {rank: iter(of_rank) for rank, of_rank in checksums.items()}
        given = sum(map(len, checksums.values()))
        found = [next(left.get(_rank(each, side), iter(())), None) for each in self.slices]
        complete = [each for each in found if each is not None]
        if not given == len(complete) == len(self.slices):
            raise ValueError(f"{given} checksums for {len(self.slices)} slices")
        return complete


def plan_pair(layout: KvLayout, sender_tp: int, receiver_tp: int) -> PairPlan:
    """What moves between a prefill worker of `sender_tp` ranks and a decode worker of `receiver_tp`.

    Raises:
        ValueError: if the heads cannot be divided among the ranks of either side (the text names `tp`), or differ
            among the groups where there are several ranks.
    """
    for side, tp in (("prefill", sender_tp), ("decode", receiver_tp)):
        if not 1 <= tp <= MAX_RANKS:
            raise ValueError(f"the {side} worker has tp {tp}; it must be from 1 to {MAX_RANKS}")
    num_heads = layout.groups[0].num_heads
    tps = f"tp {sender_tp} (prefill) and tp {receiver_tp} (decode)"
    if max(sender_tp, receiver_tp) > 1 and any(group.num_heads != num_heads for group in layout.groups):
        raise ValueError(f"{tps} do not go with cache groups of different numbers of KV heads")
    try:
        slices = head_slices(num_heads, sender_tp, receiver_tp)
    except ValueError as error:
        raise ValueError(f"{tps} do not go with {num_heads} KV heads: {error}") from error
    groups = []
    for group in layout.groups:
        head_bytes, rest = divmod(group.bytes_per_token, group.num_heads)
        if rest:
            raise ValueError(f"the KV of a token is {group.bytes_per_token} bytes for {group.num_heads} heads")
        sent = heads_sent(slices) if group.num_heads == num_heads else group.num_heads
        groups.append(PairGroup(head_bytes * sent, group))
    return PairPlan(slices, tuple(groups), sender_tp, receiver_tp)


def _rank(each: HeadSlice, side: Side) -> int:
    return each.sender if side == "sender" else each.receiver


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
