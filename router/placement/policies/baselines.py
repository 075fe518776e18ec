"""The policies to compare `joint` with. They predict no times, do not wait for a slot, and use pairs if possible.

least_loaded   P by the prompt tokens in front, the request's own uncached ones included; D by KV utilization.
               Cached prefixes count on the workers that are looked at, but none is looked at because of them
prefix         the worker of each role with the longest prefix; among equals the least loaded. A hot prefix stays
               where it is, however long the queue there
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
    """All workers that have room are equal. Implements `placement.Policy`, for others to build on."""

    name = "simple"
    uses_prefixes = False
    waits = False
    weighs_setup = False
    weighs_local = False
    hopeless_last = False
    draws = False
    decodes: Decodes | None = None

    def equal_up_to(self, cost: float) -> float:
        """No tolerance."""
        return cost

    def rank(self, worker: Worker) -> float:
        """Workers with a free slot, in the order of `rank_open`."""
        return self.rank_open(worker) if worker.has_slot else math.inf

    def rank_open(self, worker: Worker) -> float:
        """The order of the workers that have a free slot."""
        return 0.0

    def start(self, turn: int, count: int) -> int:
        """At the first."""
        return 0

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """All are equal."""
        return NOTHING

    def weigh_decode(self, demand: Demand, candidate: Candidate) -> Weight:
        """All are equal."""
        return NOTHING

    def weigh_colocated(self, demand: Demand, candidate: Candidate) -> Weight:
        """All are equal."""
        return NOTHING

    def weigh_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """Pairs are equal."""
        return 0.0, 0.0

    def known_pair(self, demand: Demand, prefill: Candidate, decode: Candidate) -> tuple[float, float]:
        """Pairs are equal."""
        return 0.0, 0.0


class LeastLoaded(Simple):
    """The sides of a pair are independent: the least of their sum is the least of each. A colocated worker is compared
    by its tokens first, since a utilization is less than one token."""

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


class RoundRobin(Simple):
    """By the number of the latest placement. A worker without room is skipped, and is the next one when it has some."""

    name = "round_robin"

    def rank_open(self, worker: Worker) -> float:
        """Longest ago first. Workers without any placement come before all, in the order in which they came up."""
        return worker.position - _NEVER if worker.last_turn < 0 else worker.last_turn

    def weigh_prefill(self, demand: Demand, candidate: Candidate) -> Weight:
        """Longest ago."""
        return Weight(self.rank_open(candidate.worker))

    weigh_decode = weigh_colocated = weigh_prefill


_NEVER = 1 << 40


class Random(Simple):
    """Candidates are a few neighbours from a drawn position on; one of those with room is drawn."""

    name = "random"
    draws = True

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def start(self, turn: int, count: int) -> int:
        """Anywhere. Independent of the draw that settles ties, which uses `turn`."""
        return self._draw(~turn, count)
