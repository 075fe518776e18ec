"""P's attempts and chunks: their records, their transitions, and the chunks under way (`SendWindow`).

An attempt:

    OFFERED ──Reserved──> PREFILLING ──Commit──> COMMITTING ──CommitAck──> OVER
       │ Refused: OVER        │                      │
       └──────────────────────┴──────────────────────┴──(given up here)──> ABORTING ──AbortAck──> OVER
    any ──(peer aborts, pair closes)──> OVER

A chunk, which outlasts its attempt if D has cleared it, because D has posted the receive for its bytes:

    GATHERING ───────────> READY ────> ANNOUNCED ──ClearToSend──> SENDING ──> SENT ──ChunkDone──> DONE
        │                                  ^                       ^   └─ChunkDone─> RECEIVED ──(sent)──> DONE
        └──> ANNOUNCED_EARLY ──(gathered)──┘                       │
                └──ClearToSend──> SEND_PENDING ─────(gathered)─────┘

The last chunk of a prompt is announced while its tokens are computed (ANNOUNCED_EARLY), so that D's receive is posted
by then.

A sequence that moves while it decodes is an attempt, too. Its KV is cut as if its prompt were being computed; when what
is worth a payload has arrived, it is held, and then its last tokens are known and it is complete. Of its windows, which
move on meanwhile, all is sent then.

A prefix that D fetches is an attempt whose tokens are all computed and held before it is offered.

A payload has whole tokens of one cache group and at most `max_chunk_bytes`. During prefill a payload goes out when it
is full, or when a step left at least half of a full one; what is smaller waits for the next step, because a lone small
message costs milliseconds. When the prompt is computed, the rest goes out whatever its size.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.engine.kv_transfer.commands import GatherChunk, SendKv
from disagg.engine.kv_transfer.pair_half import ChunkWindow, PeerError, Table, TransitionError
from disagg.engine.sharding.kv_routes import PairGroup
from disagg.proto.block_hash import HASH_BLOCK_TOKENS
from disagg.proto.handover import ChunkHeader, ChunkSum, Commit
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import SequenceSpec, TokenLogprobs


class SendState(enum.Enum):
    """State of the hand-over of an attempt, seen from P."""

    OFFERED = "offered"
    PREFILLING = "prefilling"
    COMMITTING = "committing"
    ABORTING = "aborting"
    OVER = "over"


class SendEvent(enum.Enum):
    """Events of an attempt."""

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
    """State of a chunk, seen from P."""

    GATHERING = "gathering"
    ANNOUNCED_EARLY = "announced early"
    SEND_PENDING = "send pending"
    READY = "ready"
    ANNOUNCED = "announced"
    SENDING = "sending"
    SENT = "sent"
    RECEIVED = "received"
    DONE = "done"


class SentChunkEvent(enum.Enum):
    """What moves a chunk to its next state on P. Values with capitals are messages of D."""

    GATHERED = "gathered"
    ANNOUNCE = "announce"
    CLEARED = "ClearToSend"
    SENT = "sent"
    DONE = "ChunkDone"


_C, _F = SentChunkState, SentChunkEvent
SENT_CHUNK_TABLE: Table[SentChunkState, SentChunkEvent] = Table(
    {
        (_C.GATHERING, _F.GATHERED): _C.READY,
        (_C.READY, _F.ANNOUNCE): _C.ANNOUNCED,
        (_C.GATHERING, _F.ANNOUNCE): _C.ANNOUNCED_EARLY,
        (_C.ANNOUNCED_EARLY, _F.GATHERED): _C.ANNOUNCED,
        (_C.ANNOUNCED_EARLY, _F.CLEARED): _C.SEND_PENDING,
        (_C.SEND_PENDING, _F.GATHERED): _C.SENDING,
        (_C.ANNOUNCED, _F.CLEARED): _C.SENDING,
        (_C.SENDING, _F.SENT): _C.SENT,
        (_C.SENT, _F.DONE): _C.DONE,
        # D may have the bytes before the transport here has reported them sent.
        (_C.SENDING, _F.DONE): _C.RECEIVED,
        (_C.RECEIVED, _F.SENT): _C.DONE,
    }
)

UNANNOUNCED = frozenset({_C.GATHERING, _C.READY})
CREDITED = frozenset({_C.ANNOUNCED_EARLY, _C.SEND_PENDING, _C.ANNOUNCED, _C.SENDING, _C.SENT})
"""States in which a chunk uses one of D's credits."""
AWAITED = frozenset({_C.ANNOUNCED_EARLY, _C.ANNOUNCED, _C.SENDING, _C.SENT, _C.RECEIVED})
"""States in which D, or the transport, is to do something."""
HOLDS_SLOT = frozenset(
    {_C.GATHERING, _C.ANNOUNCED_EARLY, _C.SEND_PENDING, _C.READY, _C.ANNOUNCED, _C.SENDING, _C.RECEIVED}
)
TOUCHED = frozenset({_C.GATHERING, _C.ANNOUNCED_EARLY, _C.SEND_PENDING, _C.SENDING, _C.RECEIVED})
"""States in which the engine or the transport works on the slot, whatever becomes of attempt and pair."""


