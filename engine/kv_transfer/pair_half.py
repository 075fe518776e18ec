"""What the two halves of a hand-over (`Sender` on P, `Receiver` on D) have in common.

    PairHalf      guard against the peer's messages, lease, closing
    ChunkWindow   chunks under way, their credits and staging slots
    Table         transitions as data
    SlotPool, PairClock, ExpiringSet    staging slots, the lease of a pair, keys remembered for a while

Pure: time comes in as an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from disagg.engine.kv_transfer.commands import PAIR_CLOSED, STUCK, Cause, ClosePair, SendControl
from disagg.engine.sharding.kv_routes import PairGroup
from disagg.proto.handover import Abort, AbortAck, Failure, PairHeartbeat, ReservationMessage
from disagg.proto.ids import AttemptKey

HEARTBEAT_SLACK = 0.75
"""Ticks jitter: a heartbeat may go out with a tick that comes a little early, instead of a whole tick late."""

S = TypeVar("S", bound=Hashable)
E = TypeVar("E", bound=Hashable)


class TransitionError(RuntimeError):
    """An input of this worker that its half cannot have at this point: a bug here, never caused by a peer."""


class PeerError(Exception):
    """The peer broke the protocol; the pair must be closed. Never leaves this package."""


class Table(Generic[S, E]):
    """State transitions as a mapping of (state, event) to the next state."""

    def __init__(self, transitions: Mapping[tuple[S, E], S]) -> None:
        self._transitions = transitions

    def next(self, state: S, event: E) -> S:
        """The state after an event of this worker.

        Raises:
            TransitionError: if the pair is not listed.
        """
        after = self._transitions.get((state, event))
        if after is None:
            raise TransitionError(f"{event} in {state}")
        return after

    def next_from_peer(self, state: S, event: E) -> S:
        """The state after a message of the peer.

        Raises:
            PeerError: if the pair is not listed.
        """
        after = self._transitions.get((state, event))
        if after is None:
            raise PeerError(f"{event} in {state}")
        return after


class SlotPool:
    """A fixed number of staging slots, 0 to n - 1. A slot is given back only when neither the engine nor the transport
    can touch its memory any more."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a pair needs at least one staging slot, not {num_slots}")
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def num_busy(self) -> int:
        """Slots that are taken."""
        return self.num_slots - len(self._free)

    def take(self) -> int:
        """A free slot; the caller checked `num_free`."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The slot's memory can be used again."""
        assert 0 <= slot < self.num_slots, slot
        assert slot not in self._free, f"slot {slot} was given back twice"
        self._free.append(slot)


