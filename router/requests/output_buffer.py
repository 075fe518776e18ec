"""The output tokens of one request, as they may be sent to the client: each index once, in order.

Two workers send tokens of one attempt on separate streams, so an index may come early, twice, or from an attempt that
was given up. The buffer releases index 0, 1, 2, ... and nothing else:

    early      held back, with its logprobs, until the gap before it is closed
    duplicate  dropped; if it has another token (a near tie in another batch), the first one stays, and that is counted
    stale      of another attempt than the current one: dropped
    bare       without the logprobs that the client requested: ignored, so that the answer has a gap
    beyond     at or past `max_tokens`, or of a negative index: dropped, so that memory is bounded by `max_tokens`

Owner: the router core; one buffer per request, for all its attempts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import msgspec

from disagg.proto.messages import TokenLogprobs
from disagg.router.api import TokenBatch


class OutputBuffer(msgspec.Struct, gc=False):
    """Reorders and deduplicates the tokens of one request."""

    max_tokens: int
    wants_logprobs: bool = False
    """Whether each token must have logprobs; unrequested logprobs are dropped."""
    released: list[int] = []
    """Output tokens from index 0 on. A further attempt continues after these."""
    attempt: int = -1
    """The attempt whose tokens are taken; -1 before the first."""
    num_duplicate: int = 0
    num_contradicting: int = 0
    num_beyond: int = 0
    _had_bare: bool = False
    """Whether the current attempt sent bare tokens."""
    _early: dict[int, tuple[int, TokenLogprobs | None]] = {}

    def begin(self, attempt: int) -> None:
        """From now on only tokens of `attempt` count; tokens of earlier ones behind a gap are dropped, because the new
        attempt computes them again."""
        assert attempt > self.attempt, "attempts only go up"
        self.attempt = attempt
        self._early.clear()
        self._had_bare = False

    @property
    def has_gap(self) -> bool:
        """Whether a token is missing: one after it is held back, or it came bare."""
        return self._had_bare or bool(self._early)

    @property
    def dropped(self) -> dict[str, int]:
        """Numbers of tokens that were not released as they came, by reason."""
        return {
            "duplicate_tokens": self.num_duplicate,
            "contradicting_tokens": self.num_contradicting,
            "tokens_beyond": self.num_beyond,
        }

    def add(
        self, attempt: int, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> TokenBatch:
        """Take tokens [first_index, first_index + len) of `attempt`, and one of `logprobs` for each; returns what can
        be released now, in order."""
        if attempt != self.attempt:
            return TokenBatch([])
        if self.wants_logprobs and len(logprobs) != len(token_ids):
            self._had_bare = True
            return TokenBatch([])
        released = self.released
        last = first_index + len(token_ids)
        if first_index == len(released) and last <= self.max_tokens and not (self._early or self.wants_logprobs):
            released.extend(token_ids)  # As tokens mostly come: the next ones, and nothing waits for them.
            return TokenBatch(list(token_ids))
        of_tokens = logprobs if self.wants_logprobs else repeat(None, len(token_ids))
        for index, (token_id, of_token) in enumerate(zip(token_ids, of_tokens, strict=True), start=first_index):
            self._keep(index, token_id, of_token)
        return self._release()

    def _keep(self, index: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        if not 0 <= index < self.max_tokens:
            self.num_beyond += 1
            return
        if index < len(self.released):
            known = self.released[index]
        elif index in self._early:
            known = self._early[index][0]
        else:
            self._early[index] = (token_id, logprobs)
            return
        self.num_duplicate += 1
        self.num_contradicting += known != token_id

    def _release(self) -> TokenBatch:
        batch = TokenBatch([])
        while self._early and (early := self._early.pop(len(self.released), None)) is not None:
            token_id, logprobs = early
            self.released.append(token_id)
            batch.token_ids.append(token_id)
            if logprobs is not None:
                batch.logprobs.append(logprobs)
        return batch
