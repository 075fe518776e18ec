"""Which workers get new work, by role, and what of them is left out for a while. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from disagg.proto.ids import WorkerId
from disagg.router.workers.quarantine import LeftOut, Quarantine
from disagg.router.workers.worker import Worker, decodes_only, longest_sequence, prefills_only


class InUse(NamedTuple):
    """The workers that get new work, by role, and what of them is left out."""

    prefills: frozenset[WorkerId]
    decodes: frozenset[WorkerId]
    wholes: frozenset[WorkerId]
    left_out: LeftOut
    longest_prefill: int
    """Of the sequences that fit on a P that is not left out."""
    longest_decode: int
    longest_alone: int

    def left_out_for(self, num_tokens: int) -> LeftOut:
        """What a request of so many tokens must not use: nothing of a role where only those left out could take it."""
        left_out = self.left_out
        if num_tokens < min(self.longest_prefill, self.longest_decode, self.longest_alone):
            return left_out
        return LeftOut(
            left_out.prefills if num_tokens < self.longest_prefill else frozenset(),
            left_out.decodes if num_tokens < self.longest_decode else frozenset(),
            left_out.alone if num_tokens < self.longest_alone else frozenset(),
            left_out.pairs,
        )


def find_in_use(workers: Collection[Worker], quarantine: Quarantine) -> InUse:
    """Of these workers."""
    prefills = frozenset(w.worker_id for w in workers if prefills_only(w.info))
    decodes = frozenset(w.worker_id for w in workers if decodes_only(w.info))
    wholes = frozenset(w.worker_id for w in workers) - prefills - decodes
    left_out = quarantine.left_out(prefills, decodes, wholes)

    def longest(those: frozenset[WorkerId]) -> int:
        return max((longest_sequence(w.info) for w in workers if w.worker_id in those), default=0)

    return InUse(
        prefills,
        decodes,
        wholes,
        left_out,
        longest(prefills - left_out.prefills),
        longest(decodes - left_out.decodes),
        longest((decodes | wholes) - left_out.alone),
    )