@dataclass(slots=True, eq=False)
class SendAttempt:
    """One attempt on P. Owner: the `Sender`."""

    spec: SequenceSpec
    state: SendState
    deadline: float | None
    generation: int = 0
    cached_tokens: int = 0
    num_known_tokens: int = field(init=False)
    """Tokens whose KV must be on D in the end."""
    move: int = 0
    """Number of the move where it is a running sequence; 0 for a prompt."""
    is_prefix: bool = False
    """Whether it is a prefix that D fetches, which the engine holds since before the offer."""
    most_tokens: int = 0
    """Of a prefix: tokens of the next copy, for which the sequences of this worker wait; 0 for a full chunk."""
    is_growing: bool = False
    """Whether it is a running sequence that was not held yet: it has more tokens than are known here."""
    is_hold_ordered: bool = False
    num_planned: int = 0
    """The engine computes, or has computed, the tokens before this one."""
    next_tokens: list[int] = field(default_factory=list)
    """Of each cache group: tokens before this one are D's already, are not sent, or were cut into chunks. Set once D
    has reserved."""
    next_seq: int = 0
    num_unannounced: int = 0
    num_gathering: int = 0
    token_id: int | None = None
    """Output token 0, when the prompt is computed."""
    logprobs: TokenLogprobs | None = None
    """Log probabilities of `token_id`, if requested."""
    kv_bytes: int = 0
    started: bool = False
    """Whether the engine runs or holds it: `StartPrefill` was issued, `ReleaseSequence` was not."""
    is_committed: bool = False
    """Whether `Commit` was sent: D may have it."""
    waiting_since: float = 0.0
    """When the offer, commit or abort was sent that D must answer next."""

    def __post_init__(self) -> None:
        self.num_known_tokens = self.spec.num_known_tokens
        self.is_growing = self.move > 0
        self.started = self.is_prefix
        self.most_tokens = HASH_BLOCK_TOKENS if self.is_prefix else 0  # until the engine has told of its steps

    @property
    def key(self) -> AttemptKey:
        """(request id, number of the attempt), as in the router's dispatch."""
        return self.spec.key

    @property
    def complete(self) -> bool:
        """Whether the engine computes the end of the prompt, or has."""
        return self.num_planned == self.num_known_tokens and not self.is_growing

    @property
    def stays(self) -> bool:
        """Whether it goes on here where the hand-over fails: a running sequence that D cannot have."""
        return self.move > 0 and not self.is_committed

    @property
    def urgency(self) -> tuple[bool, float]:
        """Sort key, lower goes first: computed prompts, whose streams wait for this, then the earliest deadline."""
        return not self.complete, math.inf if self.deadline is None else self.deadline

    @property
    def live(self) -> bool:
        """Whether the hand-over can still succeed."""
        return self.state not in (SendState.ABORTING, SendState.OVER)

    @property
    def awaits_answer(self) -> bool:
        """Whether D must answer an offer or a commit."""
        return self.state in (SendState.OFFERED, SendState.COMMITTING)

    @property
    def can_commit(self) -> bool:
        """Whether all is announced, and token 0 is known if there is one."""
        return (
            self.state is SendState.PREFILLING
            and (self.token_id is not None or self.is_prefix)
            and not self.is_growing
            and all(token == self.num_known_tokens for token in self.next_tokens)
            and self.num_unannounced == 0
        )

    @property
    def commit(self) -> Commit:
        """Sent when all is announced."""
        assert (self.token_id is None) == self.is_prefix
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
    """One chunk on P: tokens [start, end) of a cache group in staging slot `slot`. Owner: the `Sender`."""

    attempt: SendAttempt
    seq: int
    group: int
    start: int
    end: int
    slot: int
    nbytes: int
    state: SentChunkState = SentChunkState.GATHERING
    checksum: int | None = None
    """Checksum of the payload, known when it is gathered."""
    announced_at: float = 0.0

    @property
    def is_announced(self) -> bool:
        """Whether D has its header."""
        return self.state not in UNANNOUNCED

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.end == self.attempt.num_known_tokens and not self.attempt.is_growing

    @property
    def header(self) -> ChunkHeader:
        """Message that announces this chunk."""
        request_id, number = self.attempt.key
        return ChunkHeader(
            request_id=request_id,
            attempt=number,
            generation=self.attempt.generation,
            seq=self.seq,
            group=self.group,
            start_token=self.start,
            end_token=self.end,
            nbytes=self.nbytes,
            checksum=self.checksum,
        )

    @property
    def gather(self) -> GatherChunk:
        """The command that fills the slot."""
        return GatherChunk(self.attempt.key, self.seq, self.start, self.end, self.slot, self.nbytes, self.group)

    @property
    def send(self) -> SendKv:
        """The command that sends the slot."""
        return SendKv(self.attempt.key, self.seq, self.slot, self.nbytes, self.group)

    @property
    def late_checksum(self) -> ChunkSum:
        """Sent when a chunk that was announced early is gathered."""
        assert self.checksum is not None
        request_id, number = self.attempt.key
        return ChunkSum(
            request_id=request_id,
            attempt=number,
            generation=self.attempt.generation,
            seq=self.seq,
            checksum=self.checksum,
        )


