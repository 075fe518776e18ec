"""The control messages of a hand-over, between a prefill worker (P) and a decode worker (D) on their pair's stream.

    P -> D   PairHello, then for each attempt  Offer, ChunkHeader*, ChunkSum*, Commit    Abort, AbortAck  PairHeartbeat
             of a sequence that moves          Offer, ChunkHeader*, Extend?, ChunkHeader*, Commit
             of a prefix that D fetches        Offer, ChunkHeader*, Commit without a token
    D -> P   PairWelcome | PairRefused, then   Reserved | Refused, ClearToSend*, ChunkDone*, CommitAck    the same

The bytes themselves travel beside it, over the pair's transport. P sends a payload only after `ClearToSend`, in full.

A prefix is fetched by a call of its own: D calls the worker that is to be P, which answers with what it has of it, and
offers that as P. Any two workers may be P and D of a fetch.

    D -> P   Fetch
    P -> D   FetchGranted | FetchRefused, then the hand-over
"""

from __future__ import annotations

import enum
from typing import Literal

from disagg.proto.ids import AttemptKey, Incarnation, RequestId
from disagg.proto.messages import (
    ONE_RANK,
    KvLayout,
    Message,
    ParallelShape,
    PeerRef,
    SequenceSpec,
    TokenLogprobs,
    WorkerInfo,
)

Side = Literal["sender", "receiver"]
"""Side of a pair: P is the sender, D the receiver."""


class Failure(enum.StrEnum):
    """Why a hand-over did not succeed: for programs, and the `reason` of `disagg_kv_transfer_failures`. The
    accompanying text is for operators."""

    CANCELLED = "cancelled"
    """The attempt was cancelled on purpose; the other side does not report it as a failure either."""
    DEADLINE = "deadline"
    REFUSED = "refused"
    """D has no room, or has or had this attempt."""
    ENDED = "ended"
    """The engine of one side ended the sequence itself."""
    LEASE_LOST = "lease_lost"
    """The peer was silent for too long."""
    STUCK = "stuck"
    """The peer sends heartbeats, but not what is due."""
    PAIR_LOST = "pair_lost"
    """The control stream broke, or the pair could not be formed."""
    PAIR_CLOSED = "pair_closed"
    TRANSPORT = "transport"
    """The byte transport broke."""
    VIOLATION = "violation"
    """The peer broke the protocol."""
    KV_GONE = "kv_gone"
    """P lost the sequence before all of its KV was gathered."""
    BLOCKS_GONE = "blocks_gone"
    """D lost the sequence before all of its KV was scattered."""
    CHUNK_REJECTED = "chunk_rejected"
    """A chunk did not arrive as it was sent."""
    OTHER = "other"
    """Any other failure, and one that a peer sends and that is not listed here."""

    @classmethod
    def _missing_(cls, value: object) -> Failure:
        return cls.OTHER


class PairHello(Message, frozen=True, kw_only=True, tag=True):
    """P's first message on a control stream."""

    info: WorkerInfo
    receiver_incarnation: Incarnation
    """The incarnation of D that P means; another one refuses."""
    digests: bool = False
    """Whether P's device computes digests of KV that goes through memory of the host."""


class PairWelcome(Message, frozen=True, kw_only=True, tag=True):
    """D's answer: where the pair's byte transport is formed."""

    incarnation: Incarnation
    pair_name: str
    """Unique per (both incarnations, connection); the prefix in D's store."""
    transport: str
    store_address: str = ""
    """Address of D's rendezvous, in the form of the transport; with gloo it is host:port of D's store."""
    shape: ParallelShape = ONE_RANK
    """Ranks of D."""
    credits: int
    """Largest number of chunks that P may have announced without having received their `ChunkDone`."""
    max_chunk_bytes: int
    digests: bool = False
    """Whether D's device does so too: then checksums are digests, which D compares behind the copy to its device."""


class PairRefused(Message, frozen=True, kw_only=True, tag=True):
    """D will not form this pair (fingerprint, layout or incarnation differ, the stages are none of this model's, or the
    KV heads cannot be divided among the ranks)."""

    reason: str


class AttemptMessage(Message, frozen=True, kw_only=True):
    """Base of the messages about one attempt."""

    request_id: RequestId
    attempt: int

    @property
    def key(self) -> AttemptKey:
        """The attempt that the message is about."""
        return AttemptKey(self.request_id, self.attempt)


class ReservationMessage(AttemptMessage, frozen=True, kw_only=True):
    """Base of the messages about one reservation of an attempt; one with another generation is stale."""

    generation: int
    """Number of the reservation, as in `Reserved`."""


