"""Which KV which rank of a prefill worker (P) sends to which rank of a decode worker (D). Pure.

    head_slices     KV heads: a rank of a stage of P, a rank of a stage of D, a range of heads
    plan_pair       all slices of a pair, layers x heads of each cache group: what each rank has of a payload
                    (`PairPlan`, `PairGroup`, `Route`)
    slices_to_send, slices_to_receive     one rank's slices, in its own layer and head numbers

The two workers may have different numbers of stages and of ranks in each. A stage has the KV of its layers, a rank of
it the KV of its heads; what one rank sends to another is the intersection. Each rank of D gets every element (a head of
a layer) that it holds exactly once; where several ranks of P hold a head, the one next to the receiver in proportion
sends it, so that the work is spread. With equal shapes, each sends to the rank of its own number only.

A cache group may have no layers on a stage: its ranks have nothing of that group's payloads.

Both workers compute the same plan from the layouts and shapes that they exchanged when the pair was formed. So no
message names a rank: a chunk is a range of tokens, and the plan gives each rank's part of it.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from disagg.engine.sharding.shards import Shard
from disagg.proto.handover import Side
from disagg.proto.messages import CacheGroup, KvLayout, ParallelShape

MAX_RANKS = 64
"""Maximum number of ranks of a worker, over all stages. The cost of a plan is proportional to the product of both
sides' ranks, and a peer announces its own numbers."""


# ---------------------------------------------------------------- heads


class HeadSlice(NamedTuple):
    """KV heads [start, end), numbered as in the whole model, from one rank of a stage to another."""

    sender: int
    receiver: int
    start: int
    end: int

    @property
    def num_heads(self) -> int:
        """Heads that are sent."""
        return self.end - self.start


def head_slices(num_kv_heads: int, sender_tp: int, receiver_tp: int) -> tuple[HeadSlice, ...]:
    """All slices of heads between a stage of `sender_tp` ranks and one of `receiver_tp`, ordered by receiver and head.
    With one rank on both sides, one slice of all heads.

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


def _sender_of(head: int, receiver: int, num_kv_heads: int, sender_tp: int, receiver_tp: int) -> int:
    holders, receivers = (
        [rank for rank in range(tp) if head in Shard(rank, tp).kv_heads(num_kv_heads)]
        for tp in (sender_tp, receiver_tp)
    )
    return holders[receivers.index(receiver) * len(holders) // len(receivers)]


# ---------------------------------------------------------------- layers


def stage_places(group: CacheGroup, shape: ParallelShape) -> tuple[range, ...]:
    """For each stage, which of the group's layers it has, by their places in `CacheGroup.layers`; a range may be
    empty."""
    if not shape.stage_ends:
        return (range(len(group.layers)),)
    bounds = (0, *(bisect_left(group.layers, end) for end in shape.stage_ends))
    return tuple(range(start, end) for start, end in pairwise(bounds))


def check_shape(shape: ParallelShape, layout: KvLayout, whose: str) -> None:
    """Refuse a shape that no worker of this layout has, whoever announced it. `whose` names the worker in the text.

    Raises:
        ValueError: it has no ranks or more than `MAX_RANKS`, or its stages are not consecutive layers of the model.
    """
    tp, ends = shape.tp, shape.stage_ends
    if not 1 <= tp <= MAX_RANKS:
        raise ValueError(f"{whose} has tp {tp}; it must be from 1 to {MAX_RANKS}")
    if tp * len(ends) > MAX_RANKS:
        raise ValueError(f"{whose} has tp {tp} and pp {len(ends)}; there may be at most {MAX_RANKS} ranks")
    num_layers = 1 + max(group.layers[-1] for group in layout.groups)
    if ends and not (all(start < end for start, end in pairwise((0, *ends))) and ends[-1] == num_layers):
        raise ValueError(f"{whose} has stages up to layers {list(ends)}; they must ascend and end at {num_layers}")


# ---------------------------------------------------------------- both


class KvSlice(NamedTuple):
    """Heads [start, end) of some layers of a cache group, from one rank to another; ranks are numbered over all
    stages."""

    sender: int
    receiver: int
    layers: range
    """Places in `CacheGroup.layers`."""
    start: int
    end: int

    @property
    def num_elements(self) -> int:
        """Elements, a head of a layer each, that are sent."""
        return len(self.layers) * (self.end - self.start)


class Route(NamedTuple):
    """The elements that this rank exchanges with rank `peer` of the other worker. In a payload with n bytes of each
    element they are bytes [n * first, n * (first + num_elements)) of this rank's part of the staging buffer."""

    peer: int
    """Rank of the other worker."""
    first: int
    """Elements before it in this rank's part."""
    num_elements: int


