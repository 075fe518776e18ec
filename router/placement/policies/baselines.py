"""The policies to compare `joint` with. They predict no times, do not wait for a slot, and use pairs if possible.

least_loaded   P by the outstanding prompt tokens, including the request's own uncached ones; D by KV utilization.
               Cached prefixes count on the candidates, but no worker becomes a candidate because of them
prefix         the worker of each role with the longest prefix; among equals the least loaded. A hot prefix
               does not spread to other workers, however long the queue of its holder
round_robin    of each role the worker whose latest placement is the longest ago
random         any worker that has room, each equally likely
"""

from __future__ import annotations

import math

from disagg.router.config import Decodes
from disagg.router.placement.placement import Candidate, Demand, Draw, Weight
from disagg.router.workers.worker import Worker

NOTHING = Weight(0.0)


class Simple:
    """A policy for which all workers with room are equal. Implements `placement.Policy`; base class of the others."""

    name = "simple"
    uses_prefixes = False
    waits = False
    weighs_setup = False
    weighs_local = False
    weighs_fetches = False
    late_last = False
    draws = False
    decodes: Decodes | None = None

    def equal_up_to(self, cost: float) -> float:
        """The cost itself: there is no tolerance."""
        return cost

    def rank(self, worker: Worker) -> float:
        """`rank_open` of a worker with a free slot; infinite without one."""
        return self.rank_open(worker) if worker.has_slot else math.inf

    def rank_open(self, worker: Worker) -> float:
        """The order of the workers that have a free slot."""
        return 0.0

    def start(self, turn: int, count: int) -> int:
        """Index 0: candidates begin at the first worker."""
        return 0

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """No cost: all prefill workers are equal."""
        return NOTHING

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """No cost: all decode workers are equal."""
        return NOTHING

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """No cost: all colocated workers are equal."""
        return NOTHING

    def weigh_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """No costs: all pairs are equal."""
        return 0.0, 0.0

    def known_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """No costs: all pairs are equal."""
        return 0.0, 0.0


class LeastLoaded(Simple):
    """The policy `least_loaded`. The sides of a pair are independent: the least of their sum is the least of each. A
    colocated worker is compared by its tokens first, since a utilization is less than one token."""

    name = "least_loaded"

    def rank_open(self, worker: Worker) -> float:
        """Outstanding tokens, then KV utilization (P has few blocks in use, D no outstanding tokens)."""
        return worker.outstanding_tokens + worker.used_blocks / worker.info.num_blocks

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Number of tokens to compute until the prompt is computed."""
        return Weight(candidate.worker.outstanding_tokens + demand.num_tokens - candidate.cached_tokens)

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """The KV utilization after joining."""
        return Weight(utilization(candidate))

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Number of tokens to compute until the prompt is computed, then the KV utilization."""
        tokens = candidate.worker.outstanding_tokens + demand.num_tokens - candidate.cached_tokens
        return Weight(tokens + utilization(candidate))


def utilization(candidate: Candidate) -> float:
    """Share of the worker's KV blocks in use after joining; at most 1."""
    worker = candidate.worker
    return min(1.0, (worker.used_blocks + candidate.num_blocks) / worker.info.num_blocks)


class Prefix(LeastLoaded):
    """The policy `prefix`: one cached token outweighs all load."""

    name = "prefix"
    uses_prefixes = True

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Number of uncached tokens, then of outstanding ones."""
        return Weight(_uncached(demand, candidate) + _below_one(candidate.worker.outstanding_tokens))

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """Number of uncached tokens, then KV utilization after joining."""
        return Weight(_uncached(demand, candidate) + utilization(candidate) / 2)

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """Number of uncached tokens, then of outstanding ones."""
        return self.weigh_prefill(demand, candidate)


def _uncached(demand: Demand, candidate: Candidate) -> int:
    return demand.num_tokens - candidate.cached_tokens


def _below_one(num_tokens: int) -> float:
    """A number below 1 that rises with `num_tokens`."""
    return num_tokens / (num_tokens + 1000)


class RoundRobin(Simple):
    """The policy `round_robin`, by the number of the latest placement. A worker without room is skipped, and comes
    first once it has room."""

    name = "round_robin"

    def rank_open(self, worker: Worker) -> float:
        """The number of the latest placement. Workers without any come first, in the order in which they came up."""
        return worker.position - _NEVER if worker.last_turn < 0 else worker.last_turn

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """The number of the latest placement on the worker."""
        return Weight(self.rank_open(candidate.worker))

    weigh_decode = weigh_colocated = weigh_prefill


_NEVER = 1 << 40


class Random(Simple):
    """The policy `random`. Candidates are a few neighbours from a drawn position on; one of those with room is
    drawn."""

    name = "random"
    draws = True

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def start(self, turn: int, count: int) -> int:
        """A random index, independent of the draw that settles ties, which uses `turn`."""
        return self._draw(~turn, count)
