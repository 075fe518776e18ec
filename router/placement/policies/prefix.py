"""`prefix`: the worker of each role that has the longest prefix; among equals the least loaded.

The textbook's affinity: a hot prefix stays where it is, however long the queue there.
"""

from __future__ import annotations

from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.placement.policies.least_loaded import LeastLoaded, utilization


class Prefix(LeastLoaded):
    """One cached token outweighs all load."""

    name = "prefix"
    uses_prefixes = True

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Uncached tokens, then tokens in front."""
        return Weight(_uncached(demand, candidate) + _below_one(candidate.worker.outstanding_tokens))

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """Uncached tokens, then KV utilization after joining."""
        return Weight(_uncached(demand, candidate) + utilization(candidate) / 2)

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Uncached tokens, then tokens in front."""
        return self.weigh_prefill(demand, candidate)


def _uncached(demand: Demand, candidate: Candidate) -> int:
    return demand.num_tokens - candidate.cached_tokens


def _below_one(num_tokens: int) -> float:
    """Grows with the number and stays below 1."""
    return num_tokens / (num_tokens + 1000)
