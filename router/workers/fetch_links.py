"""How long it takes to get KV from another worker, and which workers to leave alone for a while.

A fetch shows all of its transfer, where a hand-over hides most of it behind the computation of the prompt. So fetches
have fits of their own; until the first fetch was observed, those of hand-overs stand for them. The fits learn slowly
what is far from usual, so a transfer counts as taking no less than the latest ones of the same pair show, until newer
ones show something else. Connections for fetches lead from any worker to any other, so they are formed apart from the
pairs of prefill and decode workers.

    asks(source, needy) ──done──> observed
                         ├─refused──> not asked for `REFUSED_S`
                         ├─late──> the same, and observed
                         └─failed──> not asked for `FAILED_S`

Owner: the fleet.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from itertools import combinations
from statistics import median

from disagg.proto.ids import WorkerId
from disagg.proto.messages import FetchOutcome
from disagg.router.config import RouterConfig
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs

REFUSED_S, FAILED_S = 1.0, 5.0
"""Seconds for which a worker does not ask a source again that refused or was late, and one that failed. How slow a late
one was counts in later predictions besides."""
NUM_RECENT, RECENT_S = 8, 30.0
"""Latest fetches of a pair that are remembered one by one, and seconds after the last one from which on a
quicker one replaces them all, and a trial may show that the link is not as slow any more. One that was slow for
prefixes of any length is not used, so nothing else would."""
_QUICKER = 2.0
"""A fetch is quicker that takes less than the expected time over this."""
MAX_PAIRS = 4096
"""Most pairs that are remembered; beyond them the one that was noted first is forgotten."""


class _Recent:
    """The latest fetches of one pair."""

    __slots__ = ("_at", "_byte_ms", "_latency_ms", "_seen", "placed_at")

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=NUM_RECENT)
        """Bytes and milliseconds of each."""
        self._at = self.placed_at = -math.inf
        """When the latest one was observed, and when one was ordered."""
        self._latency_ms = self._byte_ms = 0.0

    def observe(self, kv_bytes: int, ms: float, now: float) -> None:
        """Note one."""
        expected_ms = self.least_ms(kv_bytes)
        if now > self._at + RECENT_S and ms < expected_ms / _QUICKER:
            self._seen.clear()
        self._seen.append((kv_bytes, ms))
        self._at = now
        self._latency_ms, self._byte_ms = line(self._seen)

    def least_ms(self, kv_bytes: int) -> float:
        """Milliseconds that another one takes by these."""
        return self._latency_ms + kv_bytes * self._byte_ms

    def may_try(self, now: float) -> bool:
        """Whether it is time for a trial."""
        return now > max(self._at, self.placed_at) + RECENT_S


def line(seen: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Latency and time of a byte, in milliseconds, neither negative: medians, so that a few transfers that waited for
    something else do not count. `seen`: bytes and milliseconds. Where all have the same bytes, half is latency."""
    found = list(seen)
    slopes = [(b_ms - a_ms) / (b - a) for (a, a_ms), (b, b_ms) in combinations(found, 2) if a != b]
    if not slopes:
        slopes = [ms / (2.0 * kv_bytes) for kv_bytes, ms in found if kv_bytes] or [0.0]
    byte_ms = max(0.0, median(slopes))
    latency_ms = median([ms - kv_bytes * byte_ms for kv_bytes, ms in found])
    if latency_ms < 0.0:
        return 0.0, median([ms / kv_bytes for kv_bytes, ms in found if kv_bytes])
    return latency_ms, byte_ms


