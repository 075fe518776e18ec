"""The records and transition tables of the sending half; `sender.py` is the machine that moves them.

    OFFERED ──Reserved──> PREFILLING ──Commit──> COMMITTING ──CommitAck──> OVER
       │ Refused: OVER        │                      │
       └──────────────────────┴──────────────────────┴──(we give up)──> ABORTING ──AbortAck──> OVER
    any ──(peer aborts, pair closes)──> OVER

A chunk lives longer than its attempt if D has granted it: its bytes are owed.

    GATHERING ─────> READY ────> ANNOUNCED ──ClearToSend──> SENDING ──> SENT ──ChunkDone──> GONE
        │                            ^                       ^   └─ChunkDone─> TAKEN ──(sent)──> GONE
        └──> PROMISED ──(gathered)───┘                       │
                └──ClearToSend──> OWED ──────(gathered)──────┘

The last chunk of a prompt is announced while its tokens are computed, so that D's receive is posted by then.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from disagg.engine.kv_transfer.effects import GatherChunk, SendBytes
from disagg.engine.kv_transfer.pair_state import Table
from disagg.proto.handover import ChunkHeader, ChunkSum, Commit
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec, TokenLogprobs


class SendState(enum.Enum):
    """Where the hand-over of an attempt is, seen from P."""

    OFFERED = "offered"
    PREFILLING = "prefilling"
    COMMITTING = "committing"
    ABORTING = "aborting"
    OVER = "over"


class SendEvent(enum.Enum):
    """What moves it."""

    RESERVED = "Reserved"
    REFUSED = "Refused"
    COMMIT = "commit"
    ACKED = "CommitAck"
    GIVE_UP = "give up"
    PEER_ABORT = "Abort"
    ABORT_ACKED = "AbortAck"


_S, _E = SendState, SendEvent
SEND_TABLE: Table[SendState, SendEvent] = Table(
    {
        (_S.OFFERED, _E.RESERVED): _S.PREFILLING,
        (_S.OFFERED, _E.REFUSED): _S.OVER,
        (_S.PREFILLING, _E.COMMIT): _S.COMMITTING,
        (_S.COMMITTING, _E.ACKED): _S.OVER,
        (_S.OFFERED, _E.GIVE_UP): _S.ABORTING,
        (_S.PREFILLING, _E.GIVE_UP): _S.ABORTING,
        (_S.COMMITTING, _E.GIVE_UP): _S.ABORTING,
        (_S.OFFERED, _E.PEER_ABORT): _S.OVER,
        (_S.PREFILLING, _E.PEER_ABORT): _S.OVER,
        (_S.COMMITTING, _E.PEER_ABORT): _S.OVER,
        (_S.ABORTING, _E.PEER_ABORT): _S.OVER,
        (_S.ABORTING, _E.ABORT_ACKED): _S.OVER,
        # These crossed our Abort on the wire; its acknowledgement is still to come.
        (_S.ABORTING, _E.RESERVED): _S.ABORTING,
        (_S.ABORTING, _E.REFUSED): _S.ABORTING,
        (_S.ABORTING, _E.ACKED): _S.ABORTING,
    }
)


class SentChunkState(enum.Enum):
    """Where a chunk is, seen from P."""

    GATHERING = "gathering"
    PROMISED = "promised"
    OWED = "owed"
    READY = "ready"
    ANNOUNCED = "announced"
    SENDING = "sending"
    SENT = "sent"
    TAKEN = "taken"
    GONE = "gone"


class SentChunkEvent(enum.Enum):
    """What moves it."""

    GATHERED = "gathered"
    ANNOUNCE = "announce"
    GRANTED = "ClearToSend"
    SENT = "sent"
    DONE = "ChunkDone"


_C, _F = SentChunkState, SentChunkEvent
SENT_CHUNK_TABLE: Table[SentChunkState, SentChunkEvent] = Table(
    {
        (_C.GATHERING, _F.GATHERED): _C.READY,
        (_C.READY, _F.ANNOUNCE): _C.ANNOUNCED,
        (_C.GATHERING, _F.ANNOUNCE): _C.PROMISED,
        (_C.PROMISED, _F.GATHERED): _C.ANNOUNCED,
        (_C.PROMISED, _F.GRANTED): _C.OWED,
        (_C.OWED, _F.GATHERED): _C.SENDING,
        (_C.ANNOUNCED, _F.GRANTED): _C.SENDING,
        (_C.SENDING, _F.SENT): _C.SENT,
        (_C.SENT, _F.DONE): _C.GONE,
        # D may have the bytes before our transport says that they left.
        (_C.SENDING, _F.DONE): _C.TAKEN,
        (_C.TAKEN, _F.SENT): _C.GONE,
    }
)

UNANNOUNCED = frozenset({_C.GATHERING, _C.READY})
CREDITED = frozenset({_C.PROMISED, _C.OWED, _C.ANNOUNCED, _C.SENDING, _C.SENT})
"""States in which a chunk uses one of D's credits."""
AWAITED = frozenset({_C.PROMISED, _C.ANNOUNCED, _C.SENDING, _C.SENT, _C.TAKEN})
"""States in which D, or the transport, is to do something."""
HOLDS_SLOT = frozenset({_C.GATHERING, _C.PROMISED, _C.OWED, _C.READY, _C.ANNOUNCED, _C.SENDING, _C.TAKEN})
TOUCHED = frozenset({_C.GATHERING, _C.PROMISED, _C.OWED, _C.SENDING, _C.TAKEN})
"""States in which the engine or the transport works on the slot, whatever becomes of attempt and pair."""


