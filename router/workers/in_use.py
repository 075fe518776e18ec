"""Which workers get new work, by role, and what of them is left out for a while. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from disagg.proto.ids import WorkerId
from disagg.router.workers.circuit_breakers import CircuitBreakers, Exclusions
from disagg.router.workers.worker import Worker, decodes_only, longest_sequence, prefills_only


class UsableWorkers(NamedTuple):
    """The workers that get new work, by role, and what of them is left out."""

    prefills: frozenset[WorkerId]
    decodes: frozenset[WorkerId]
    colocated: frozenset[WorkerId]
    excluded: Exclusions
    longest_prefill: int
    """Of the sequences that fit on a P that is not left out."""
    longest_decode: int
    longest_colocated: int

    def excluded_for(self, num_tokens: int) -> Exclusions:
        """What a request of so many tokens must not use: nothing of a role where only those left out could take it."""
        excluded = self.excluded
        if num_tokens < min(self.longest_prefill, self.longest_decode, self.longest_colocated):
            return excluded
        return Exclusions(
            excluded.prefills if num_tokens < self.longest_prefill else frozenset(),
            excluded.decodes if num_tokens < self.longest_decode else frozenset(),
            excluded.colocated if num_tokens < self.longest_colocated else frozenset(),
            excluded.pairs,
        )


def find_usable(workers: Collection[Worker], breakers: CircuitBreakers) -> UsableWorkers:
    """Of these workers."""
    prefills = frozenset(w.worker_id for w in workers if prefills_only(w.info))
    decodes = frozenset(w.worker_id for w in workers if decodes_only(w.info))
    colocated = frozenset(w.worker_id for w in workers) - prefills - decodes
    excluded = breakers.excluded(prefills, decodes, colocated)

    def longest(those: frozenset[WorkerId]) -> int:
        return max((longest_sequence(w.info) for w in workers if w.worker_id in those), default=0)

    return UsableWorkers(
        prefills,
        decodes,
        colocated,
        excluded,
        longest(prefills - excluded.prefills),
        longest(decodes - excluded.decodes),
        longest((decodes | colocated) - excluded.colocated),
    )