class Offer(Message, frozen=True, kw_only=True, tag=True):
    """P is about to start this attempt and wants D to take it. Carries all that D needs to decode it."""

    spec: SequenceSpec
    move: int = 0
    """Number of the move of a running sequence, see `Migrate`; 0 for a prompt. A later move is a new offer."""
    is_prefix: bool = False
    """Whether it is a prefix that D fetches: its KV is all that D wants."""


class Reserved(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """D counted the blocks and locked its cached prefix."""

    cached_tokens: int
    """Leading tokens whose KV D has; P does not send them."""


class Refused(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """D cannot take the attempt now. This is no fault: the router places it again."""

    reason: str
    """Reason as text for operators."""


class ChunkHeader(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """Announces `nbytes` of KV of one cache group, for tokens [start_token, end_token). Of a group with a window only
    the tokens are sent that `CacheGroup.kept_from` gives for all tokens that D is to have, less what D has.

    The payload is all heads, or with several ranks on either side the slices of layers and heads that the two workers'
    shapes give (`engine/sharding/kv_routes.py`). Within each slice the order is canonical,
    [layer][k|v][head][token][dim], whatever the local layout. Each slice travels between its two ranks; several of the
    same two follow each other in the order of the plan. Both sides have the plan since `PairHello`, so no header names
    ranks, layers or heads.
    """

    seq: int
    """Number of the chunk within the attempt, from 0."""
    group: int = 0
    """Number of the cache group in `KvLayout.groups`."""
    start_token: int
    end_token: int
    nbytes: int
    """Size of all slices together."""
    checksum: int | None
    """xxh3-64 of the payload, or its digest (`PairWelcome.digests`); of several slices, that of their checksums in the
    order of the plan. None where P still computes these tokens: `ChunkSum` follows."""


class ChunkSum(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """The checksum of a chunk that was announced without one. D may have cleared the chunk before, and its bytes may
    come before this; nothing of them is used until it is here."""

    seq: int
    checksum: int


class Extend(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """P sends the tokens that the sequence decoded while its KV was copied; it is held now. Their KV follows."""

    token_ids: tuple[int, ...]


class ClearToSend(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """A staging slot is held and the receive is posted, on every rank: the payload of chunk `seq` must now be sent in
    full."""

    seq: int
    turn: int
    """Number of the receive within the pair, from 0; bytes are sent in this order."""


class ChunkDone(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """The chunk's staging slot is free again: one credit back. `ok` is false when the checksum did not match."""

    seq: int
    ok: bool = True


class Commit(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """All chunks were announced. Carries output token 0 of this attempt. D checks that every token's KV has arrived."""

    token_id: int | None = None
    """None for a prefix, and only for that."""
    logprobs: TokenLogprobs | None = None
    """Log-probabilities of that token, where the request asks for them."""
    num_chunks: int


class CommitAck(ReservationMessage, frozen=True, kw_only=True, tag=True):
    """D owns the sequence; P may drop its KV."""


class Abort(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """Either side gives the attempt up. Idempotent."""

    failure: Failure
    detail: str = ""


class AbortAck(AttemptMessage, frozen=True, kw_only=True, tag=True):
    """The other side holds nothing of the attempt any more, except buffers that transfers under way still use."""


class PairHeartbeat(Message, frozen=True, kw_only=True, tag=True):
    """Renews the leases of all attempts of the pair."""


class CloseWhenIdle(Message, frozen=True, kw_only=True, tag=True):
    """D has more pairs than it keeps: P closes this one, unless an attempt uses it."""


# ---------------------------------------------------------------- the call that fetches a prefix


class Fetch(Message, frozen=True, kw_only=True, tag=True):
    """The caller wants the KV of a prefix, and expects the offer of it on a pair in which it is D."""

    spec: SequenceSpec
    """The prefix: its tokens, which are whole blocks, with the hashes of all of them. The timeout is the time that the
    caller waits for it."""
    from_token: int
    """The caller has the KV of tokens before this one."""
    needy: PeerRef
    """The caller."""
    source_incarnation: Incarnation
    """The incarnation that the caller means; another one refuses."""
    fingerprint: str
    kv_layout: KvLayout


class FetchGranted(Message, frozen=True, kw_only=True, tag=True):
    """The KV of the first `end_token` tokens is held for the caller, and offered to it."""

    end_token: int


class FetchRefused(Message, frozen=True, kw_only=True, tag=True):
    """Nothing is held: the prefix is gone, this worker has no time, or the call is not for it."""

    reason: str


FetchAnswer = FetchGranted | FetchRefused

SenderToReceiver = PairHello | Offer | ChunkHeader | ChunkSum | Extend | Commit | Abort | AbortAck | PairHeartbeat
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