@dataclass(slots=True, eq=False)
class SendAttempt:
    """One attempt on P. Owner: the `Sender`."""

    spec: SequenceSpec
    state: SendState
    deadline: float | None
    generation: int = 0
    cached_tokens: int = 0
    num_planned: int = 0
    """The engine computes, or has computed, the tokens before this one."""
    next_token: int = 0
    """Tokens before this one are D's already or were cut into chunks."""
    next_seq: int = 0
    num_unannounced: int = 0
    num_gathering: int = 0
    token_id: int | None = None
    """Output token 0, when the prompt is computed."""
    logprobs: TokenLogprobs | None = None
    """Of that token, where the request asks."""
    kv_bytes: int = 0
    started: bool = False
    """The engine was told to run it, and was not told to release it."""
    waiting_since: float = 0.0
    """When D was asked what it must answer soon: an offer, a commit or an abort."""

    @property
    def key(self) -> AttemptKey:
        """The key of the attempt."""
        return self.spec.key

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV must be on D in the end."""
        return self.spec.num_known_tokens

    @property
    def complete(self) -> bool:
        """Whether the engine computes the end of the prompt, or has."""
        return self.num_planned == self.num_known_tokens

    @property
    def urgency(self) -> tuple[bool, float]:
        """Less goes first: what a stream waits for already, then what is due first."""
        return not self.complete, math.inf if self.deadline is None else self.deadline

    @property
    def live(self) -> bool:
        """Whether the hand-over can still succeed."""
        return self.state not in (SendState.ABORTING, SendState.OVER)

    @property
    def is_asking(self) -> bool:
        """Whether D must answer an offer or a commit."""
        return self.state in (SendState.OFFERED, SendState.COMMITTING)

    @property
    def can_commit(self) -> bool:
        """Whether all is announced and token 0 is known."""
        return (
            self.state is SendState.PREFILLING
            and self.token_id is not None
            and self.next_token == self.num_known_tokens
            and self.num_unannounced == 0
        )

    @property
    def commit(self) -> Commit:
        """What D is told when all is announced."""
        assert self.token_id is not None
        request_id, number = self.key
        return Commit(
            request_id=request_id,
            attempt=number,
            generation=self.generation,
            token_id=self.token_id,
            logprobs=self.logprobs,
            num_chunks=self.next_seq,
        )


@dataclass(slots=True, eq=False)
class SentChunk:
    """One chunk on P: tokens [start, end) in staging slot `slot`. Owner: the `Sender`."""

    attempt: SendAttempt
    seq: int
    start: int
    end: int
    slot: int
    nbytes: int
    state: SentChunkState = SentChunkState.GATHERING
    checksum: int | None = None
    """Known when it is gathered."""
    announced_at: float = 0.0

    @property
    def is_announced(self) -> bool:
        """Whether D was told of it."""
        return self.state not in UNANNOUNCED

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.end == self.attempt.num_known_tokens

    @property
    def header(self) -> ChunkHeader:
        """What D is told of it."""
        request_id, number = self.attempt.key
        return ChunkHeader(
            request_id=request_id,
            attempt=number,
            generation=self.attempt.generation,
            seq=self.seq,
            start_token=self.start,
            end_token=self.end,
            nbytes=self.nbytes,
            checksum=self.checksum,
        )

    @property
    def gather(self) -> GatherChunk:
        """What fills the slot."""
        return GatherChunk(self.attempt.key, self.seq, self.start, self.end, self.slot, self.nbytes)

    @property
    def send(self) -> SendBytes:
        """What sends the slot."""
        return SendBytes(self.attempt.key, self.seq, self.slot, self.nbytes)

    @property
    def late_checksum(self) -> ChunkSum:
        """What D is told when a promised chunk is gathered."""
        assert self.checksum is not None
        request_id, number = self.attempt.key
        return ChunkSum(
            request_id=request_id,
            attempt=number,
            generation=self.attempt.generation,
            seq=self.seq,
            checksum=self.checksum,
        )
