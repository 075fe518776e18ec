"""The records and transition tables of the receiving half; `receiver.py` is the machine that moves them.

    RESERVING ──(reserved)──> RECEIVING ──(committed, all verified)──> JOINING ──(all scattered)──> OVER
        └─────────────────────────┴──(refused, aborted, ended, pair closed)──┴──────────────────────> OVER

A chunk lives longer than its attempt once D has cleared it: its bytes will come.

    WAITING ──(slot)──> RECEIVING ──(verified)──────────────> SCATTERING ──(scattered)──> GONE
       │                    └──(no checksum yet)──> HELD ──(verified)──┘
       └──(attempt over)──────┴──────────────────────┴──(not verified, or attempt over)──> GONE
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from disagg.engine.kv_transfer.effects import ReceiveBytes, ScatterChunk
from disagg.engine.kv_transfer.pair_state import PeerError, Table
from disagg.proto.handover import ChunkDone, ChunkHeader, ChunkSum, ClearToSend, Commit, CommitAck, Reserved
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec


class ReceiveState(enum.Enum):
    """Where the hand-over of an attempt is, seen from D."""

    RESERVING = "reserving"
    RECEIVING = "receiving"
    JOINING = "joining"
    OVER = "over"


class ReceiveEvent(enum.Enum):
    """What moves it."""

    RESERVED = "reserved"
    REFUSED = "refused"
    HEADER = "ChunkHeader"
    COMMIT = "Commit"
    JOIN = "join"
    JOINED = "joined"
    GIVE_UP = "give up"


_S, _E = ReceiveState, ReceiveEvent
RECEIVE_TABLE: Table[ReceiveState, ReceiveEvent] = Table(
    {
        (_S.RESERVING, _E.RESERVED): _S.RECEIVING,
        (_S.RESERVING, _E.REFUSED): _S.OVER,
        (_S.RESERVING, _E.GIVE_UP): _S.OVER,
        (_S.RECEIVING, _E.HEADER): _S.RECEIVING,
        (_S.RECEIVING, _E.COMMIT): _S.RECEIVING,
        (_S.RECEIVING, _E.JOIN): _S.JOINING,
        (_S.RECEIVING, _E.GIVE_UP): _S.OVER,
        (_S.JOINING, _E.JOINED): _S.OVER,
        (_S.JOINING, _E.GIVE_UP): _S.OVER,
    }
)


class ReceivedChunkState(enum.Enum):
    """Where a chunk is, seen from D."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    HELD = "held"
    SCATTERING = "scattering"
    GONE = "gone"


class ReceivedChunkEvent(enum.Enum):
    """What moves it."""

    CLEAR = "clear"
    HOLD = "hold"
    VERIFIED = "verified"
    DISCARD = "discard"
    SCATTERED = "scattered"


_C, _F = ReceivedChunkState, ReceivedChunkEvent
RECEIVED_CHUNK_TABLE: Table[ReceivedChunkState, ReceivedChunkEvent] = Table(
    {
        (_C.WAITING, _F.CLEAR): _C.RECEIVING,
        (_C.WAITING, _F.DISCARD): _C.GONE,
        (_C.RECEIVING, _F.VERIFIED): _C.SCATTERING,
        (_C.RECEIVING, _F.DISCARD): _C.GONE,
        (_C.RECEIVING, _F.HOLD): _C.HELD,
        (_C.HELD, _F.VERIFIED): _C.SCATTERING,
        (_C.HELD, _F.DISCARD): _C.GONE,
        (_C.SCATTERING, _F.SCATTERED): _C.GONE,
    }
)


@dataclass(slots=True, eq=False)
class ReceiveAttempt:
    """One attempt on D. Owner: the `Receiver`."""

    spec: SequenceSpec
    generation: int
    state: ReceiveState = ReceiveState.RESERVING
    cached_tokens: int = 0
    next_token: int = 0
    """Tokens before this one are here already or were announced. Chunks come in order and without gaps."""
    next_seq: int = 0
    num_unverified_tokens: int = 0
    """Tokens whose KV is neither in the cache nor on its way there from a staging slot."""
    num_missing_tokens: int = 0
    """Tokens whose KV is not in the cache yet."""
    kv_bytes: int = 0
    began_at: float | None = None
    """When its first chunk was announced."""
    commit: Commit | None = None

    @property
    def key(self) -> AttemptKey:
        """The key of the attempt."""
        return self.spec.key

    @property
    def reservation(self) -> Reserved:
        """What P is told when the blocks are counted."""
        request_id, number = self.key
        return Reserved(
            request_id=request_id, attempt=number, generation=self.generation, cached_tokens=self.cached_tokens
        )

    @property
    def acknowledgement(self) -> CommitAck:
        """What P is told when all is in the cache."""
        request_id, number = self.key
        return CommitAck(request_id=request_id, attempt=number, generation=self.generation)

    @property
    def live(self) -> bool:
        """Whether the hand-over can still succeed."""
        return self.state is not ReceiveState.OVER


