"""A look at a folder that was dropped while the look was under way."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.plan import Buffer
from disagg.engine.tiers.extents import NO_PARENT, Extent
from disagg.engine.tiers.folder import SCANNED_AGAIN_S, SILENT_SCAN_S
from disagg.engine.tiers.store import DiskPort, TierParts, TierStore
from disagg.proto.ids import BlockHash

EXTENTS = [Extent(BlockHash(bytes([number]) * 16), NO_PARENT) for number in range(1, 6)]


class Looks(DiskPort):
    """A folder with five files, each of which is told once, or again by a scan that is to tell all."""

    def __init__(self) -> None:
        self.ordered: list[bool] = []
        self._known: list[Extent] = []

    @property
    def can_vanish(self) -> bool:
        return True

    @property
    def has_room(self) -> bool:
        return True

    def scan(self, *, anew: bool) -> None:
        self.ordered.append(anew)

    def answer(self) -> list[Extent]:
        """What the scan that was ordered first finds."""
        if self.ordered.pop(0):
            self._known = []
        new = [extent for extent in EXTENTS if extent not in self._known]
        self._known = EXTENTS
        return new

    def write(self, number: int, extent: Extent, payload: Buffer) -> None:
        raise AssertionError("nothing is written")

    def read(self, number: int, extent: Extent, payload: Buffer) -> None:
        raise AssertionError("nothing is read")

    def delete(self, extents: Iterable[Extent]) -> None:
        raise AssertionError("nothing is deleted")

    def forget(self, tag: bytes) -> None:
        raise AssertionError("nobody is forgotten")


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("is_silent", [False, True])
def test_it_is_told_whole_before_it_is_used_again(is_shared: bool, is_silent: bool) -> None:
    looks, runner = Looks(), FakeModelRunner(10, 16, 4096, 1000)
    store = TierStore(
        runner, extent_bytes=1024, host_bytes=0, disk_bytes=100 * 1024, parts=TierParts(disk=looks), is_shared=is_shared
    )
    store.look_again(0.0)
    store.scanned(looks.answer(), (), 0.0)
    now = SCANNED_AGAIN_S + 1.0
    store.look_again(now)
    assert looks.ordered == [False]
    if is_silent:
        now += SILENT_SCAN_S + 1.0
        store.look_again(now)
    else:
        store.folder_failed("Input/output error", now, of_scan=False)
    assert not store._folder.is_on
    store.scanned(looks.answer(), (), now)
    assert not store._folder.is_on
    store.look_again(now + SCANNED_AGAIN_S)
    assert looks.ordered == [True]
    found = looks.answer()
    store.scanned(found, (), now + SCANNED_AGAIN_S)
    assert (store._folder.is_on, found) == (True, EXTENTS)
