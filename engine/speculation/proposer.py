"""The interface of what proposes drafts: ids that may follow the text of a sequence.

A wrong draft costs the time of its row and changes no token, so a proposer may be wrong, and may know nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from disagg.engine.request import Sequence


class Proposal(NamedTuple):
    """Drafts for one sequence."""

    token_ids: tuple[int, ...] = ()
    match_length: int = 0
    """Number of tokens of the match that the drafts continue; 0 for other methods."""


NOTHING = Proposal()


class Proposer(Protocol):
    """A method of drafting."""

    is_costly: bool = False
    """Whether a draft takes time to make: it is decided before how many there are, by what became of the last ones."""

    def most(self, sequence: Sequence, most: int) -> int:
        """How many of `most` drafts it may make for a sequence."""
        return most

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        """At most `most` ids that may follow `sequence.token_ids`; none where it knows nothing."""
        ...

    def propose_all(self, sequences: Seq[tuple[Sequence, int]]) -> list[Proposal]:
        """The same for several sequences, each with its most."""
        return [self.propose(sequence, most) for sequence, most in sequences]

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that ended or left."""
        ...
