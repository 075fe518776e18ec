"""The control half of a hand-over: what a prefill worker (P) and a decode worker (D) say on their pair's stream.

    P -> D   PairHello, then for each attempt  Offer, ChunkHeader*, ChunkSum*, Commit    Abort, AbortAck  PairHeartbeat
    D -> P   PairWelcome | PairRefused, then   Reserved | Refused, ClearToSend*, ChunkDone*, CommitAck    the same

The bytes themselves travel beside it, over the pair's transport. P sends a payload only after `ClearToSend`, in full.
"""

from __future__ import annotations

from typing import Literal

from disagg.proto.ids import Incarnation, RequestId
from disagg.proto.messages import Message, SequenceSpec, TokenLogprobs, WorkerInfo

Side = Literal["sender", "receiver"]
"""Of a pair: P sends, D receives."""


class PairHello(Message, frozen=True, kw_only=True, tag=True):
    """P's first message on a control stream."""

    info: WorkerInfo
    receiver_incarnation: Incarnation
    """The life of D that P means; another one refuses."""


class PairWelcome(Message, frozen=True, kw_only=True, tag=True):
    """D's answer: where the pair's process group meets."""

    incarnation: Incarnation
    pair_name: str
    """Unique per (both incarnations, connection); the prefix in D's store."""
    transport: str
    store_address: str = ""
    """Of D's rendezvous, as the transport writes it; host:port of its store with gloo."""
    tp: int = 1
    """Ranks of D."""
    credits: int
    """Chunks that P may have announced and not seen `ChunkDone` for."""
    max_chunk_bytes: int


class PairRefused(Message, frozen=True, kw_only=True, tag=True):
    """D will not form this pair (fingerprint, layout or incarnation differ, or the KV heads cannot be divided among the
    ranks)."""

    reason: str


class Offer(Message, frozen=True, kw_only=True, tag=True):
    """P is about to start this attempt and wants D to take it. Carries all that D needs to go on alone."""

    spec: SequenceSpec


class Reserved(Message, frozen=True, kw_only=True, tag=True):
    """D counted the blocks and locked its cached prefix."""

    request_id: RequestId
    attempt: int
    generation: int
    """Names this reservation; every later message of the attempt carries it."""
    cached_tokens: int
    """Leading tokens whose KV D has; P does not send them."""


class Refused(Message, frozen=True, kw_only=True, tag=True):
    """D cannot take it now. No fault: the router places again."""

    request_id: RequestId
    attempt: int
    reason: str


class ChunkHeader(Message, frozen=True, kw_only=True, tag=True):
    """Announces `nbytes` of KV for tokens [start_token, end_token).

    The payload is all heads, or with several ranks on either side the slices of heads that the two workers' `tp` give
    (`engine/sharding/slices.py`). Within each slice the order is canonical, [layer][k|v][head][token][dim], whatever
    the local layout. Each slice travels between its two ranks; several of the same two follow each other in the order
    of the plan. Both sides know the plan since the hello, so no header names ranks or heads.
    """

    request_id: RequestId
    attempt: int
    generation: int
    seq: int
    """Counts chunks of the attempt from 0."""
    start_token: int
    end_token: int
    nbytes: int
    """Of all slices."""
    checksum: int | None
    """xxh3-64 of the payload; of several slices, that of their checksums in the order of the plan. None where P still
    computes these tokens: `ChunkSum` will tell."""


class ChunkSum(Message, frozen=True, kw_only=True, tag=True):
    """The checksum of a chunk that was announced without one. D may have cleared the chunk before, and its bytes may
    come before this; nothing of them is used until it is here."""

    request_id: RequestId
    attempt: int
    generation: int
    seq: int
    checksum: int


class ClearToSend(Message, frozen=True, kw_only=True, tag=True):
    """A staging slot is held and the receive is posted, on every rank: the payload of chunk `seq` must now be sent in
    full."""

    request_id: RequestId
    attempt: int
    generation: int
    seq: int
    turn: int
    """Counts the receives of the pair from 0; bytes are sent in this order."""


class ChunkDone(Message, frozen=True, kw_only=True, tag=True):
    """The chunk's staging slot is free again: one credit back. `ok` is false when the checksum did not match."""

    request_id: RequestId
    attempt: int
    generation: int
    seq: int
    ok: bool = True


class Commit(Message, frozen=True, kw_only=True, tag=True):
    """All chunks were announced; here is output token 0 of this attempt. D checks that every token's KV has landed."""

    request_id: RequestId
    attempt: int
    generation: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Of that token, where the request asks."""
    num_chunks: int


class CommitAck(Message, frozen=True, kw_only=True, tag=True):
    """D owns the sequence; P may drop its KV."""

    request_id: RequestId
    attempt: int
    generation: int


class Abort(Message, frozen=True, kw_only=True, tag=True):
    """Either side gives the attempt up. Idempotent."""

    request_id: RequestId
    attempt: int
    reason: str


class AbortAck(Message, frozen=True, kw_only=True, tag=True):
    """The other side holds nothing of the attempt any more, but what bytes under way still need."""

    request_id: RequestId
    attempt: int


class PairHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """Renews the leases of all attempts of the pair."""


class CloseWhenIdle(Message, frozen=True, kw_only=True, tag=True):
    """D has more pairs than it keeps: P closes this one, unless an attempt uses it."""


SenderToReceiver = PairHello | Offer | ChunkHeader | ChunkSum | Commit | Abort | AbortAck | PairHeartbeat
ReceiverToSender = (
    PairWelcome
    | PairRefused
    | Reserved
    | Refused
    | ClearToSend
    | ChunkDone
    | CommitAck
    | Abort
    | AbortAck
    | PairHeartbeat
    | CloseWhenIdle
)