class TokenRange(NamedTuple):
    """Half-open range [start, end) of tokens."""

    start: int
    end: int


def next_chunk(next_token: int, num_planned: int, max_tokens: int, *, complete: bool) -> TokenRange | None:
    """The next payload to send, if there is one worth sending.

    Args:
        next_token: the first token that was not cut yet.
        num_planned: tokens before this one are computed, or will be in the running step.
        max_tokens: tokens of a full payload.
        complete: whether that is the whole prompt.
    """
    available = num_planned - next_token
    if available <= 0:
        return None
    if available >= max_tokens:
        return TokenRange(next_token, next_token + max_tokens)
    if complete or 2 * available >= max_tokens:
        return TokenRange(next_token, num_planned)
    return None


class SendWindow(ChunkWindow[SentChunk]):
    """P's chunks under way: staging slots, the order of announcing, and D's credits. Owner: the `Sender`.

    Args:
        announces_early: whether a prompt's last chunk is announced before it is gathered.
    """

    def __init__(
        self,
        credits: int,
        num_slots: int,
        groups: Sequence[PairGroup],
        max_chunk_bytes: int,
        *,
        announces_early: bool,
    ) -> None:
        super().__init__(credits, num_slots, groups, max_chunk_bytes)
        self._announces_early = announces_early
        self._num_cleared = 0
        self._closed = False
        self._outbox: deque[SentChunk] = deque()
        """Chunks to announce, in the order in which they were cut."""
        self._due: deque[SentChunk] = deque()
        """Chunks that D has cleared and whose bytes have not begun to leave, in the order of D's receives."""

    @property
    def num_credited(self) -> int:
        """Chunks announced and not done."""
        return sum(chunk.state in CREDITED for chunk in self._chunks.values())

    @property
    def awaited_since(self) -> list[float]:
        """When each chunk was announced that D or the transport is to do something with."""
        return [chunk.announced_at for chunk in self._chunks.values() if chunk.state in AWAITED]

    def begin(self, attempt: SendAttempt) -> None:
        """D has reserved, or the last tokens of a running sequence are known, of whose windows nothing was cut before:
        note where each group begins."""
        first, *windows = [group.first_token(attempt.num_known_tokens, attempt.cached_tokens) for group in self._groups]
        attempt.next_tokens = [*(attempt.next_tokens[:1] or [first]), *windows]

    def cut(self, attempt: SendAttempt) -> list[SentChunk]:
        """The next chunks of `attempt`, as many as there are free slots; to be gathered now. Windows of a sequence that
        grows still move on, so they follow when it is held. Of a prefix one chunk is gathered at a time, between two
        steps, and no longer than the sequences of this worker may wait for it."""
        chunks = []
        num_planned, complete = attempt.num_planned, attempt.complete
        for group in range(1 if attempt.is_growing else len(self._groups)):
            while self._slots.num_free and not (attempt.is_prefix and attempt.num_gathering):
                start = attempt.next_tokens[group]
                most = min(self._chunk_tokens[group], attempt.most_tokens or self._chunk_tokens[group])
                tokens = next_chunk(start, num_planned, most, complete=complete)
                if tokens is None:
                    break
                chunks.append(self._take(attempt, group, tokens))
        return chunks

    def _take(self, attempt: SendAttempt, group: int, tokens: TokenRange) -> SentChunk:
        nbytes = (tokens.end - tokens.start) * self._groups[group].token_bytes
        chunk = SentChunk(attempt, attempt.next_seq, group, tokens.start, tokens.end, self._slots.take(), nbytes)
        self._chunks[attempt.key, chunk.seq] = chunk
        self._outbox.append(chunk)
        attempt.next_seq += 1
        attempt.next_tokens[group] = tokens.end
        attempt.num_unannounced += 1
        attempt.num_gathering += 1
        return chunk

    def gathered(self, key: AttemptKey, seq: int) -> SentChunk:
        """The engine is done with the slot. A chunk that D cannot clear any more is dropped; one that D has cleared is
        to be sent now, whatever became of its attempt."""
        chunk = self._advance(key, seq, SentChunkEvent.GATHERED)
        attempt = chunk.attempt
        attempt.num_gathering -= 1
        match chunk.state:
            case SentChunkState.READY:
                is_wanted = attempt.live
            case SentChunkState.ANNOUNCED:
                is_wanted = attempt.state is not SendState.OVER
            case _:
                is_wanted = not self._closed
        if not is_wanted:
            self._drop(chunk)
        return chunk

    def pop_announceable(self, now: float) -> SentChunk | None:
        """The next chunk to announce, if it is gathered, or is the prompt's last, and there is a credit."""
        if not self._outbox or self.num_credited >= self._credits:
            return None
        if self._outbox[0].state is not SentChunkState.READY and not (
            self._announces_early and self._outbox[0].is_last
        ):
            return None
        chunk = self._outbox.popleft()
        chunk.state = SENT_CHUNK_TABLE.next(chunk.state, SentChunkEvent.ANNOUNCE)
        chunk.announced_at = now
        chunk.attempt.num_unannounced -= 1
        chunk.attempt.kv_bytes += chunk.nbytes
        return chunk

    def clear(self, chunk: SentChunk, turn: int) -> None:
        """D has posted the receive: the bytes must be sent. If a `ClearToSend` were lost and the next one obeyed, its
        bytes would end in the receive of another chunk, perhaps of another size; so D numbers them.

        Raises:
            PeerError: if the chunk was not announced, was cleared before, or is not the next one of D's receives.
        """
        if turn != self._num_cleared:
            raise PeerError(f"receive {turn} was posted, but {self._num_cleared} ClearToSend came before it")
        chunk.state = SENT_CHUNK_TABLE.next_from_peer(chunk.state, SentChunkEvent.CLEARED)
        self._num_cleared += 1
        self._due.append(chunk)

    def pop_due(self) -> list[SentChunk]:
        """The chunks whose bytes leave now. One that is not gathered holds up those behind it: their bytes would end in
        its receive."""
        due = []
        while self._due and self._due[0].state is SentChunkState.SENDING:
            due.append(self._due.popleft())
        return due

    def sent(self, key: AttemptKey, seq: int) -> SentChunk:
        """The transport is done with the slot."""
        chunk = self._advance(key, seq, SentChunkEvent.SENT)
        self._slots.give_back(chunk.slot)
        if chunk.state is SentChunkState.DONE:
            del self._chunks[key, seq]
        return chunk

    def done(self, chunk: SentChunk) -> None:
        """D's slot is free: one credit back.

        Raises:
            PeerError: if D had not cleared the chunk, or sent this before.
        """
        chunk.state = SENT_CHUNK_TABLE.next_from_peer(chunk.state, SentChunkEvent.DONE)
        if chunk.state is SentChunkState.DONE:
            del self._chunks[chunk.attempt.key, chunk.seq]

    def drop_unannounced(self, attempt: SendAttempt) -> None:
        """Drop what was not announced; a slot that the engine writes to is freed by its answer."""
        mine = [chunk for chunk in self._outbox if chunk.attempt is attempt]
        self._outbox = deque(chunk for chunk in self._outbox if chunk.attempt is not attempt)
        for chunk in mine:
            assert chunk.state in UNANNOUNCED, chunk.state
            if chunk.state is SentChunkState.READY:
                self._drop(chunk)

    def drop_uncleared(self, attempt: SendAttempt) -> None:
        """D can clear nothing more of this attempt: free what it did not clear."""
        for chunk in list(self._chunks.values()):
            if chunk.attempt is attempt and chunk.state is SentChunkState.ANNOUNCED:
                self._drop(chunk)

    def close(self) -> None:
        """No message comes any more: keep only slots that the engine or the transport still works on."""
        self._closed = True
        self._outbox.clear()
        unsent = [chunk for chunk in self._due if chunk.state is SentChunkState.SENDING]
        self._due.clear()
        for chunk in unsent + [chunk for chunk in self._chunks.values() if chunk.state not in TOUCHED]:
            self._drop(chunk)

    def forget(self, chunk: SentChunk) -> None:
        """Drop a sent chunk whose acknowledgement cannot come any more."""
        if (chunk.attempt.key, chunk.seq) in self._chunks:
            self._drop(chunk)

    def _drop(self, chunk: SentChunk) -> None:
        if chunk.state in HOLDS_SLOT:
            self._slots.give_back(chunk.slot)
        chunk.state = SentChunkState.DONE
        del self._chunks[chunk.attempt.key, chunk.seq]

    def _advance(self, key: AttemptKey, seq: int, event: SentChunkEvent) -> SentChunk:
        chunk = self._chunks.get((key, seq))
        if chunk is None:
            raise TransitionError(f"chunk {seq} of {key} is not under way")
        chunk.state = SENT_CHUNK_TABLE.next(chunk.state, event)
        return chunk
