"""The index of one tier: which extents it holds, in which slots, and which of them goes next. Pure.

    begin_write ──> being written ──end_write──> held ──evicted, dropped, forgotten──> gone
                         └── it failed ──> gone

A tier is prefix-closed: with an extent it holds all extents of the chain before it. So what it holds of a prompt is one
number, and nothing in it is out of reach. Whenever a chain is used, its extents move behind all others in the order of
eviction, the last one first and the first one last. So no extent is evicted before those that follow it in a chain. The
order is that of the device cache (`blocks/cached_blocks.py`): copies first, a tenant that holds more than its share
before others, then the extent that was used longest ago.

What a scan of a folder found is taken in some extents at a time, `go_on` by `go_on`, as is what is dropped all at once:
there may be a hundred thousand of them. Extents that were found can be read when all of them have their slots, the
chain that was used longest ago first, so that they are in the order of eviction as if they had been used one by one.

Whoever reads an extent, or writes one behind it, pins its chain up to there: pinned extents are not evicted. One that
is dropped meanwhile (its file is damaged, say) is gone for all later lookups, and its slot is free with the last pin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

from disagg.engine.blocks.cached_blocks import CachedBlocks, TenantTag
from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.proto.ids import BlockHash

MOST_CHECKED = 4096
"""Extents that one check of the integrity looks at."""


class Held:
    """An extent in a tier. Owner: the tier; others keep it as a pin."""

    __slots__ = ("children", "extent", "is_copy", "is_found", "is_gone", "is_ready", "num_pins", "slot")

    def __init__(self, extent: Extent, slot: int, *, is_copy: bool, is_ready: bool) -> None:
        self.extent = extent
        self.slot = slot
        self.is_copy = is_copy
        self.is_ready = is_ready
        """Whether it is written."""
        self.is_found = False
        """It is in the folder, and cannot be read until all that was found with it has its slots."""
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
        self._to_drop: list[BlockHash] = []
        """Dropped from the end on: what follows an extent comes behind it."""
        self._to_hold: deque[Extent] = deque()
        """Found, and without a slot yet."""
        self._to_publish: list[Writing] = []
        """Found, in slots; the one at the end can be read first."""
        self._num_checked = 0
        self.is_clearing = False
        """All extents are being dropped."""

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

    # ------------------------------------------------------------ many at once

    def add_found(self, extents: Iterable[Extent]) -> None:
        """Hold extents that were written before, in the order of `found.arranged`. For `go_on`."""
        self._to_hold.extend(extents)

    @property
    def can_go_on(self) -> bool:
        """Whether `go_on` has something to do."""
        return bool(self._to_drop or self._to_hold or self._to_publish)

    def go_on(self, most: int) -> list[Extent]:
        """Drop or take in so many extents at most. Returns what was found and cannot be held: out of reach because the
        extent before it is gone, or beyond the slots."""
        left: list[Extent] = []
        while most > 0 and self.can_go_on:
            most -= 1
            if self._to_drop:
                self.drop(self._to_drop.pop())
                if self.is_clearing:
                    self._removed.clear()
            elif self.is_clearing or not self._to_hold:
                self._publish_found()
            elif not self._hold_found(extent := self._to_hold.popleft()):
                left.append(extent)
            self.is_clearing = self.is_clearing and bool(self._to_drop or self._to_publish)
        return left

    # ------------------------------------------------------------ ends

    def drop(self, key: BlockHash) -> None:
        """An extent cannot be read: it goes, with all that follows it. Idempotent."""
        if (held := self._held.get(key)) is not None:
            self._remove(held)

    def drop_all(self, keys: Iterable[BlockHash]) -> None:
        """Drop many extents, by `go_on`."""
        self._to_drop += keys

    def forget(self, tag: TenantTag) -> None:
        """Drop all extents of a tenant, by `go_on`."""
        self.drop_all(key for key, held in self._held.items() if held.extent.tag == tag)
        self._to_hold = deque(extent for extent in self._to_hold if extent.tag != tag)

    def clear(self) -> None:
        """Drop all extents, by `go_on`; nothing of them is known any more: `take_removed` does not have them."""
        self._to_hold.clear()
        self._to_drop = list(self._held)
        self._removed.clear()
        self.is_clearing = bool(self._to_drop or self._to_publish)

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

    def check_integrity(self, most: int = MOST_CHECKED) -> list[str]:
        """Findings; empty when sound. Of a tier with more than `most` extents so many are looked at, others each
        time."""
        problems: list[str] = []
        order, is_whole = self._order, len(self._by_slot) <= most
        if is_whole:
            problems += order.check_integrity() + self._check_slots()
        next_out = {slot: number for number, slot in enumerate(islice(order.blocks, most))}
        for slot, number in next_out.items():
            above = self._held.get(self._by_slot[slot].extent.parent)
            if above is not None and next_out.get(above.slot, number) < number:
                problems.append("tier: an extent goes before one that follows it")
        begin = 0 if is_whole or self._num_checked >= len(self._held) else self._num_checked
        self._num_checked = begin + most
        for key, held in islice(self._held.items(), begin, begin + most):
            parent = held.extent.parent
            above = self._held.get(parent)
            if parent and (above is None or key not in above.children):
                problems.append("tier: an extent is held without the one before it")
            if (held.slot in order) != (held.is_ready and not held.num_pins):
                problems.append("tier: an extent may be evicted that is not written or is pinned, or may not be")
            if above is not None and above.slot in order and held.slot not in order:
                problems.append("tier: an extent may be evicted and one that follows it may not")
            if above is not None and above.is_copy and not held.is_copy:
                problems.append("tier: an extent follows a copy and is none")
            if self._by_slot.get(held.slot) is not held:
                problems.append("tier: an extent is not in its slot")
        return problems

    def _check_slots(self) -> list[str]:
        problems = []
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

    def _hold_found(self, extent: Extent) -> bool:
        """Whether an extent that was found is held, or is here already."""
        key, parent = extent.key, extent.parent
        if key in self._held:
            return True
        above = self._held.get(parent)
        is_in_reach = not parent or (above is not None and (above.is_ready or above.is_found))
        if not is_in_reach or not (self._free or self._num_made < self.num_slots):
            return False
        before = () if above is None or above.is_found else self.pin(self._chain_to(parent))
        slot = self._take_slot()
        assert slot is not None, "there is no slot for an extent that was found"
        held = Held(extent, slot, is_copy=False, is_ready=False)
        held.is_found, held.num_pins = True, 1
        _keep(before)
        if above is not None:
            above.children[key] = None
        self._held[key] = self._by_slot[slot] = held
        self._to_publish.append(Writing(held, before))
        return True

    def _publish_found(self) -> None:
        held, before = self._to_publish.pop()
        held.is_found = False
        if not held.is_gone and self.is_clearing:
            self._remove(held)
            self._removed.clear()
        elif not held.is_gone:
            self._ready(held)
        self._unpin(held)
        self.unpin(before)

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
