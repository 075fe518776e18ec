"""D's attempts and chunks: their records, their transitions, and the chunks under way (`ReceiveWindow`).

An attempt:

    RESERVING ──(reserved)──> RECEIVING ──(committed, all verified)──> JOINING ──(all scattered)──> OVER
        └─────────────────────────┴──(refused, aborted, ended, pair closed)──┴──────────────────────> OVER

A chunk, which outlasts its attempt once D has cleared it, because its bytes will come:

    WAITING ──(slot)──> RECEIVING ──(verified)──────────────> SCATTERING ──(scattered)──> DONE
       │                    └──(no checksum yet)──> HELD ──(verified)──┘
       └──(attempt over)──────┴──────────────────────┴──(not verified, or attempt over)──> DONE
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.engine.kv_transfer.commands import ReceiveKv, ScatterChunk
from disagg.engine.kv_transfer.pair_half import ChunkWindow, PeerError, Table, TransitionError
from disagg.engine.sharding.kv_routes import PairGroup
from disagg.proto.handover import ChunkDone, ChunkHeader, ChunkSum, ClearToSend, Commit, CommitAck, Extend, Reserved
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec
from disagg.proto.token_ids import num_token_ids


class ReceiveState(enum.Enum):
    """State of the hand-over of an attempt, seen from D."""

    RESERVING = "reserving"
    RECEIVING = "receiving"
    JOINING = "joining"
    OVER = "over"


class ReceiveEvent(enum.Enum):
    """Events of an attempt."""

    RESERVED = "reserved"
    REFUSED = "refused"
    HEADER = "ChunkHeader"
    EXTEND = "Extend"
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
        (_S.RECEIVING, _E.EXTEND): _S.RECEIVING,
        (_S.RECEIVING, _E.COMMIT): _S.RECEIVING,
        (_S.RECEIVING, _E.JOIN): _S.JOINING,
        (_S.RECEIVING, _E.GIVE_UP): _S.OVER,
        (_S.JOINING, _E.JOINED): _S.OVER,
        (_S.JOINING, _E.GIVE_UP): _S.OVER,
    }
)


class ReceivedChunkState(enum.Enum):
    """State of a chunk, seen from D."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    HELD = "held"
    SCATTERING = "scattering"
    DONE = "done"


class ReceivedChunkEvent(enum.Enum):
    """What moves a chunk to its next state on D: answers of transport and engine, and decisions of the window."""

    CLEAR = "clear"
    HOLD = "hold"
    VERIFIED = "verified"
    DISCARD = "discard"
    SCATTERED = "scattered"


_C, _F = ReceivedChunkState, ReceivedChunkEvent
RECEIVED_CHUNK_TABLE: Table[ReceivedChunkState, ReceivedChunkEvent] = Table(
    {
        (_C.WAITING, _F.CLEAR): _C.RECEIVING,
        (_C.WAITING, _F.DISCARD): _C.DONE,
        (_C.RECEIVING, _F.VERIFIED): _C.SCATTERING,
        (_C.RECEIVING, _F.DISCARD): _C.DONE,
        (_C.RECEIVING, _F.HOLD): _C.HELD,
        (_C.HELD, _F.VERIFIED): _C.SCATTERING,
        (_C.HELD, _F.DISCARD): _C.DONE,
        (_C.SCATTERING, _F.SCATTERED): _C.DONE,
    }
)


