"""`least_loaded`: P by the prompt tokens in front, the request's own uncached ones included; D by KV utilization.

It sees what is cached on the workers that it looks at, but does not look for workers because of their caches.
"""

from __future__ import annotations

from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.placement.policies.base import Simple
from disagg.router.workers.worker import Worker


class LeastLoaded(Simple):
    """Sides of a pair are independent: the least of their sum is the least of each. A worker that does all of it is
    compared by its tokens first, since a utilization is less than one token."""

    name = "least_loaded"

    def rank_open(self, worker: Worker) -> float:
        """Tokens in front, then KV utilization (P has few blocks in use, D no tokens in front)."""
        return worker.outstanding_tokens + worker.used_blocks / worker.info.num_blocks

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Tokens to compute until the prompt is."""
        return Weight(candidate.worker.outstanding_tokens + demand.num_tokens - candidate.cached_tokens)

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """KV utilization after joining."""
        return Weight(utilization(candidate))

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Both."""
        tokens = candidate.worker.outstanding_tokens + demand.num_tokens - candidate.cached_tokens
        return Weight(tokens + utilization(candidate))


def utilization(candidate: Candidate) -> float:
    """Share of the worker's KV blocks in use after joining; at most 1."""
    worker = candidate.worker
    return min(1.0, (worker.used_blocks + candidate.num_blocks) / worker.info.num_blocks)
