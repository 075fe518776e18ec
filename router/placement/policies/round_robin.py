"""`round_robin`: of each role the worker that got something the longest ago."""

from __future__ import annotations

from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.placement.policies.base import Simple
from disagg.router.workers.worker import Worker


class RoundRobin(Simple):
    """By the number of the latest placement. A worker without room is passed over, and comes next when it has some."""

    name = "round_robin"

    def rank_open(self, worker: Worker) -> float:
        """Longest ago first. Those that never got anything come before all, in the order in which they came."""
        return worker.position - _NEVER if worker.last_turn < 0 else worker.last_turn

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Longest ago."""
        return Weight(self.rank_open(candidate.worker))

    weigh_decode = weigh_colocated = weigh_prefill


_NEVER = 1 << 40