@dataclass(slots=True, eq=False)
class ReceiveAttempt:
    """One attempt on D. Owner: the `Receiver`."""

    spec: SequenceSpec
    generation: int
    move: int = 0
    """Number of the move of a running sequence, from its offer."""
    is_prefix: bool = False
    """Whether it is a prefix that was fetched."""
    num_known_tokens: int = field(init=False)
    """Tokens whose KV must be here in the end."""
    state: ReceiveState = ReceiveState.RESERVING
    cached_tokens: int = 0
    next_tokens: list[int] = field(default_factory=list)
    """Of each cache group: tokens before this one are here already, do not come, or were announced. Chunks of a group
    come in order and without gaps."""
    first_tokens: list[int] = field(default_factory=list)
    """Of each cache group: the first token that is due."""
    next_seq: int = 0
    num_due_tokens: int = 0
    """Tokens, of all groups together, whose KV is due."""
    num_unverified_tokens: int = 0
    """Tokens, of all groups together, whose KV is neither in the cache nor on its way there from a staging slot."""
    num_missing_tokens: int = 0
    """Tokens, of all groups together, whose KV is not in the cache yet."""
    kv_bytes: int = 0
    began_at: float | None = None
    """When its first chunk was announced."""
    commit: Commit | None = None

    def __post_init__(self) -> None:
        self.num_known_tokens = self.spec.num_known_tokens

    @property
    def key(self) -> AttemptKey:
        """(request id, number of the attempt), as in P's offer."""
        return self.spec.key

    @property
    def reservation(self) -> Reserved:
        """Sent when the blocks are counted."""
        request_id, number = self.key
        return Reserved(
            request_id=request_id, attempt=number, generation=self.generation, cached_tokens=self.cached_tokens
        )

    @property
    def acknowledgement(self) -> CommitAck:
        """Sent when all is in the cache."""
        request_id, number = self.key
        return CommitAck(request_id=request_id, attempt=number, generation=self.generation)

    @property
    def live(self) -> bool:
        """Whether the hand-over can still succeed."""
        return self.state is not ReceiveState.OVER

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and answer that there can be."""
        return num_token_ids(self.spec.prompt_token_ids) + self.spec.sampling.max_tokens


@dataclass(slots=True, eq=False)
class ReceivedChunk:
    """One announced chunk on D. Owner: the `Receiver`."""

    attempt: ReceiveAttempt
    header: ChunkHeader
    announced: int | None
    """The checksum that P computed; None until it is here."""
    arrived: int | None = None
    """The checksum of the bytes that came."""
    state: ReceivedChunkState = ReceivedChunkState.WAITING
    slot: int | None = None
    cleared_at: float = 0.0
    turn: int = 0
    """Index of the receive among those of the pair, from 0; set once it is cleared."""

    @property
    def num_tokens(self) -> int:
        """`end_token - start_token`; positive."""
        return self.header.end_token - self.header.start_token

    @property
    def receive(self) -> ReceiveKv:
        """What fills the slot."""
        assert self.slot is not None
        header = self.header
        return ReceiveKv(self.attempt.key, header.seq, self.slot, header.nbytes, header.group)

    def scatter(self, *, digests: bool) -> ScatterChunk:
        """What writes the slot to the cache; with `digests` the device compares what P announced."""
        assert self.slot is not None
        header = self.header
        start, end = header.start_token, header.end_token
        digest = self.announced if digests else None
        return ScatterChunk(self.attempt.key, header.seq, start, end, self.slot, header.nbytes, digest, header.group)

    def done(self, *, ok: bool) -> ChunkDone:
        """Gives P its credit back."""
        header = self.header
        return ChunkDone(
            request_id=header.request_id, attempt=header.attempt, generation=header.generation, seq=header.seq, ok=ok
        )

    def clear(self) -> ClearToSend:
        """Has P send the bytes."""
        header = self.header
        return ClearToSend(
            request_id=header.request_id,
            attempt=header.attempt,
            generation=header.generation,
            seq=header.seq,
            turn=self.turn,
        )


def check_header(
    attempt: ReceiveAttempt, header: ChunkHeader, groups: Sequence[PairGroup], max_chunk_bytes: int
) -> None:
    """Everything that a header may get wrong, before its bytes are cleared: a payload of another size breaks the
    transport.

    Raises:
        PeerError: if the header is not the one that is due for this reservation.
    """
    num_tokens = header.end_token - header.start_token
    where = f"chunk {header.seq} of {attempt.key}"
    if attempt.commit is not None:
        raise PeerError(f"{where} was announced after Commit")
    if header.seq != attempt.next_seq:
        raise PeerError(f"{where} was announced where chunk {attempt.next_seq} was due")
    if not 0 <= header.group < len(groups):
        raise PeerError(f"{where} is of cache group {header.group} of {len(groups)}")
    next_token = attempt.next_tokens[header.group]
    if header.start_token != next_token:
        raise PeerError(f"{where} starts at token {header.start_token}, not {next_token}")
    if num_tokens < 1 or header.end_token > attempt.num_known_tokens:
        raise PeerError(f"{where} ends at token {header.end_token} of {attempt.num_known_tokens}")
    if header.nbytes != num_tokens * groups[header.group].token_bytes or header.nbytes > max_chunk_bytes:
        raise PeerError(f"{where} has {header.nbytes} bytes for {num_tokens} tokens")


def check_checksum(chunk: ReceivedChunk | None, message: ChunkSum) -> ReceivedChunk:
    """The chunk that a checksum is for.

    Raises:
        PeerError: if no chunk waits for it.
    """
    if chunk is None or chunk.announced is not None:
        raise PeerError(f"a checksum for chunk {message.seq} of {message.key}, which waits for none")
    return chunk


def check_commit(attempt: ReceiveAttempt, commit: Commit) -> None:
    """A commit must come once, after the headers of all chunks; the stream is ordered.

    Raises:
        PeerError: if it does not.
    """
    num_known = attempt.num_known_tokens
    if attempt.commit is not None:
        raise PeerError(f"a second Commit of {attempt.key}")
    num_announced = min(attempt.next_tokens)
    if commit.num_chunks != attempt.next_seq or num_announced != num_known:
        raise PeerError(f"Commit of {attempt.key} after {num_announced} of {num_known} tokens")
    if (commit.token_id is None) != attempt.is_prefix or (commit.token_id is not None and commit.token_id < 0):
        raise PeerError(f"Commit of {attempt.key} with token {commit.token_id}")


def check_extension(attempt: ReceiveAttempt, extension: Extend) -> None:
    """Only a running sequence grows, and only before its commit.

    Raises:
        PeerError: if it is not that, or the tokens cannot be any.
    """
    if attempt.move == 0 or attempt.commit is not None:
        raise PeerError(f"Extend of {attempt.key}, which does not grow")
    if not extension.token_ids or min(extension.token_ids) < 0:
        raise PeerError(f"Extend of {attempt.key} by {len(extension.token_ids)} tokens that are none")
    if attempt.num_known_tokens + len(extension.token_ids) > attempt.most_tokens:
        raise PeerError(f"Extend of {attempt.key} beyond its {attempt.most_tokens} tokens")


class ReceiveWindow(ChunkWindow[ReceivedChunk]):
    """D's chunks under way: which are announced, which have a slot. Owner: the `Receiver`."""

    def __init__(self, credits: int, num_slots: int, groups: Sequence[PairGroup], max_chunk_bytes: int) -> None:
        super().__init__(credits, num_slots, groups, max_chunk_bytes)
        self._waiting: deque[ReceivedChunk] = deque()
        """Announced chunks without a slot, in order of their headers."""
        self._num_cleared = 0

    @property
    def oldest_clear(self) -> float | None:
        """When the chunk was cleared that has held its slot for longest, of those that wait for bytes or the engine."""
        idle = (ReceivedChunkState.WAITING, ReceivedChunkState.HELD)
        return min((chunk.cleared_at for chunk in self._chunks.values() if chunk.state not in idle), default=None)

    def begin(self, attempt: ReceiveAttempt) -> None:
        """The attempt was reserved, or has more tokens now: note which are due. A window of which something was
        announced goes on from there."""
        num_known = attempt.num_known_tokens
        firsts = [group.first_token(num_known, attempt.cached_tokens) for group in self._groups]
        if attempt.first_tokens:
            pairs = list(zip(attempt.first_tokens, attempt.next_tokens, strict=True))
            firsts = [now if first == at else first for now, (first, at) in zip(firsts, pairs, strict=True)]
            attempt.next_tokens = [now if first == at else at for now, (first, at) in zip(firsts, pairs, strict=True)]
        else:
            attempt.next_tokens = list(firsts)
        num_due = sum([num_known - first for first in firsts])
        attempt.num_unverified_tokens += num_due - attempt.num_due_tokens
        attempt.num_missing_tokens += num_due - attempt.num_due_tokens
        attempt.first_tokens, attempt.num_due_tokens = firsts, num_due

    def announce(self, attempt: ReceiveAttempt, header: ChunkHeader) -> None:
        """Queue a chunk.

        Raises:
            PeerError: if the header is not the one that is due, or P has no credit for it.
        """
        check_header(attempt, header, self._groups, self.max_chunk_bytes)
        if len(self) >= self._credits:
            raise PeerError(f"chunk {header.seq} of {attempt.key} was announced without a credit")
        attempt.next_seq += 1
        attempt.next_tokens[header.group] = header.end_token
        chunk = ReceivedChunk(attempt, header, header.checksum)
        self._chunks[attempt.key, header.seq] = chunk
        self._waiting.append(chunk)

    def clear_next(self, now: float) -> ReceivedChunk | None:
        """Give the longest waiting chunk a slot, if there is one: its receive is to be posted now."""
        if not self._waiting or not self._slots.num_free:
            return None
        chunk = self._waiting.popleft()
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, ReceivedChunkEvent.CLEAR)
        chunk.slot = self._slots.take()
        chunk.cleared_at = now
        chunk.turn = self._num_cleared
        self._num_cleared += 1
        return chunk

    def hold(self, chunk: ReceivedChunk) -> None:
        """The transport is done with the slot; the checksum to compare with is still to come."""
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, ReceivedChunkEvent.HOLD)

    def settle(self, chunk: ReceivedChunk, *, keep: bool) -> None:
        """`keep` the bytes to scatter them, or give the slot back."""
        event = ReceivedChunkEvent.VERIFIED if keep else ReceivedChunkEvent.DISCARD
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, event)
        if not keep:
            self._drop(chunk)

    def scattered(self, key: AttemptKey, seq: int) -> ReceivedChunk:
        """The engine is done with the slot.

        Raises:
            TransitionError: if this chunk was not being scattered.
        """
        chunk = self.under_way(key, seq, ReceivedChunkState.SCATTERING)
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, ReceivedChunkEvent.SCATTERED)
        self._drop(chunk)
        return chunk

    def drop_idle(self, attempt: ReceiveAttempt) -> list[ReceivedChunk]:
        """Drop what neither engine nor transport works on: chunks that were not cleared, for which no bytes will come,
        and those that came without a checksum, which are returned, since P waits for their credit."""
        self._waiting = deque(chunk for chunk in self._waiting if chunk.attempt is not attempt)
        mine = [chunk for chunk in self._chunks.values() if chunk.attempt is attempt]
        held = [chunk for chunk in mine if chunk.state is ReceivedChunkState.HELD]
        for chunk in [chunk for chunk in mine if chunk.state is ReceivedChunkState.WAITING] + held:
            self.settle(chunk, keep=False)
        return held

    def under_way(self, key: AttemptKey, seq: int, state: ReceivedChunkState) -> ReceivedChunk:
        """The chunk, which must be in `state`.

        Raises:
            TransitionError: if it is not.
        """
        chunk = self._chunks.get((key, seq))
        if chunk is None or chunk.state is not state:
            raise TransitionError(f"chunk {seq} of {key} is not {state.value}")
        return chunk

    def _drop(self, chunk: ReceivedChunk) -> None:
        if chunk.slot is not None:
            self._slots.give_back(chunk.slot)
        del self._chunks[chunk.attempt.key, chunk.header.seq]