class PairGroup(NamedTuple):
    """A cache group as a pair moves it."""

    token_bytes: int
    """Bytes of one token's KV in a payload: of all slices."""
    group: CacheGroup
    slices: tuple[KvSlice, ...]
    """Ordered by receiver, layer and head."""

    def first_token(self, num_tokens: int, cached_tokens: int) -> int:
        """The first token to send to a worker that has `cached_tokens` and is to have `num_tokens`."""
        return max(cached_tokens, self.group.kept_from(num_tokens))

    def element_bytes(self, nbytes: int) -> int:
        """Bytes of each element in a payload of `nbytes` bytes.

        Raises:
            ValueError: if the elements cannot be equal parts of it.
        """
        count = sum([each.num_elements for each in self.slices])
        element_bytes, rest = divmod(nbytes, count)
        if rest:
            raise ValueError(f"{nbytes} bytes are no payload of {count} heads of layers")
        return element_bytes

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
                routes.append(Route(peer, first, each.num_elements))
                first += each.num_elements
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


@dataclass(frozen=True, slots=True)
class PairPlan:
    """All slices of a pair. Made by `plan_pair`."""

    groups: tuple[PairGroup, ...]
    """The cache groups, each with slices of its own."""
    sender: ParallelShape
    receiver: ParallelShape

    def shape(self, side: Side) -> ParallelShape:
        """The ranks of the worker on a side."""
        return self.sender if side == "sender" else self.receiver

    def ranks(self, side: Side) -> tuple[int, ...]:
        """The ranks of a side that have something of any cache group, in order."""
        return tuple(sorted({rank for group in self.groups for rank in group.ranks(side)}))

    def peers(self, side: Side, rank: int) -> tuple[int, ...]:
        """The ranks of the other worker that a rank has something in common with, in order."""
        return tuple(sorted({route.peer for group in self.groups for route in group.routes(side, rank)}))


def plan_pair(layout: KvLayout, sender: ParallelShape, receiver: ParallelShape) -> PairPlan:
    """What moves between a prefill worker of the shape `sender` and a decode worker of the shape `receiver`.

    Raises:
        ValueError: as `check_shape`; or the heads cannot be divided among the ranks of either side (the text names
            `tp`), or differ among the groups where they are divided.
    """
    check_shape(sender, layout, "the prefill worker")
    check_shape(receiver, layout, "the decode worker")
    return _plan_pair(layout, sender, receiver)


@functools.lru_cache(maxsize=64)
def _plan_pair(layout: KvLayout, sender: ParallelShape, receiver: ParallelShape) -> PairPlan:
    num_heads = layout.groups[0].num_heads
    tps = f"tp {sender.tp} (prefill) and tp {receiver.tp} (decode)"
    if max(sender.tp, receiver.tp) > 1 and any(group.num_heads != num_heads for group in layout.groups):
        raise ValueError(f"{tps} do not go with cache groups of different numbers of KV heads")
    groups = []
    for group in layout.groups:
        try:
            slices = _slices(group, sender, receiver)
        except ValueError as error:
            raise ValueError(f"{tps} do not go with {group.num_heads} KV heads: {error}") from error
        sent = sum([each.num_elements for each in slices])
        groups.append(PairGroup(_element_bytes(group) * sent, group, slices))
    return PairPlan(tuple(groups), sender, receiver)


