"""What both halves of a hand-over are built from: staging slots, the lease clock of a pair, and memories that fade."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

from disagg.proto.ids import AttemptKey

BEAT_SLACK = 0.75
"""Ticks jitter: one that comes a little early still beats, instead of leaving the beat to the next tick."""

S = TypeVar("S", bound=Hashable)
E = TypeVar("E", bound=Hashable)


class TransitionError(RuntimeError):
    """Our own worker gave an input that the machine cannot have at this point: a bug here, never a peer's doing."""


class PeerError(Exception):
    """The peer broke the protocol; the pair must be closed. Never leaves this package."""


class Table(Generic[S, E]):
    """Transitions as data."""

    def __init__(self, transitions: Mapping[tuple[S, E], S]) -> None:
        self._transitions = transitions

    def next(self, state: S, event: E) -> S:
        """The state after an event of our own.

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
    """A fixed number of staging slots, named 0 to n - 1. A slot is given back only when nobody can touch its memory
    any more."""

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
        """The slot's memory is nobody's again."""
        assert 0 <= slot < self.num_slots, slot
        assert slot not in self._free, f"slot {slot} was given back twice"
        self._free.append(slot)


class PairClock:
    """The lease of a pair: when the peer was last heard, and when to beat.

    A tick that comes late says that this process stood still, not that the peer was silent; the peer's messages wait
    unread behind the tick. Then the silence starts to count anew.
    """

    def __init__(self, now: float, lease_timeout_s: float, heartbeat_s: float) -> None:
        self.lease_timeout_s = lease_timeout_s
        self._heartbeat_s = heartbeat_s
        self.now = now
        """The latest time seen; inputs without a time are stamped with it."""
        self._last_tick = now
        self._last_heard = now
        self._last_beat = now

    @property
    def silence_s(self) -> float:
        """For how long nothing was heard."""
        return self.now - self._last_heard

    def see(self, now: float) -> None:
        """Time went on."""
        self.now = max(self.now, now)

    def heard(self, now: float) -> None:
        """The peer sent something."""
        self.see(now)
        self._last_heard = self.now

    def tick(self, now: float) -> bool:
        """Time went on; whether a heartbeat is due."""
        self.see(now)
        if self.now - self._last_tick > self.lease_timeout_s / 2:
            self._last_heard = self.now
        self._last_tick = self.now
        if self.now - self._last_beat < BEAT_SLACK * self._heartbeat_s:
            return False
        self._last_beat = self.now
        return True


class FadingSet:
    """Keys remembered for a while: bounded in number (the oldest goes first) and in time."""

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
        """Forget `key`, if it is known."""
        self._added.pop(key, None)

    def fade(self, now: float) -> None:
        """Forget what is older than the time to live."""
        while self._added and now - next(iter(self._added.values())) > self._ttl_s:
            self._added.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._added.clear()


class Closable(Protocol):
    """A pair, as whoever has too many of them sees it."""

    used_at: float

    @property
    def is_idle(self) -> bool:
        """Whether it may be closed."""
        ...


P = TypeVar("P", bound=Closable)


def to_make_room(pairs: Collection[P], most: int) -> list[P]:
    """Those to close so that with one more there are at most `most`: idle ones, not used for longest first. Fewer where
    the others are in use."""
    surplus = len(pairs) - most + 1
    if surplus <= 0:
        return []
    return sorted((pair for pair in pairs if pair.is_idle), key=lambda pair: pair.used_at)[:surplus]
