"""D's chunks under way: which are announced, which have a staging slot, what the transport and the engine still work
on.

The window knows when a slot's memory may be used again; the `Receiver` decides what is accepted and what is given up.
"""

from __future__ import annotations

from collections import deque

from disagg.engine.kv_transfer.pair_state import SlotPool, TransitionError
from disagg.engine.kv_transfer.receiving import (
    RECEIVED_CHUNK_TABLE,
    ReceiveAttempt,
    ReceivedChunk,
    ReceivedChunkEvent,
    ReceivedChunkState,
)
from disagg.proto.handover import ChunkHeader
from disagg.proto.ids import AttemptKey


class ReceiveWindow:
    """Chunks of all attempts of a pair. Owner: its `Receiver`.

    Raises:
        ValueError: if there is no slot.
    """

    def __init__(self, num_slots: int) -> None:
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
        """When the chunk was cleared that has held its slot for longest."""
        cleared = (c.cleared_at for c in self._chunks.values() if c.state is not ReceivedChunkState.WAITING)
        return min(cleared, default=None)

    def has_any_of(self, key: AttemptKey) -> bool:
        """Whether a chunk of this attempt is under way."""
        return any(chunk_key == key for chunk_key, _ in self._chunks)

    def announce(self, attempt: ReceiveAttempt, header: ChunkHeader) -> None:
        """Queue a chunk whose header was checked."""
        attempt.next_seq += 1
        attempt.next_token = header.end_token
        chunk = ReceivedChunk(attempt, header)
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

    def received(self, key: AttemptKey, seq: int, *, keep: bool) -> ReceivedChunk:
        """The transport is done with the slot: `keep` it to scatter from, or give it back.

        Raises:
            TransitionError: if this chunk was not being received.
        """
        event = ReceivedChunkEvent.VERIFIED if keep else ReceivedChunkEvent.DISCARD
        chunk = self.under_way(key, seq, ReceivedChunkState.RECEIVING)
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, event)
        if not keep:
            self._drop(chunk)
        return chunk

    def scattered(self, key: AttemptKey, seq: int) -> ReceivedChunk:
        """The engine is done with the slot.

        Raises:
            TransitionError: if this chunk was not being scattered.
        """
        chunk = self.under_way(key, seq, ReceivedChunkState.SCATTERING)
        chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, ReceivedChunkEvent.SCATTERED)
        self._drop(chunk)
        return chunk

    def drop_waiting(self, attempt: ReceiveAttempt) -> None:
        """Forget what was announced and not cleared; no bytes will come for it."""
        mine = [chunk for chunk in self._waiting if chunk.attempt is attempt]
        self._waiting = deque(chunk for chunk in self._waiting if chunk.attempt is not attempt)
        for chunk in mine:
            chunk.state = RECEIVED_CHUNK_TABLE.next(chunk.state, ReceivedChunkEvent.DISCARD)
            self._drop(chunk)

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