@dataclass(slots=True, eq=False)
class ReceivedChunk:
    """One announced chunk on D. Owner: the `Receiver`."""

    attempt: ReceiveAttempt
    header: ChunkHeader
    announced: int | None
    """The checksum that P names; None until it does."""
    arrived: int | None = None
    """The checksum of what came."""
    state: ReceivedChunkState = ReceivedChunkState.WAITING
    slot: int | None = None
    cleared_at: float = 0.0
    turn: int = 0
    """Which receive of the pair it is, from 0; once it is cleared."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.header.end_token - self.header.start_token

    @property
    def receive(self) -> ReceiveBytes:
        """What fills the slot."""
        assert self.slot is not None
        return ReceiveBytes(self.attempt.key, self.header.seq, self.slot, self.header.nbytes)

    @property
    def scatter(self) -> ScatterChunk:
        """What writes the slot to the cache."""
        assert self.slot is not None
        header = self.header
        start, end = header.start_token, header.end_token
        return ScatterChunk(self.attempt.key, header.seq, start, end, self.slot, header.nbytes)

    def done(self, *, ok: bool) -> ChunkDone:
        """The message that gives P its credit back."""
        header = self.header
        return ChunkDone(
            request_id=header.request_id, attempt=header.attempt, generation=header.generation, seq=header.seq, ok=ok
        )

    def clear(self) -> ClearToSend:
        """The message that asks P for the bytes."""
        header = self.header
        return ClearToSend(
            request_id=header.request_id,
            attempt=header.attempt,
            generation=header.generation,
            seq=header.seq,
            turn=self.turn,
        )


def check_header(attempt: ReceiveAttempt, header: ChunkHeader, bytes_per_token: int, max_chunk_bytes: int) -> None:
    """Everything that a header may get wrong, before a byte is asked for: a transport dies on a payload of another
    size.

    Raises:
        PeerError: if the header is not the one that is due for this reservation.
    """
    num_tokens = header.end_token - header.start_token
    where = f"chunk {header.seq} of {attempt.key}"
    if attempt.commit is not None:
        raise PeerError(f"{where} was announced after Commit")
    if header.seq != attempt.next_seq:
        raise PeerError(f"{where} was announced where chunk {attempt.next_seq} was due")
    if header.start_token != attempt.next_token:
        raise PeerError(f"{where} starts at token {header.start_token}, not {attempt.next_token}")
    if num_tokens < 1 or header.end_token > attempt.spec.num_known_tokens:
        raise PeerError(f"{where} ends at token {header.end_token} of {attempt.spec.num_known_tokens}")
    if header.nbytes != num_tokens * bytes_per_token or header.nbytes > max_chunk_bytes:
        raise PeerError(f"{where} has {header.nbytes} bytes for {num_tokens} tokens")


def check_checksum(chunk: ReceivedChunk | None, message: ChunkSum) -> ReceivedChunk:
    """The chunk that a checksum is for.

    Raises:
        PeerError: if no chunk waits for it.
    """
    if chunk is None or chunk.announced is not None:
        key = AttemptKey(message.request_id, message.attempt)
        raise PeerError(f"a checksum for chunk {message.seq} of {key}, which waits for none")
    return chunk


def check_commit(attempt: ReceiveAttempt, commit: Commit) -> None:
    """A commit must come once, after the headers of all chunks; the stream is ordered.

    Raises:
        PeerError: if it does not.
    """
    num_known = attempt.spec.num_known_tokens
    if attempt.commit is not None:
        raise PeerError(f"a second Commit of {attempt.key}")
    if commit.num_chunks != attempt.next_seq or attempt.next_token != num_known:
        raise PeerError(f"Commit of {attempt.key} after {attempt.next_token} of {num_known} tokens")
    if commit.token_id < 0:
        raise PeerError(f"Commit of {attempt.key} with token {commit.token_id}")
