"""Which adapters a worker has loaded, and how long it takes to load another one. Pure.

    report ──> LoadTimes      bytes and milliseconds of each load, of all workers: milliseconds per byte
           ──> Loaded         of one worker: what it has, and what was ordered by a placement and is not there yet

A load that a placement ordered counts as under way until the worker reports it, so that the placements of the next
milliseconds do not spread the adapter over all workers. One that is not reported in time does not count any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from disagg.proto.messages import AdapterState

DEFAULT_MS_PER_BYTE = 1e-6
"""Milliseconds for each byte of an adapter before any load was measured: a gigabyte in a second."""
DEFAULT_BYTES = 16 << 20
"""Bytes of an adapter of which nothing is known."""
MEMORY_BYTES = 4 << 30
"""Bytes of loads after which half of the weight of earlier ones is forgotten."""
MAX_KNOWN = 4096
"""Largest number of adapters whose sizes are kept."""
PATIENCE, PATIENCE_MS = 4.0, 1000.0
"""A load counts as under way for that many times its predicted time, and these milliseconds."""


class LoadTimes:
    """The loads of all workers of a router. Owner: the fleet."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._ms = 0.0
        self._sizes: dict[str, int] = {}

    def observe(self, state: AdapterState) -> None:
        """Note a load that a worker reported for the first time."""
        if state.bytes <= 0:
            return
        self._sizes.pop(state.fingerprint, None)
        self._sizes[state.fingerprint] = state.bytes
        if len(self._sizes) > MAX_KNOWN:
            del self._sizes[next(iter(self._sizes))]
        if state.load_ms <= 0.0:
            return
        if self._bytes > MEMORY_BYTES:
            self._bytes, self._ms = self._bytes / 2, self._ms / 2
        self._bytes += state.bytes
        self._ms += state.load_ms

    def predict_ms(self, fingerprint: str, num_bytes: int = 0) -> float:
        """Milliseconds to load an adapter. `num_bytes` is its size as far as the caller knows it, or 0."""
        size = self._sizes.get(fingerprint) or num_bytes or DEFAULT_BYTES
        return size * (self._ms / self._bytes if self._bytes else DEFAULT_MS_PER_BYTE)


class Loaded:
    """The adapters of one incarnation of a worker."""

    __slots__ = ("_ordered", "there")

    def __init__(self) -> None:
        self.there: Collection[str] = frozenset()
        """Fingerprints that it reported last."""
        self._ordered: dict[str, tuple[float, float]] = {}
        """Fingerprint -> when it is expected to be there, and until when it counts as under way."""

    def report(self, states: Sequence[AdapterState]) -> list[AdapterState]:
        """Take all adapters that the worker has; returns those that are new."""
        if not states and not self.there:
            return []
        before, self.there = self.there, frozenset(state.fingerprint for state in states)
        if self._ordered:
            self._ordered = {each: when for each, when in self._ordered.items() if each not in self.there}
        return [state for state in states if state.fingerprint not in before]

    def order(self, fingerprint: str, load_ms: float, now: float) -> None:
        """Note that a sequence which needs the adapter was placed on the worker."""
        if fingerprint in self.there or self.is_coming(fingerprint, now):
            return
        self._ordered = {each: when for each, when in self._ordered.items() if now < when[1]}
        self._ordered[fingerprint] = (now + load_ms / 1e3, now + (PATIENCE * load_ms + PATIENCE_MS) / 1e3)

    def is_coming(self, fingerprint: str, now: float) -> bool:
        """Whether a load of it is under way."""
        when = self._ordered.get(fingerprint)
        return when is not None and now < when[1]

    def wait_ms(self, fingerprint: str, load_ms: float, now: float) -> float:
        """Milliseconds until the adapter is there, if a sequence that needs it were placed now. `load_ms`: of a load
        that begins now."""
        if fingerprint in self.there:
            return 0.0
        when = self._ordered.get(fingerprint)
        if when is None or now >= when[1]:
            return load_ms
        return max(0.0, (when[0] - now) * 1e3)
