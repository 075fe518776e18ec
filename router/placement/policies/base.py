"""What the simple policies share: they know no times, wait for nobody, and use pairs as long as there are any."""

from __future__ import annotations

import math

from disagg.router.placement.placement import Candidate, Demand, Weight
from disagg.router.workers.worker import Worker

NOTHING = Weight(0.0)


class Simple:
    """All workers that have room are equal. Implements `placement.Policy`, for others to build on."""

    name = "simple"
    uses_prefixes = False
    waits = False
    weighs_setup = False
    weighs_local = False

    def equal_up_to(self, cost: float) -> float:
        """Costs are exact."""
        return cost

    def rank(self, worker: Worker) -> float:
        """Who is looked at first: those with a slot, in the order of `rank_open`."""
        return self.rank_open(worker) if worker.has_slot else math.inf

    def rank_open(self, worker: Worker) -> float:
        """The order of the workers that have a slot."""
        return 0.0

    def start(self, turn: int, count: int) -> int:
        """From the first."""
        return 0

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Nothing speaks against it."""
        return NOTHING

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """Nothing speaks against it."""
        return NOTHING

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Nothing speaks against it."""
        return NOTHING

    def weigh_link(self, demand: Demand, prefill: Candidate, decode: Candidate) -> float:
        """Links are equal."""
        return 0.0

    def weigh_setup(self, prefill: Candidate, decode: Candidate) -> float:
        """Pairs are equal."""
        return 0.0