def _slices(group: CacheGroup, sender: ParallelShape, receiver: ParallelShape) -> tuple[KvSlice, ...]:
    heads = head_slices(group.num_heads, sender.tp, receiver.tp)
    slices: list[KvSlice] = []
    for stage, wanted in enumerate(stage_places(group, receiver)):
        for rank in range(receiver.tp):
            to = stage * receiver.tp + rank
            for origin, held in enumerate(stage_places(group, sender)):
                layers = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
                if layers:
                    slices += [
                        KvSlice(origin * sender.tp + each.sender, to, layers, each.start, each.end)
                        for each in heads
                        if each.receiver == rank
                    ]
    return tuple(slices)


def _element_bytes(group: CacheGroup) -> int:
    """Bytes of one token's KV in one head of one layer.

    Raises:
        ValueError: if that is not a whole number.
    """
    count = group.num_heads * len(group.layers)
    element_bytes, rest = divmod(group.bytes_per_token, count)
    if rest:
        raise ValueError(
            f"the KV of a token is {group.bytes_per_token} bytes for {group.num_heads} heads"
            f" of {len(group.layers)} layers"
        )
    return element_bytes


def _rank(each: KvSlice, side: Side) -> int:
    return each.sender if side == "sender" else each.receiver


def part_bytes(layout: KvLayout, shape: ParallelShape, stage: int, nbytes: int) -> int:
    """The most that one rank of a stage may have of a payload of `nbytes` bytes, of any cache group, whatever the shape
    of the other worker. Heads are divided equally; with fewer heads than ranks, one rank may send, or receive, all that
    moves of one head."""
    shares = [
        -(-nbytes * len(stage_places(group, shape)[stage]) // (len(group.layers) * min(shape.tp, group.num_heads)))
        for group in layout.groups
    ]
    return max(shares)


# ---------------------------------------------------------------- one rank


class LocalSlice(NamedTuple):
    """A slice in the numbers of a rank: of the layers of the group, and of the heads, that the rank holds."""

    layers: range
    heads: range

    @property
    def num_elements(self) -> int:
        """Heads of layers in it."""
        return len(self.layers) * len(self.heads)


@functools.lru_cache(maxsize=256)
def slices_to_send(group: CacheGroup, own: ParallelShape, shard: Shard, peer: ParallelShape) -> tuple[LocalSlice, ...]:
    """What the rank `shard` of a worker of the shape `own` sends of a cache group to a worker of the shape `peer`, in
    the order of the plan.

    Raises:
        ValueError: if the heads cannot be divided among the ranks of either side.
    """
    slices = _slices(group, own, peer)
    return _local([each for each in slices if each.sender == shard.number], group, own, shard)


@functools.lru_cache(maxsize=256)
def slices_to_receive(
    group: CacheGroup, own: ParallelShape, shard: Shard, peer: ParallelShape
) -> tuple[LocalSlice, ...]:
    """What the rank `shard` of a worker of the shape `own` receives of a cache group from a worker of the shape `peer`,
    in the order of the plan.

    Raises:
        ValueError: if the heads cannot be divided among the ranks of either side.
    """
    slices = _slices(group, peer, own)
    return _local([each for each in slices if each.receiver == shard.number], group, own, shard)


def _local(slices: list[KvSlice], group: CacheGroup, own: ParallelShape, shard: Shard) -> tuple[LocalSlice, ...]:
    place = stage_places(group, own)[shard.stage].start
    head = shard.kv_heads(group.num_heads).start
    return tuple(
        LocalSlice(
            range(each.layers.start - place, each.layers.stop - place), range(each.start - head, each.end - head)
        )
        for each in slices
    )
