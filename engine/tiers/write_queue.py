"""Extents that wait to be written, and when the next one may be. Pure.

Writes take time between two steps, so they are made in time that nobody waits for: no prompt waits or is computed. At
most `bytes_per_s` are written, and while sequences decode at most a twentieth of the time is spent on it: of the engine
for the copy, and of a processor for the file.

Nothing is kept for a write: an extent whose blocks were needed by others in the meantime is not written, and counted.
"""

from __future__ import annotations

from collections import OrderedDict

from disagg.engine.tiers.extents import Chain
from disagg.proto.ids import BlockHash

MOST_WAITING = 4096
"""More extents are not queued."""
SHARE_BESIDE_DECODES = 1 / 20


class WriteQueue:
    """Owner: the tiers of a worker. `bytes_per_s`: limit of what is written."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._waiting: OrderedDict[BlockHash, tuple[Chain, int]] = OrderedDict()
        self._next_at = 0.0
        self._beside_decodes_at = 0.0
        self.num_dropped = 0
        """Extents that were to be written and were not."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, chain: Chain, index: int) -> None:
        """Queue an extent behind those before it. One that waits already keeps its place."""
        key = chain.keys[index]
        if key in self._waiting:
            return
        if len(self._waiting) >= MOST_WAITING:
            self.num_dropped += 1
            return
        self._waiting[key] = chain, index

    @property
    def head(self) -> tuple[Chain, int]:
        """The chain and the number of the extent that is next; there is one."""
        return next(iter(self._waiting.values()))

    def take(self) -> tuple[Chain, int]:
        """Remove the head and return it."""
        return self._waiting.popitem(last=False)[1]

    def due_at(self, *, is_decoding: bool) -> float:
        """When the next write may be made."""
        return max(self._next_at, self._beside_decodes_at) if is_decoding else self._next_at

    def wrote(self, num_bytes: int, ms: float, now: float) -> None:
        """A write was made at `now`; the engine was held up for `ms` milliseconds."""
        self._next_at = max(self._next_at, now) + num_bytes / self._bytes_per_s
        self._beside_decodes_at = now + ms / 1e3 / SHARE_BESIDE_DECODES

    def took(self, cpu_ms: float, now: float) -> None:
        """A file was written by `now`, which took a processor so many milliseconds beside the engine."""
        self._beside_decodes_at = max(self._beside_decodes_at, now) + cpu_ms / 1e3 / SHARE_BESIDE_DECODES

    def forget(self, tag: bytes) -> None:
        """Drop what a tenant's chains have here."""
        for key in [key for key, (chain, _) in self._waiting.items() if chain.tag == tag]:
            del self._waiting[key]
