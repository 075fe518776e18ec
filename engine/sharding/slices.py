"""Which rank of a prefill worker sends which KV heads to which rank of a decode worker. Pure.

The two workers may have different numbers of ranks. Each rank of D gets every head that it holds exactly once; where
several ranks of P hold a head, the one next to the receiver in proportion sends it, so that the work is spread. With as
many ranks on both sides each sends to its own number alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from disagg.engine.sharding.shards import Shard


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
