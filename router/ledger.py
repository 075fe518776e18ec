"""The tokens of one request, as they may be shown to the client: each index once, in order.

Two workers send tokens of one attempt on separate streams, so an index may come early, twice, or from an attempt that
was given up. The ledger releases index 0, 1, 2, ... and nothing else:

    early      held back until the gap before it is closed
    duplicate  dropped; if it names another token (a near tie in another batch), the first one stays, and that is
    counted stale      of another attempt than the current one: dropped
    beyond     at or past `max_tokens`, or of a negative index: dropped, so memory is bounded by what the client asked
    for

Owner: the router core; one ledger per request, for all its attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TokenLedger:
    """See the module docstring."""

    max_tokens: int
    released: list[int] = field(default_factory=list)
    """Output tokens from index 0 on. Whoever continues the request starts after these."""
    attempt: int = -1
    """The attempt whose tokens are taken; -1 before the first."""
    num_duplicate: int = 0
    num_contradicting: int = 0
    num_stale: int = 0
    num_beyond: int = 0
    _early: dict[int, int] = field(default_factory=dict)

    def begin(self, attempt: int) -> None:
        """From now on only tokens of `attempt` count; what earlier ones left behind a gap is dropped, the new one
        makes it again."""
        assert attempt > self.attempt, "attempts only go up"
        self.attempt = attempt
        self._early.clear()

    @property
    def has_gap(self) -> bool:
        """Whether a token is held back because one before it is missing."""
        return bool(self._early)

    def add(self, attempt: int, first_index: int, token_ids: Sequence[int]) -> list[int]:
        """Take tokens [first_index, first_index + len) of `attempt`; returns those that can be released now, in
        order."""
        if attempt != self.attempt:
            self.num_stale += len(token_ids)
            return []
        for index, token_id in enumerate(token_ids, start=first_index):
            self._keep(index, token_id)
        return self._release()

    def _keep(self, index: int, token_id: int) -> None:
        if not 0 <= index < self.max_tokens:
            self.num_beyond += 1
            return
        known = self.released[index] if index < len(self.released) else self._early.get(index)
        if known is None:
            self._early[index] = token_id
        else:
            self.num_duplicate += 1
            self.num_contradicting += known != token_id

    def _release(self) -> list[int]:
        start = len(self.released)
        while self._early and (token_id := self._early.pop(len(self.released), None)) is not None:
            self.released.append(token_id)
        return self.released[start:]
