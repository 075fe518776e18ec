"""D's chunks under way: which are announced, which have a staging slot, what the transport and the engine still work
on.

The window knows when a slot's memory may be used again; the `Receiver` decides what is accepted and what is given up.
"""

from __future__ import annotations

from collections import deque

from disagg.engine.kv_transfer.chunks import tokens_per_chunk
from disagg.engine.kv_transfer.pair_state import PeerError, SlotPool, TransitionError
from disagg.engine.kv_transfer.receiving import (
    RECEIVED_CHUNK_TABLE,
    ReceiveAttempt,
    ReceivedChunk,
    ReceivedChunkEvent,
    ReceivedChunkState,
    check_header,
)
from disagg.proto.handover import ChunkHeader
from disagg.proto.ids import AttemptKey


class ReceiveWindow:
    """Chunks of all attempts of a pair. Owner: its `Receiver`.

    Raises:
        ValueError: if there is no slot or no credit, or not even one token fits a chunk.
    """

    def __init__(self, credits: int, num_slots: int, bytes_per_token: int, max_chunk_bytes: int) -> None:
        if credits < 1:
            raise ValueError(f"a pair needs at least one credit, not {credits}")
        tokens_per_chunk(max_chunk_bytes, bytes_per_token)
        self._credits = credits
        self._bytes_per_token = bytes_per_token
        self._max_chunk_bytes = max_chunk_bytes
        self._slots = SlotPool(num_slots)
        self._chunks: dict[tuple[AttemptKey, int], ReceivedChunk] = {}
        self._waiting: deque[ReceivedChunk] = deque()
        """Announced chunks without a slot, in order of their headers."""
        self._num_cleared = 0

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_busy_slots(self) -> int:
        """Slots whose memory is in use."""
        return self._slots.num_busy

    @property
    def oldest_clear(self) -> float | None:
        """When the chunk was cleared that has held its slot for longest; of those that came, none waits for bytes."""
        idle = (ReceivedChunkState.WAITING, ReceivedChunkState.HELD)
        return min((chunk.cleared_at for chunk in self._chunks.values() if chunk.state not in idle), default=None)

    def has_any_of(self, key: AttemptKey) -> bool:
        """Whether a chunk of this attempt is under way."""
        return any(chunk_key == key for chunk_key, _ in self._chunks)

    def announce(self, attempt: ReceiveAttempt, header: ChunkHeader) -> None:
        """Queue a chunk.

        Raises:
            PeerError: if the header is not the one that is due, or P has no credit for it.
        """
        check_header(attempt, header, self._bytes_per_token, self._max_chunk_bytes)
        if len(self) >= self._credits:
            raise PeerError(f"chunk {header.seq} of {attempt.key} was announced without a credit")
        attempt.next_seq += 1
        attempt.next_token = header.end_token
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

    def get(self, key: AttemptKey, seq: int) -> ReceivedChunk | None:
        """A chunk under way, if it is."""
        return self._chunks.get((key, seq))

    def hold(self, chunk: ReceivedChunk) -> None:
        """The transport is done with the slot; nobody knows yet whether what came is right."""
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, ReceivedChunkEvent.HOLD)

    def judge(self, chunk: ReceivedChunk, *, keep: bool) -> None:
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
        """Forget what nobody works on: chunks that were not cleared, for which no bytes will come, and those that came
        and were not judged, which are returned, since P waits for their credit."""
        self._waiting = deque(chunk for chunk in self._waiting if chunk.attempt is not attempt)
        mine = [chunk for chunk in self._chunks.values() if chunk.attempt is attempt]
        held = [chunk for chunk in mine if chunk.state is ReceivedChunkState.HELD]
        for chunk in [chunk for chunk in mine if chunk.state is ReceivedChunkState.WAITING] + held:
            self.judge(chunk, keep=False)
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
