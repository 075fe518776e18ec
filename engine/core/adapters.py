"""Which adapters are loaded, and what waits for one. Pure.

    take ──> ready: it is loaded
      └──> waits ──> read is ordered, once there is a slot ──> AdapterRead ──> put into the slot ──> ready
                                                                  └── an error ──> failed

A slot is used by the sequences that are computed with its adapter, and by those that wait for it to be loaded. Without
a free slot the adapter that nobody uses and that was not used for longest makes room; without such a one, sequences
wait. What waits holds neither blocks nor a place in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.engine.plan import LoadedAdapter, is_fatal
from disagg.proto.ids import AttemptKey
from disagg.proto.messages import Adapter, AdapterState, EndReason


class Outcome(NamedTuple):
    """What waited waits no more: the adapter is in a slot; or `reason` and `detail` say why not."""

    key: AttemptKey
    reason: EndReason | None = None
    detail: str = ""


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    adapter: Adapter | None = None
    loaded: LoadedAdapter | None = None
    """None while it is read."""
    load_ms: float = 0.0
    ordered_at: float = 0.0
    users: set[AttemptKey] = field(default_factory=set)
    used: int = 0
    """Number of the latest use: larger is later."""
    is_leaving: bool = False


class Adapters:
    """Owner: the engine core.

    Args:
        num_slots: adapters that are loaded at most.
        order: has an adapter read into a slot of that number, off the engine's thread; the answer is `answer`.
        put: writes what was read into a slot, between two steps.
    """

    def __init__(
        self, num_slots: int, order: Callable[[Adapter, int], None], put: Callable[[int, LoadedAdapter], None]
    ) -> None:
        self._order = order
        self._put = put
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._of: dict[str, _Slot] = {}
        """Slot of each adapter that is loaded or read, by its fingerprint."""
        self._slot_of: dict[AttemptKey, _Slot] = {}
        """Slot that each sequence uses."""
        self._waiting: dict[AttemptKey, Adapter] = {}
        """What waits, in order: for a read, or for a slot."""
        self._num_taken = 0

    def take(self, key: AttemptKey, adapter: Adapter, now: float) -> bool:
        """Use an adapter for a sequence until `forget`; whether it is loaded. Otherwise an `Outcome` follows."""
        self._waiting[key] = adapter
        self._start(now)
        slot = self._slot_of.get(key)
        if slot is None or slot.loaded is None:
            return False
        del self._waiting[key]
        return True

    def slot(self, key: AttemptKey) -> int:
        """Number of the slot that a sequence uses; -1 for none."""
        slot = self._slot_of.get(key)
        return -1 if slot is None or slot.loaded is None else slot.number

    def answer(
        self, number: int, loaded: LoadedAdapter | None, reason: EndReason, detail: str, now: float
    ) -> list[Outcome]:
        """The read into a slot is over: with an adapter, or with an error. What waits no more."""
        slot = self._slots[number]
        assert slot.adapter is not None
        assert slot.loaded is None, "a slot is read into once"
        keys = [key for key in self._waiting if key in slot.users]
        if loaded is not None:
            try:
                self._put(number, loaded)
            except Exception as error:
                if is_fatal(error):
                    raise
                loaded, reason, detail = None, "refused", f"not put into its slot: {error!r}"
        if loaded is not None:
            slot.loaded, slot.load_ms = loaded, (now - slot.ordered_at) * 1e3
            outcomes = [Outcome(key) for key in keys]
        else:
            outcomes = [Outcome(key, reason, f"adapter {self._waiting[key].name}: {detail}") for key in keys]
            for key in keys:
                del self._slot_of[key]
            self._clear(slot)
        for key in keys:
            del self._waiting[key]
        self._leave(slot)
        self._start(now)
        return outcomes

    def forget(self, key: AttemptKey, now: float) -> None:
        """The sequence is over."""
        was_waiting = self._waiting.pop(key, None)
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            slot.users.discard(key)
            self._leave(slot)
        if slot is not None or was_waiting is not None:
            self._start(now)

    def keep(self, loaded: LoadedAdapter, adapter: Adapter, load_ms: float) -> float:
        """Put what was read for an operator into a slot, if one is free or can be; the milliseconds that loading took,
        0 where it was loaded before."""
        slot = self._of.get(loaded.fingerprint)
        if slot is not None:
            slot.is_leaving = False
            return 0.0
        if not self._waiting and (slot := self._free_slot()) is not None:
            self._take_slot(slot, adapter, loaded.fingerprint)
            try:
                self._put(slot.number, loaded)
            except Exception:
                self._clear(slot)
                raise
            slot.loaded, slot.load_ms = loaded, load_ms
        return load_ms

    def unload(self, fingerprint: str) -> tuple[bool, int]:
        """Have an adapter leave its slot once nobody uses it; whether it was loaded, and how many use it."""
        slot = self._of.get(fingerprint)
        if slot is None:
            return False, 0
        slot.is_leaving, uses = True, len(slot.users)
        self._leave(slot)
        return True, uses

    def states(self) -> tuple[AdapterState, ...]:
        """What is loaded."""
        return tuple(
            AdapterState(
                fingerprint=slot.loaded.fingerprint,
                bytes=slot.loaded.num_bytes,
                load_ms=slot.load_ms,
                uses=len(slot.users),
            )
            for slot in self._slots
            if slot.loaded is not None
        )

    @property
    def waiting(self) -> frozenset[AttemptKey]:
        """What waits."""
        return frozenset(self._waiting)

    @property
    def num_uses(self) -> int:
        """Sequences that use an adapter or wait for one."""
        return len(self._slot_of.keys() | self._waiting.keys())

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        problems = []
        if any(self._of[name].adapter is None for name in self._of) or len(self._of) != sum(
            slot.adapter is not None for slot in self._slots
        ):
            problems.append("slots and names of adapters differ")
        users = {key: slot for slot in self._slots for key in slot.users}
        if users != self._slot_of:
            problems.append("users of adapters are not those of their slots")
        if any(slot.loaded is None and key not in self._waiting for key, slot in self._slot_of.items()):
            problems.append("a sequence uses an adapter that is not loaded")
        if any(slot.is_leaving and not slot.users and slot.loaded is not None for slot in self._slots):
            problems.append("an adapter that nobody uses does not leave")
        return problems

    # ------------------------------------------------------------ inside

    def _start(self, now: float) -> None:
        """Give slots to what waits, first come, first served, and order what is to be read."""
        for key, adapter in self._waiting.items():
            if key in self._slot_of:
                continue
            slot = self._of.get(adapter.fingerprint)
            if slot is None:
                if (slot := self._free_slot()) is None:
                    continue
                self._take_slot(slot, adapter, adapter.fingerprint)
                slot.ordered_at = now
                self._order(adapter, slot.number)
            self._num_taken += 1
            slot.used, slot.is_leaving = self._num_taken, False
            slot.users.add(key)
            self._slot_of[key] = slot

    def _free_slot(self) -> _Slot | None:
        """An empty slot, else the one that was not used for longest of those that nobody uses."""
        free = [slot for slot in self._slots if not slot.users and (slot.adapter is None or slot.loaded is not None)]
        return min(free, key=lambda slot: (slot.adapter is not None, slot.used), default=None)

    def _take_slot(self, slot: _Slot, adapter: Adapter, fingerprint: str) -> None:
        self._clear(slot)
        self._num_taken += 1
        slot.adapter, slot.used = adapter, self._num_taken
        self._of[fingerprint] = slot

    def _leave(self, slot: _Slot) -> None:
        if slot.is_leaving and not slot.users and slot.loaded is not None:
            self._clear(slot)

    def _clear(self, slot: _Slot) -> None:
        self._of = {name: each for name, each in self._of.items() if each is not slot}
        slot.adapter, slot.loaded, slot.load_ms, slot.is_leaving = None, None, 0.0, False
        slot.users.clear()