class FetchLinks:
    """Times and outcomes of fetches, by (source, needy worker).

    Args:
        config: of the router, for the time to form a pair.
        hand_overs: predicts fetches before any was observed.
    """

    def __init__(self, config: RouterConfig, hand_overs: LinkModel) -> None:
        self._links = LinkModel()
        self._hand_overs = hand_overs
        self._has_observed = False
        self._pairs = Pairs(config)
        self.pair_setup_ms = config.pair_setup_ms
        """Milliseconds until a connection is formed; read only."""
        self._shunned: dict[tuple[WorkerId, WorkerId], float] = {}
        """Pairs that are not to be used, and until when; the one noted first is first."""
        self._recent: dict[tuple[WorkerId, WorkerId], _Recent] = {}
        """Latest fetches of pairs, the pair whose first one is oldest first."""
        self._forming: set[tuple[WorkerId, WorkerId]] = set()
        """Pairs of which the first fetch is under way, which forms their connection."""

    def transfer_ms(self, source: WorkerId, needy: WorkerId, kv_bytes: int, now: float) -> float:
        """Predicted milliseconds of the transfer alone; infinite for a pair that is not to be used now."""
        if self._shunned and now < self._shunned.get((source, needy), -math.inf):
            return math.inf
        links = self._links if self._has_observed else self._hand_overs
        ms = links.exposed_ms(source, needy, kv_bytes, now)
        recent = self._recent.get((source, needy)) if self._recent else None
        return ms if recent is None else max(ms, recent.least_ms(kv_bytes))

    def may_try(self, source: WorkerId, needy: WorkerId, now: float) -> bool:
        """Whether it is time for a trial of a pair's link."""
        recent = self._recent.get((source, needy))
        return recent is not None and recent.may_try(now) and now >= self._shunned.get((source, needy), -math.inf)

    def usual_ms(self, source: WorkerId, needy: WorkerId, kv_bytes: int, now: float) -> float:
        """Predicted milliseconds of the transfer alone, by the fit of all its fetches, without its latest ones."""
        return self._links.exposed_ms(source, needy, kv_bytes, now)

    def setup_ms(self, source: WorkerId, needy: WorkerId) -> float:
        """Milliseconds until the connection is formed; 0 where it is."""
        return self._pairs.setup_ms(source, needy)

    def formed_with(self, source: WorkerId) -> AbstractSet[WorkerId]:
        """The workers with which a source has a connection; valid until the next change. For others, `pair_setup_ms`
        come before the transfer."""
        return self._pairs.formed_with(source)

    def has_formed(self, needy: WorkerId) -> bool:
        """Whether any source has a connection with a worker."""
        return self._pairs.has_formed(needy)

    def expire(self, now: float) -> None:
        """Forget connections that were not used for long. To be called before predictions."""
        self._pairs.expire(now)

    def placed(self, source: WorkerId | None, needy: WorkerId, now: float) -> None:
        """Note a placement on `needy`, with a fetch from `source` or without one."""
        self._links.placed(source, needy, now)
        if source is not None:
            if self._pairs.setup_ms(source, needy):
                self._forming.add((source, needy))
            self._pairs.used(source, needy, now)
            if (recent := self._recent.get((source, needy))) is not None:
                recent.placed_at = now

    def ended(
        self, source: WorkerId, needy: WorkerId, outcome: FetchOutcome, kv_bytes: int, transfer_ms: float, now: float
    ) -> None:
        """Note the end of a fetch: `kv_bytes` took `transfer_ms`, or would have taken at least that. One that was late
        tells something of the link only if it took longer than the latest ones let expect."""
        has_formed = (source, needy) in self._forming
        self._forming.discard((source, needy))
        if outcome != "done":
            self._shun(source, needy, now + (FAILED_S if outcome == "failed" else REFUSED_S))
        if outcome == "failed":
            self._pairs.failed(source, needy)
        elif outcome != "refused" and kv_bytes > 0:
            recent = self._recent.get((source, needy))
            if outcome == "late" and recent is not None and transfer_ms <= recent.least_ms(kv_bytes):
                return
            self._has_observed = True
            self._links.observe(source, needy, kv_bytes, transfer_ms, now)
            if has_formed and outcome == "done":  # Its time may be that of the connection.
                return
            if recent is None:
                recent = self._recent[source, needy] = _Recent()
                if len(self._recent) > MAX_PAIRS:
                    del self._recent[next(iter(self._recent))]
            recent.observe(kv_bytes, transfer_ms, now)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that is lost."""
        self._links.forget(worker_id)
        self._pairs.forget(worker_id)
        self._forming = {pair for pair in self._forming if worker_id not in pair}
        for pairs in (self._shunned, self._recent):
            for pair in [pair for pair in pairs if worker_id in pair]:
                del pairs[pair]

    def _shun(self, source: WorkerId, needy: WorkerId, until: float) -> None:
        self._shunned.pop((source, needy), None)
        self._shunned[source, needy] = until
        if len(self._shunned) > MAX_PAIRS:
            del self._shunned[next(iter(self._shunned))]
