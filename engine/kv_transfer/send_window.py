"""P's chunks under way: staging slots, the order of announcing, and D's credits.

The window knows when a slot's memory may be used again; the `Sender` decides what is worth sending and what is given
up.
"""

from __future__ import annotations

from collections import deque

from disagg.engine.kv_transfer.chunks import TokenRange, next_chunk, tokens_per_chunk
from disagg.engine.kv_transfer.pair_state import PeerError, SlotPool, TransitionError
from disagg.engine.kv_transfer.sending import (
    AWAITED,
    CREDITED,
    HOLDS_SLOT,
    SENT_CHUNK_TABLE,
    TOUCHED,
    UNANNOUNCED,
    SendAttempt,
    SendState,
    SentChunk,
    SentChunkEvent,
    SentChunkState,
)
from disagg.proto.ids import AttemptKey


class SendWindow:
    """Chunks of all attempts of a pair. Owner: its `Sender`.

    Raises:
        ValueError: if there is no slot or no credit, or not even one token fits a chunk.
    """

    def __init__(
        self, credits: int, num_slots: int, bytes_per_token: int, max_chunk_bytes: int, *, promises: bool
    ) -> None:
        if credits < 1:
            raise ValueError(f"a pair needs at least one credit, not {credits}")
        self._credits = credits
        self._bytes_per_token = bytes_per_token
        self._promises = promises
        self._chunk_tokens = tokens_per_chunk(max_chunk_bytes, bytes_per_token)
        self._slots = SlotPool(num_slots)
        self._chunks: dict[tuple[AttemptKey, int], SentChunk] = {}
        self._num_granted = 0
        self._closed = False
        self._outbox: deque[SentChunk] = deque()
        """Chunks to announce, in the order in which they were cut."""
        self._due: deque[SentChunk] = deque()
        """Chunks that D has cleared and whose bytes have not begun to leave, in the order of D's receives."""

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_busy_slots(self) -> int:
        """Slots whose memory is in use."""
        return self._slots.num_busy

    @property
    def num_credited(self) -> int:
        """Chunks announced and not done."""
        return sum(chunk.state in CREDITED for chunk in self._chunks.values())

    @property
    def announced_at(self) -> list[float]:
        """When each chunk was announced that is not done with."""
        return [chunk.announced_at for chunk in self._chunks.values() if chunk.state in AWAITED]

    def has_any_of(self, key: AttemptKey) -> bool:
        """Whether a chunk of this attempt is under way."""
        return any(chunk_key == key for chunk_key, _ in self._chunks)

    def get(self, key: AttemptKey, seq: int) -> SentChunk | None:
        """A chunk under way, if it is."""
        return self._chunks.get((key, seq))

    def cut(self, attempt: SendAttempt) -> list[SentChunk]:
        """The next chunks of `attempt`, as many as there are free slots; to be gathered now."""
        chunks = []
        while self._slots.num_free:
            tokens = next_chunk(attempt.next_token, attempt.num_planned, self._chunk_tokens, complete=attempt.complete)
            if tokens is None:
                break
            chunks.append(self._take(attempt, tokens))
        return chunks

    def _take(self, attempt: SendAttempt, tokens: TokenRange) -> SentChunk:
        nbytes = (tokens.end - tokens.start) * self._bytes_per_token
        chunk = SentChunk(attempt, attempt.next_seq, tokens.start, tokens.end, self._slots.take(), nbytes)
        self._chunks[attempt.key, chunk.seq] = chunk
        self._outbox.append(chunk)
        attempt.next_seq += 1
        attempt.next_token = tokens.end
        attempt.num_unannounced += 1
        attempt.num_gathering += 1
        return chunk

    def gathered(self, key: AttemptKey, seq: int) -> SentChunk:
        """The engine is done with the slot. A chunk for which D cannot ask any more is dropped; one that D has cleared
        is to be sent now, whatever became of its attempt."""
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
        if self._outbox[0].state is not SentChunkState.READY and not (self._promises and self._outbox[0].is_last):
            return None
        chunk = self._outbox.popleft()
        chunk.state = SENT_CHUNK_TABLE.next(chunk.state, SentChunkEvent.ANNOUNCE)
        chunk.announced_at = now
        chunk.attempt.num_unannounced -= 1
        chunk.attempt.kv_bytes += chunk.nbytes
        return chunk

    def grant(self, chunk: SentChunk, turn: int) -> None:
        """D has posted the receive: the bytes are owed. Were a grant lost and we sent on, the bytes would end in the
        receive of another chunk, perhaps of another size; so D counts them.

        Raises:
            PeerError: if the chunk was not announced, was cleared before, or is not the next one of D's receives.
        """
        if turn != self._num_granted:
            raise PeerError(f"receive {turn} was posted, {self._num_granted} were heard of")
        chunk.state = SENT_CHUNK_TABLE.next_from_peer(chunk.state, SentChunkEvent.GRANTED)
        self._num_granted += 1
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
        if chunk.state is SentChunkState.GONE:
            del self._chunks[key, seq]
        return chunk

    def done(self, chunk: SentChunk) -> None:
        """D's slot is free: one credit back.

        Raises:
            PeerError: if D had not cleared the chunk, or said so before.
        """
        chunk.state = SENT_CHUNK_TABLE.next_from_peer(chunk.state, SentChunkEvent.DONE)
        if chunk.state is SentChunkState.GONE:
            del self._chunks[chunk.attempt.key, chunk.seq]

    def drop_unannounced(self, attempt: SendAttempt) -> None:
        """Take back what D does not know of; a slot that the engine writes to stays until it answers."""
        mine = [chunk for chunk in self._outbox if chunk.attempt is attempt]
        self._outbox = deque(chunk for chunk in self._outbox if chunk.attempt is not attempt)
        for chunk in mine:
            assert chunk.state in UNANNOUNCED, chunk.state
            if chunk.state is SentChunkState.READY:
                self._drop(chunk)

    def drop_uncleared(self, attempt: SendAttempt) -> None:
        """D can ask for nothing more of this attempt: free what it did not clear."""
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
        chunk.state = SentChunkState.GONE
        del self._chunks[chunk.attempt.key, chunk.seq]

    def _advance(self, key: AttemptKey, seq: int, event: SentChunkEvent) -> SentChunk:
        chunk = self._chunks.get((key, seq))
        if chunk is None:
            raise TransitionError(f"chunk {seq} of {key} is not under way")
        chunk.state = SENT_CHUNK_TABLE.next(chunk.state, event)
        return chunk
