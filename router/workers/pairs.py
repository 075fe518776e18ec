"""Which pairs (P, D) are assumed to be formed: connected, so that a hand-over can begin at once. Pure.

    a worker comes ──> the few pairs that are formed right away and kept ("warm"), at most `warm_pairs` for each worker
    a placement    ──> forms the pair, which stays formed until it was not used for `pair_idle_s`

A worker of 400 has 200 possible peers, and each pair costs both ends memory and descriptors. So other pairs are
formed by the first request that is placed on them, and the expected time of that is a part of its placement's cost.

The workers own their pairs, and may have closed one that is assumed to be formed here. Then the next request waits
until it is formed again, without another effect.

Owner: the fleet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from disagg.proto.ids import WorkerId
from disagg.router.config import RouterConfig

_NONE: AbstractSet[WorkerId] = frozenset()


class Pairs:
    """The formed pairs of one router: warm ones, and those that requests used recently."""

    def __init__(self, config: RouterConfig) -> None:
        self._most_warm = config.warm_pairs
        self._setup_ms = config.pair_setup_ms
        self._idle_s = config.pair_idle_s
        self._warm: defaultdict[WorkerId, dict[WorkerId, None]] = defaultdict(dict)
        """The peers of each worker's warm pairs. Not sets: the order of the peers settles ties, and that of a set of
        texts differs by process."""
        self._used: dict[tuple[WorkerId, WorkerId], float] = {}
        """For each pair (P, D): when it was last used, the longest ago first."""
        self._expires_at = math.inf
        """Time before which no used pair is idle for too long."""
        self._formed: defaultdict[WorkerId, set[WorkerId]] = defaultdict(set)
        """The peers of each worker's warm pairs; for a P also those of its used pairs."""
        self._num_used: defaultdict[WorkerId, int] = defaultdict(int)
        """Number of used pairs of each D; without those that have none."""

    def warm_up(self, worker_id: WorkerId, peers: Sequence[WorkerId]) -> frozenset[WorkerId]:
        """Choose the peers with which a new worker forms a pair now, those with the fewest warm pairs first."""
        own, most = self._warm[worker_id], self._most_warm
        open_peers = [peer for peer in peers if peer not in own and len(self._warm[peer]) < most]
        open_peers.sort(key=lambda peer: len(self._warm[peer]))
        for peer in open_peers[: max(0, most - len(own))]:
            own[peer] = self._warm[peer][worker_id] = None
            self._formed[worker_id].add(peer)
            self._formed[peer].add(worker_id)
        return frozenset(own)

    def used(self, prefill: WorkerId, decode: WorkerId, now: float) -> None:
        """Note that a request was placed on the pair."""
        pair = (prefill, decode)
        if self._used.pop(pair, None) is None:
            self._num_used[decode] += 1
        self._used[pair] = now
        self._formed[prefill].add(decode)
        if now + self._idle_s < self._expires_at:
            self._expires_at = now + self._idle_s

    def failed(self, prefill: WorkerId, decode: WorkerId) -> None:
        """Note that a transfer of the pair failed: the next one may have to form the pair again."""
        if self._used.pop((prefill, decode), None) is not None:
            self._not_used(prefill, decode)

    def _not_used(self, prefill: WorkerId, decode: WorkerId) -> None:
        self._num_used[decode] -= 1
        if not self._num_used[decode]:
            del self._num_used[decode]
        if decode not in self._warm.get(prefill, ()):
            self._formed[prefill].discard(decode)

    def expire(self, now: float) -> None:
        """Assume that pairs that were not used for `pair_idle_s` are closed."""
        while now >= self._expires_at:  # To look for the first entry of `_used` costs more, the more were moved back.
            pair, used_at = next(iter(self._used.items()), (None, math.inf))
            self._expires_at = used_at + self._idle_s
            if pair is not None and now >= self._expires_at:
                del self._used[pair]
                self._not_used(*pair)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that is lost, with its pairs."""
        for peer in self._warm.pop(worker_id, ()):
            self._warm[peer].pop(worker_id, None)
        for pair in [pair for pair in self._used if worker_id in pair]:
            del self._used[pair]
            self._not_used(*pair)
        self._formed.pop(worker_id, None)
        for formed in self._formed.values():
            formed.discard(worker_id)

    def setup_ms(self, prefill: WorkerId, decode: WorkerId) -> float:
        """Milliseconds that a request would wait for the pair to be formed."""
        return 0.0 if decode in self._formed.get(prefill, ()) else self._setup_ms

    def formed_with(self, prefill: WorkerId) -> AbstractSet[WorkerId]:
        """The decode workers with which this prefill worker has a formed pair."""
        return self._formed.get(prefill, _NONE)

    def has_formed(self, decode: WorkerId) -> bool:
        """Whether any worker has a formed pair with this decode worker."""
        return decode in self._num_used or bool(self._warm.get(decode))

    def partners(self, worker_id: WorkerId) -> Collection[WorkerId]:
        """The peers with which a worker's pairs are kept formed."""
        return self._warm.get(worker_id, ())
