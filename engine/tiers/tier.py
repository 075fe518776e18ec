"""The index of one tier: which extents it holds, in which slots, and which of them goes next. Pure.

    begin_write ──> being written ──end_write──> held ──evicted, dropped, forgotten──> gone
                         └── it failed ──> gone

A tier is prefix-closed: with an extent it holds all extents of the chain before it. So what it holds of a prompt is one
number, and nothing in it is out of reach. Whenever a chain is used, its extents move behind all others in the order of
eviction, the last one first and the first one last. So no extent is evicted before those that follow it in a chain. The
order is that of the device cache (`blocks/cached_blocks.py`): copies first, a tenant that holds more than its share
before others, then the extent that was used longest ago.

Whoever reads an extent, or writes one behind it, pins its chain up to there: pinned extents are not evicted. One that
is dropped meanwhile (its file is damaged, say) is gone for all later lookups, and its slot is free with the last pin.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

from disagg.engine.blocks.cached_blocks import CachedBlocks, TenantTag
from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.proto.ids import BlockHash


class Held:
    """An extent in a tier. Owner: the tier; others keep it as a pin."""

    __slots__ = ("children", "extent", "is_copy", "is_gone", "is_ready", "num_pins", "slot")

    def __init__(self, extent: Extent, slot: int, *, is_copy: bool, is_ready: bool) -> None:
        self.extent = extent
        self.slot = slot
        self.is_copy = is_copy
        self.is_ready = is_ready
        """Whether it is written."""
        self.is_gone = False
        self.num_pins = 0
        self.children: dict[BlockHash, None] = {}
        """Extents held that follow it in some chain."""


Pins = tuple[Held, ...]
"""Extents of one chain, the first one first."""


class Writing(NamedTuple):
    """An extent that is being written."""

    held: Held
    before: Pins


class Change(NamedTuple):
    """What a tier came to hold, or holds no more."""

    key: BlockHash
    is_stored: bool


class Tier:
    """Owner: the tier store.

    Args:
        num_slots: extents that there is room for.
        share: part of them that each tenant keeps from the others; 0 for an equal part of what is held.
        keep_s: how long a tenant keeps it without using it.
    """

    def __init__(self, num_slots: int, share: float = 0.0, keep_s: float = float("inf")) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._order = CachedBlocks(num_slots, share, keep_s)
        """Slots of the extents that may be evicted: written, and not pinned."""
        self._held: dict[BlockHash, Held] = {}
        self._by_slot: dict[int, Held] = {}
        """Also those that are gone and pinned."""
        self._free: list[int] = []
        """Slots below `_num_made` that are free; the last one is used next."""
        self._num_made = 0
        self._num_ready = 0
        self._removed: list[Extent] = []
        self._changes: list[Change] = []

    def __len__(self) -> int:
        """Extents that can be read."""
        return self._num_ready

    def __contains__(self, key: BlockHash) -> bool:
        """Whether an extent is here, or being written."""
        return key in self._held

    @property
    def num_pinned(self) -> int:
        """Extents that are kept for somebody."""
        return sum(held.num_pins > 0 for held in self._by_slot.values())

    def note_time(self, now: float) -> None:
        """The time of what follows, on any clock."""
        self._order.now = max(self._order.now, now)

    def num_held(self, keys: Seq[BlockHash]) -> int:
        """How many leading extents of a chain can be read here."""
        held = self._held
        for number, key in enumerate(keys):
            found = held.get(key)
            if found is None or not found.is_ready:
                return number
        return len(keys)

    def slot_of(self, key: BlockHash) -> int | None:
        """Slot of an extent that can be read."""
        held = self._held.get(key)
        return held.slot if held is not None and held.is_ready else None

    # ------------------------------------------------------------ use

    def pin(self, keys: Iterable[BlockHash]) -> Pins:
        """Keep these extents, the first ones of a chain and all of them held, until `unpin`."""
        pins = tuple(self._held[key] for key in keys)
        for held in pins:
            if held.slot in self._order:
                self._order.hold(held.slot)
            held.num_pins += 1
        return pins

    def unpin(self, pins: Pins) -> None:
        """The chain was used until now."""
        for held in reversed(pins):
            self._unpin(held)

    def touch(self, keys: Seq[BlockHash], *, is_copy: bool) -> None:
        """A chain was used, as far as it is here. Unless `is_copy`, its extents are no copies any more."""
        here = []
        for key in keys:
            if key not in self._held:
                break
            here.append(key)
        pins = self.pin(here)
        if not is_copy:
            _keep(pins)
        self.unpin(pins)

    # ------------------------------------------------------------ writes

    def begin_write(self, keys: Seq[BlockHash], tag: TenantTag, *, is_copy: bool) -> Writing | None:
        """Take a slot for the last one of these extents, which are a chain from its beginning; the others are held, or
        being written. None where the one before it is missing, or nothing can be evicted for it."""
        *before, key = keys
        assert key not in self._held, "an extent is written twice"
        if not all(map(self._held.__contains__, before)):
            return None
        pins = self.pin(before)
        if not is_copy:
            _keep(pins)
        slot = self._take_slot()
        if slot is None:
            self.unpin(pins)
            return None
        if pins:
            tag = pins[-1].extent.tag
            pins[-1].children[key] = None
        held = Held(Extent(key, pins[-1].extent.key if pins else NO_PARENT, tag), slot, is_copy=is_copy, is_ready=False)
        held.num_pins = 1
        self._held[key] = self._by_slot[slot] = held
        return Writing(held, pins)

    def end_write(self, writing: Writing, *, ok: bool) -> None:
        """It is written; where not `ok`, it is gone, with all that follows it."""
        held = writing.held
        if not held.is_gone:
            if ok:
                self._ready(held)
            else:
                self._remove(held)
        self._unpin(held)
        self.unpin(writing.before)

    def add_found(self, extents: Iterable[Extent]) -> list[Extent]:
        """Hold extents that were written before, the one that was written last at the end: what was written longest ago
        goes first. Returns what cannot be held: out of reach because the extent before it cannot be read, beyond the
        slots, or a second file of an extent."""
        written_at: dict[BlockHash, int] = {}
        below: dict[BlockHash, list[Extent]] = defaultdict(list)
        left: list[Extent] = []
        for number, extent in enumerate(extents):
            if extent.key in written_at:
                left.append(extent)
            elif extent.key not in self._held:
                written_at[extent.key] = number
                below[extent.parent].append(extent)
        level = deque(extent for parent in [NO_PARENT, *self.keys()] for extent in below.pop(parent, ()))
        reached: list[Extent] = []
        while level:
            reached.append(extent := level.popleft())
            level += below.pop(extent.key, ())
        for extent in reversed(reached):  # A chain counts as written when its last extent was.
            if extent.parent in written_at:
                written_at[extent.parent] = max(written_at[extent.parent], written_at[extent.key])
        reached.sort(key=lambda extent: -written_at[extent.key])
        room = len(self._free) + self.num_slots - self._num_made
        new = [self._hold_found(extent) for extent in reached[:room]]
        for held in reversed(new):
            self._order.add(held.slot, held.extent.tag)
        new_keys = {held.extent.key for held in new}
        for key in {held.extent.parent for held in new} - new_keys - {NO_PARENT}:
            self.touch(self._chain_to(key), is_copy=False)
        return left + reached[room:] + [extent for extents in below.values() for extent in extents]

    # ------------------------------------------------------------ ends

    def drop(self, key: BlockHash) -> None:
        """An extent cannot be read: it goes, with all that follows it. Idempotent."""
        if (held := self._held.get(key)) is not None:
            self._remove(held)

    def forget(self, tag: TenantTag) -> None:
        """Drop all extents of a tenant."""
        for key in [key for key, held in self._held.items() if held.extent.tag == tag]:
            self.drop(key)

    def clear(self) -> None:
        """Drop all extents, of which nothing is known any more: `take_removed` does not have them."""
        for key in list(self._held):
            self.drop(key)
        self._removed.clear()

    def take_removed(self) -> list[Extent]:
        """What is gone since the last call; where nobody wrote it, it may not be there."""
        removed, self._removed = self._removed, []
        return removed

    def drain_changes(self) -> list[Change]:
        """What can be read, or no more, since the last call; in order."""
        changes, self._changes = self._changes, []
        return changes

    def keys(self) -> tuple[BlockHash, ...]:
        """All extents that can be read; changes that are not drained yet may follow: they change nothing in it."""
        return tuple(key for key, held in self._held.items() if held.is_ready)

    # ------------------------------------------------------------ audit

    def check_integrity(self) -> list[str]:
        """Findings; empty when sound."""
        problems = list(self._order.check_integrity())
        place = {slot: number for number, slot in enumerate(self._order.blocks)}
        for key, held in self._held.items():
            parent = held.extent.parent
            above = self._held.get(parent)
            if parent and (above is None or key not in above.children):
                problems.append("tier: an extent is held without the one before it")
            if (held.slot in place) != (held.is_ready and not held.num_pins):
                problems.append("tier: an extent may be evicted that is not written or is pinned, or may not be")
            if above is not None and above.slot in place and place[above.slot] < place.get(held.slot, len(place)):
                problems.append("tier: an extent goes before one that follows it")
            if above is not None and above.is_copy and not held.is_copy:
                problems.append("tier: an extent follows a copy and is none")
        if sum(held.is_ready for held in self._held.values()) != self._num_ready:
            problems.append("tier: the number of written extents is wrong")
        if sorted([*self._free, *self._by_slot]) != list(range(self._num_made)) or self._num_made > self.num_slots:
            problems.append("tier: slots are lost or used twice")
        if any(not held.is_gone and self._held.get(held.extent.key) is not held for held in self._by_slot.values()):
            problems.append("tier: a slot has an extent that is not held")
        return problems

    # ------------------------------------------------------------ inside

    def _take_slot(self) -> int | None:
        if not self._free and self._num_made < self.num_slots:
            self._num_made += 1
            return self._num_made - 1
        if not self._free:
            if not len(self._order):
                return None
            self.num_evicted += 1
            self._remove(self._by_slot[self._order.evict()])
        return self._free.pop()

    def _hold_found(self, extent: Extent) -> Held:
        slot = self._take_slot()
        assert slot is not None, "there is no slot for an extent that was found"
        held = Held(extent, slot, is_copy=False, is_ready=False)
        self._held[extent.key] = self._by_slot[slot] = held
        if extent.parent:
            above = self._held[extent.parent]
            above.children[extent.key] = None
        self._ready(held)
        return held

    def _ready(self, held: Held) -> None:
        held.is_ready = True
        self._num_ready += 1
        self._changes.append(Change(held.extent.key, True))

    def _unpin(self, held: Held) -> None:
        held.num_pins -= 1
        if held.is_gone:
            if not held.num_pins:
                self._release(held)
            return
        if held.is_ready and not held.num_pins:
            self._order.add(held.slot, held.extent.tag, is_copy=held.is_copy)

    def _remove(self, held: Held) -> None:
        """With all that follows it, those first."""
        for below in list(_with_following(held, self._held)):
            key, parent = below.extent.key, below.extent.parent
            del self._held[key]
            if (above := self._held.get(parent)) is not None:
                above.children.pop(key, None)
            below.is_gone = True
            if below.slot in self._order:
                self._order.hold(below.slot)
            if below.is_ready:
                self._num_ready -= 1
                self._changes.append(Change(key, False))
            self._removed.append(below.extent)
            if not below.num_pins:
                self._release(below)

    def _release(self, held: Held) -> None:
        del self._by_slot[held.slot]
        self._free.append(held.slot)

    def _chain_to(self, key: BlockHash) -> list[BlockHash]:
        chain = []
        while key:
            chain.append(key)
            key = self._held[key].extent.parent
        chain.reverse()
        return chain


def _keep(pins: Pins) -> None:
    """These are no copies any more."""
    for held in pins:
        held.is_copy = False


def _with_following(held: Held, index: dict[BlockHash, Held]) -> Iterator[Held]:
    """The extents behind one, the last ones first, and it."""
    found, stack = [], [held]
    while stack:
        each = stack.pop()
        found.append(each)
        stack += [index[key] for key in each.children]
    return reversed(found)
