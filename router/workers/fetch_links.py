"""How long it takes to get KV from another worker, and which workers to leave alone for a while.

A fetch shows all of its transfer, where a hand-over hides most of it behind the computation of the prompt. So fetches
have fits of their own; until the first fetch was observed, those of hand-overs stand for them. Connections for fetches
lead from any worker to any other, so they are formed apart from the pairs of prefill and decode workers.

    asks(source, needy) ──done──> observed
                         ├─refused──> not asked for `REFUSED_S`
                         ├─late──> the same, and observed
                         └─failed──> not asked for `FAILED_S`

Owner: the fleet.
"""

from __future__ import annotations

import math

from disagg.proto.ids import WorkerId
from disagg.proto.messages import FetchOutcome
from disagg.router.config import RouterConfig
from disagg.router.workers.cost_model import LinkModel
from disagg.router.workers.pairs import Pairs

REFUSED_S, FAILED_S = 1.0, 5.0
"""Seconds for which a worker does not ask a source again that refused or was late, and one that failed. How slow a late
one was counts in later predictions besides."""
MAX_SHUNNED = 4096
"""Most pairs that are remembered; beyond them the one that was noted first is forgotten."""


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
        self._shunned: dict[tuple[WorkerId, WorkerId], float] = {}
        """Pairs that are not to be used, and until when; the one noted first is first."""

    def transfer_ms(self, source: WorkerId, needy: WorkerId, kv_bytes: int, now: float) -> float:
        """Predicted milliseconds of the transfer alone; infinite for a pair that is not to be used now."""
        if self._shunned and now < self._shunned.get((source, needy), -math.inf):
            return math.inf
        links = self._links if self._has_observed else self._hand_overs
        return links.exposed_ms(source, needy, kv_bytes, now)

    def setup_ms(self, source: WorkerId, needy: WorkerId) -> float:
        """Milliseconds until the connection is formed; 0 where it is."""
        return self._pairs.setup_ms(source, needy)

    def expire(self, now: float) -> None:
        """Forget connections that were not used for long. To be called before predictions."""
        self._pairs.expire(now)

    def placed(self, source: WorkerId | None, needy: WorkerId, now: float) -> None:
        """Note a placement on `needy`, with a fetch from `source` or without one."""
        self._links.placed(source, needy, now)
        if source is not None:
            self._pairs.used(source, needy, now)

    def ended(
        self, source: WorkerId, needy: WorkerId, outcome: FetchOutcome, kv_bytes: int, transfer_ms: float, now: float
    ) -> None:
        """Note the end of a fetch: `kv_bytes` took `transfer_ms`, or would have taken at least that."""
        if outcome != "done":
            self._shun(source, needy, now + (FAILED_S if outcome == "failed" else REFUSED_S))
        if outcome == "failed":
            self._pairs.failed(source, needy)
        elif outcome != "refused" and kv_bytes > 0:
            self._has_observed = True
            self._links.observe(source, needy, kv_bytes, transfer_ms, now)

    def forget(self, worker_id: WorkerId) -> None:
        """Drop a worker that is lost."""
        self._links.forget(worker_id)
        self._pairs.forget(worker_id)
        for pair in [pair for pair in self._shunned if worker_id in pair]:
            del self._shunned[pair]

    def _shun(self, source: WorkerId, needy: WorkerId, until: float) -> None:
        self._shunned.pop((source, needy), None)
        self._shunned[source, needy] = until
        if len(self._shunned) > MAX_SHUNNED:
            del self._shunned[next(iter(self._shunned))]