class PairClock:
    """The lease of a pair: when the peer was last heard, and when a heartbeat is due.

    A tick that comes late means that this process stood still, not that the peer was silent: its messages are unread
    behind the tick. The silence is then counted anew.
    """

    def __init__(self, now: float, lease_timeout_s: float, heartbeat_s: float) -> None:
        self.lease_timeout_s = lease_timeout_s
        self._heartbeat_s = heartbeat_s
        self.now = now
        """The latest time seen; inputs without a time are stamped with it."""
        self._last_tick = now
        self._last_heard = now
        self._last_heartbeat = now

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the peer."""
        return self.now - self._last_heard

    def advance(self, now: float) -> None:
        """Set the current time; a time before it is ignored."""
        self.now = max(self.now, now)

    def heard(self, now: float) -> None:
        """Record that a message of the peer arrived."""
        self.advance(now)
        self._last_heard = self.now

    def tick(self, now: float) -> bool:
        """Set the current time and return whether a heartbeat is due."""
        self.advance(now)
        if self.now - self._last_tick > self.lease_timeout_s / 2:
            self._last_heard = self.now
        self._last_tick = self.now
        if self.now - self._last_heartbeat < HEARTBEAT_SLACK * self._heartbeat_s:
            return False
        self._last_heartbeat = self.now
        return True


class ExpiringSet:
    """Keys of attempts, remembered for `ttl_s` seconds; beyond `max_keys` the oldest goes first."""

    def __init__(self, ttl_s: float, max_keys: int) -> None:
        self._ttl_s = ttl_s
        self._max_keys = max_keys
        self._added: OrderedDict[AttemptKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._added)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._added

    def add(self, key: AttemptKey, now: float) -> None:
        """Remember `key` from `now` on."""
        self._added[key] = now
        self._added.move_to_end(key)
        while len(self._added) > self._max_keys:
            self._added.popitem(last=False)

    def discard(self, key: AttemptKey) -> None:
        """Forget `key`, if it is remembered."""
        self._added.pop(key, None)

    def expire(self, now: float) -> None:
        """Forget what is older than the time to live."""
        while self._added and now - next(iter(self._added.values())) > self._ttl_s:
            self._added.popitem(last=False)

    def clear(self) -> None:
        """Remove all entries of the set."""
        self._added.clear()


K = TypeVar("K")


def tokens_per_chunk(max_chunk_bytes: int, bytes_per_token: int) -> int:
    """How many whole tokens a payload holds.

    Raises:
        ValueError: if not even one fits.
    """
    if bytes_per_token < 1:
        raise ValueError(f"bytes_per_token must be positive, not {bytes_per_token}")
    if max_chunk_bytes < bytes_per_token:
        raise ValueError(f"chunk_bytes is {max_chunk_bytes}, but the KV of one token takes {bytes_per_token} bytes")
    return max_chunk_bytes // bytes_per_token


class ChunkWindow(Generic[K]):
    """Chunks of all attempts of a pair. It decides when a staging slot may be used again; what is worth moving and what
    is given up is for the half around it.

    Args:
        credits: chunks that may be announced and not done.
        num_slots: staging slots.
        groups: the cache groups. A payload is of one of them.
        max_chunk_bytes: largest payload, and size of a slot.

    Raises:
        ValueError: if there is no slot or no credit, or not even one token fits a chunk.
    """

    def __init__(self, credits: int, num_slots: int, groups: Sequence[PairGroup], max_chunk_bytes: int) -> None:
        if credits < 1:
            raise ValueError(f"a pair needs at least one credit, not {credits}")
        self._credits = credits
        self._groups = tuple(groups)
        self.max_chunk_bytes = max_chunk_bytes
        """Bytes of a staging slot, and of the largest payload."""
        self._chunk_tokens = tuple(tokens_per_chunk(max_chunk_bytes, group.token_bytes) for group in groups)
        self._slots = SlotPool(num_slots)
        self._chunks: dict[tuple[AttemptKey, int], K] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_busy_slots(self) -> int:
        """Slots whose memory is in use."""
        return self._slots.num_busy

    def has_any_of(self, key: AttemptKey) -> bool:
        """Whether a chunk of this attempt is under way."""
        return any(chunk_key == key for chunk_key, _ in self._chunks)

    def get(self, key: AttemptKey, seq: int) -> K | None:
        """A chunk under way, if it is."""
        return self._chunks.get((key, seq))


class PairAttempt(Protocol):
    """An attempt, on either side."""

    generation: int

    @property
    def key(self) -> AttemptKey:
        """(request id, number of the attempt); equal on both sides."""
        ...


A = TypeVar("A", bound=PairAttempt)
M = TypeVar("M")
C = TypeVar("C")


class PairHalf(ABC, Generic[A, M, C]):
    """One half of a pair: attempts `A`, messages of the peer `M`, commands `C` for its worker.

    Every input returns the commands to carry out, in order. One half serves one control stream; after `close` it takes
    no attempt and no message any more, only the answers of engine and transport that free its slots. `counters` counts
    what a healthy pair never sees (`stale`, `violations`).

    Args:
        now: this process's clock, seconds.
        lease_timeout_s: silence of the peer after which attempts fail; after twice as long the pair is closed, if
            anything is left of them.
        heartbeat_s: how often to send a heartbeat.
        transfer_timeout_s: how long the peer or the transport may leave something unanswered before the pair is closed.
    """

    PEER: ClassVar[str]
    """The peer, for people."""
    HOLDINGS: ClassVar[str]
    """Begins the names of what it holds."""

    _window: ChunkWindow[Any]

    def __init__(self, now: float, lease_timeout_s: float, heartbeat_s: float, transfer_timeout_s: float) -> None:
        self._clock = PairClock(now, lease_timeout_s, heartbeat_s)
        self._transfer_timeout_s = transfer_timeout_s
        self._attempts: dict[AttemptKey, A] = {}
        self.closed = False
        self.counters: Counter[str] = Counter()

    @property
    def max_chunk_bytes(self) -> int:
        """Bytes of a staging slot."""
        return self._window.max_chunk_bytes

    def on_message(self, message: M, now: float) -> list[C | SendControl | ClosePair]:
        """A control message of the peer. One that it must not send closes the pair."""
        if self.closed:
            return []
        self._clock.heard(now)
        out: list[C | SendControl | ClosePair] = []
        try:
            self._receive(message, out)
            self._pump(out)
        except PeerError as error:
            self.counters["violations"] += 1
            out += self._close_pair(Cause(Failure.VIOLATION, f"protocol violation by the {self.PEER}: {error}"))
        return out

    def tick(self, now: float) -> list[C | SendControl | ClosePair]:
        """Let time pass: send a heartbeat, and end what waited too long. To be called at least every `heartbeat_s`."""
        out: list[C | SendControl | ClosePair] = []
        if self.closed:
            return out
        if self._clock.tick(now):
            out.append(SendControl(PairHeartbeat()))
        silence_s, lease_s = self._clock.silence_s, self._clock.lease_timeout_s
        lost = Cause(Failure.LEASE_LOST, f"lease lost: the {self.PEER} was silent for {silence_s:.1f} s")
        self._expire(now, lost if silence_s >= lease_s else None, out)
        if silence_s >= 2 * lease_s and (self._attempts or len(self._window)):
            return out + self._close_pair(lost)
        oldest = self._oldest_unanswered()
        if oldest is not None and self._clock.now - oldest >= self._transfer_timeout_s:
            return out + self._close_pair(STUCK)
        self._pump(out)
        return out

    def close(self, now: float, cause: Cause = PAIR_CLOSED) -> list[C | SendControl | ClosePair]:
        """The control stream ended, or the peer is gone: every attempt ends. Idempotent.

        Slots that the transport or the engine still works on are freed by their answers; closing the transport makes it
        answer.
        """
        self._clock.advance(now)
        out: list[C | SendControl | ClosePair] = []
        if not self.closed:
            self.closed = True
            self._end_all(cause, out)
        return out

    def holdings(self) -> dict[str, int]:
        """Counts of what this half holds; all zero when idle."""
        return {
            self.HOLDINGS: len(self._attempts),
            f"{self.HOLDINGS}_chunks": len(self._window),
            f"{self.HOLDINGS}_slots": self._window.num_busy_slots,
        }

    def _current(self, message: ReservationMessage) -> A | None:
        """The attempt that a message means. One that is over, or another reservation of it, is counted as stale."""
        attempt = self._attempts.get(message.key)
        if attempt is None or attempt.generation != message.generation:
            self.counters["stale"] += 1
            return None
        return attempt

    def _close_pair(self, cause: Cause) -> list[C | SendControl | ClosePair]:
        return [*self.close(self._clock.now, cause), ClosePair(cause)]

    @abstractmethod
    def _receive(self, message: M, out: list[C | SendControl | ClosePair]) -> None:
        """Take a message. Raises `PeerError` for one that the peer must not send."""

    @abstractmethod
    def _pump(self, out: list[C | SendControl | ClosePair]) -> None:
        """Do all that slots and credits allow."""

    @abstractmethod
    def _expire(self, now: float, lease_lost: Cause | None, out: list[C | SendControl | ClosePair]) -> None:
        """End the attempts whose time is over; all of them if the lease is lost, with this cause."""

    @abstractmethod
    def _oldest_unanswered(self) -> float | None:
        """Since when the peer or the transport has not answered something without which the pair cannot go on."""

    @abstractmethod
    def _end_all(self, cause: Cause, out: list[C | SendControl | ClosePair]) -> None:
        """End all attempts; the pair is closed."""


def abort(key: AttemptKey, cause: Cause) -> SendControl:
    """Has the peer give an attempt up."""
    return SendControl(
        Abort(request_id=key.request_id, attempt=key.attempt, failure=cause.failure, detail=cause.detail)
    )


def abort_ack(key: AttemptKey) -> SendControl:
    """The answer to the peer's `Abort`."""
    return SendControl(AbortAck(request_id=key.request_id, attempt=key.attempt))
