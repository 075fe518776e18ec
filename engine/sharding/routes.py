"""What a pair of workers moves, rank by rank. Pure; see `slices.py` for who sends which heads.

Both workers make the same plan from what they said of themselves when the pair was formed, so that no message names a
rank: a chunk is a range of tokens, and the plan says what each rank has of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg.engine.sharding.slices import HeadSlice, head_slices, heads_sent
from disagg.proto.handover import Side
from disagg.proto.messages import KvLayout

MAX_RANKS = 64
"""Of a worker. A plan costs as much as the product of both sides' ranks, and a peer says how many it has."""


@dataclass(frozen=True, slots=True)
class Route:
    """One slice, as one of its two ranks sees it. Its bytes of n tokens are [n * offset, n * (offset + num_bytes)) of
    that rank's part of the staging buffer."""

    peer: int
    """Rank of the other worker."""
    offset: int
    """Bytes of a token before it."""
    num_bytes: int
    """Bytes of a token."""


@dataclass(frozen=True, slots=True)
class PairPlan:
    """All slices of a pair. Made by `plan_pair`."""

    slices: tuple[HeadSlice, ...]
    """In the order of `head_slices`."""
    head_bytes: int
    """Bytes of a token's KV of one head, all layers."""
    sender_tp: int
    receiver_tp: int

    @property
    def bytes_per_token(self) -> int:
        """Of all slices: what a token of a chunk's payload takes. With one rank on both sides the layout's."""
        return self.head_bytes * heads_sent(self.slices)

    def ranks(self, side: Side) -> tuple[int, ...]:
        """The ranks of a side that have something to send or to receive, in order."""
        return tuple(sorted({_rank(each, side) for each in self.slices}))

    def routes(self, side: Side, rank: int) -> tuple[Route, ...]:
        """The slices of a rank, in the order in which its part of the buffer holds them."""
        routes: list[Route] = []
        offset = 0
        for each in self.slices:
            if _rank(each, side) == rank:
                num_bytes = each.num_heads * self.head_bytes
                peer = each.receiver if side == "sender" else each.sender
                routes.append(Route(peer, offset, num_bytes))
                offset += num_bytes
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
        ValueError: if the heads cannot be divided among the ranks of either side; the text names `tp`.
    """
    for side, tp in (("prefill", sender_tp), ("decode", receiver_tp)):
        if not 1 <= tp <= MAX_RANKS:
            raise ValueError(f"the {side} worker has tp {tp}; it must be from 1 to {MAX_RANKS}")
    head_bytes, rest = divmod(layout.bytes_per_token, layout.num_kv_heads)
    if rest:
        raise ValueError(f"the KV of a token is {layout.bytes_per_token} bytes for {layout.num_kv_heads} heads")
    try:
        slices = head_slices(layout.num_kv_heads, sender_tp, receiver_tp)
    except ValueError as error:
        text = f"tp {sender_tp} (prefill) and tp {receiver_tp} (decode) do not go with {layout.num_kv_heads} KV heads"
        raise ValueError(f"{text}: {error}") from error
    return PairPlan(slices, head_bytes, sender_tp, receiver_tp)


def _rank(each: HeadSlice, side: Side) -> int:
    return each.sender if side == "sender" else each.receiver
