"""KV that other workers send, from the reservation of its sequence to the join. Pure.

    copied at once       the range has landed when the copy was made, or queued: a step behind it finds it there
    with a digest        the range has landed when the copy is done and the digest is the announced one; a join that
                         comes before that waits for it

The digest is computed on the device, from what arrived there, so it is known only behind the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from disagg.engine.commands import Join, Scatter, Scattered
from disagg.engine.plan import Copying
from disagg.proto.ids import AttemptKey

Ranges = list[tuple[int, int]]
"""Half-open ranges [start, end) of tokens."""


@dataclass(frozen=True, slots=True)
class _Scattering:
    command: Scatter
    copying: Copying
    ranges: Ranges
    """Landed ranges of the reservation for which the copy was made; the reservation may have ended."""


class Landing:
    """Owner: the engine core."""

    def __init__(self) -> None:
        self.landed: dict[AttemptKey, dict[int, Ranges]] = {}
        """Token ranges whose KV is in the blocks, by cache group, for each reserved sequence."""
        self._under_way: deque[_Scattering] = deque()
        """Copies queued behind a running step; the peer reuses their buffers after the answers. The call that finishes
        the last such step finishes them all."""
        self._joins: dict[AttemptKey, tuple[Join, float]] = {}
        """Joins that wait for digests, with the time at which they came."""

    def __len__(self) -> int:
        """Number of copies under way."""
        return len(self._under_way)

    def reserved(self, key: AttemptKey) -> None:
        """A sequence was reserved."""
        self.landed[key] = {}

    def begun(self, command: Scatter, copying: Copying | None, *, waits: bool) -> list[Scattered]:
        """The copy was made (None) or queued; returns the answer, unless it is one of `answers` later. With `waits`
        there is nothing else to wait for. Raises what the device raises."""
        ranges = self.landed[command.key].setdefault(command.group, [])
        if copying is not None and waits:
            copying.wait()
        if command.digest is None:
            ranges.append((command.start, command.end))
        if copying is None:
            assert command.digest is None, "a digest is the device's, which answers later"
            return [Scattered(command.key, command.seq, ok=True)]
        scattering = _Scattering(command, copying, ranges)
        if waits:
            return [_ended(scattering)]
        self._under_way.append(scattering)
        return []

    def answers(self, *, wait: bool) -> Iterator[Scattered]:
        """Answers of the copies that are done, in the order of the commands. Raises what the device raises."""
        while self._under_way:
            scattering = self._under_way[0]
            if wait:
                scattering.copying.wait()
            elif not scattering.copying.is_done():
                return
            self._under_way.popleft()
            yield _ended(scattering)

    def keeps_join(self, join: Join, now: float) -> bool:
        """Whether the join must wait for digests; then it is kept here."""
        if not self._awaits_digest(join.key):
            return False
        self._joins[join.key] = join, now
        return True

    def take_join(self, key: AttemptKey) -> tuple[Join, float] | None:
        """A join that was kept and can be made now."""
        return None if self._awaits_digest(key) else self._joins.pop(key, None)

    def forget(self, key: AttemptKey) -> None:
        """The sequence has joined, or is gone. Copies under way are still answered."""
        self.landed.pop(key, None)
        self._joins.pop(key, None)

    def check_integrity(self, reserved: set[AttemptKey]) -> list[str]:
        """Findings, given the sequences that are reserved; empty when sound."""
        problems = []
        if reserved != self.landed.keys():
            problems.append("landed ranges are kept for other sequences than the reserved ones")
        if not self._joins.keys() <= {each.command.key for each in self._under_way}:
            problems.append("joins wait for copies that are not under way")
        return problems

    def _awaits_digest(self, key: AttemptKey) -> bool:
        return any(each.command.key == key and each.command.digest is not None for each in self._under_way)


def _ended(scattering: _Scattering) -> Scattered:
    command = scattering.command
    if command.digest is None:
        return Scattered(command.key, command.seq, ok=True)
    is_intact = scattering.copying.checksum() == command.digest
    if is_intact:
        scattering.ranges.append((command.start, command.end))
    return Scattered(command.key, command.seq, ok=is_intact, intact=is_intact)
