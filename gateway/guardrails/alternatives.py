"""Which of the likeliest tokens may be shown beside those of a text. Pure.

An alternative is text that the model might have written there: one that would complete a match is left out, and with it
the less likely ones, so that what is shown are still the likeliest tokens, and their ranks are right.

Nearly always no match has begun before a token. Then only a token that has one by itself can complete one, which is
found out once for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final

import msgspec

from disagg.gateway.guardrails.scanner import Scanner
from disagg.proto.messages import TokenLogprobs

_BEFORE: Final = (b"", b" ", b"a")
"""What may stand before a token, as far as the borders of words are concerned."""


class Alternatives:
    """Alternatives of the tokens of one text, token by token.

    Args:
        scanners: of the patterns that no text may have; `None` leaves all alternatives out.
        token_bytes: the bytes of a token.
    """

    def __init__(self, scanners: Sequence[Scanner] | None, token_bytes: Callable[[int], bytes]) -> None:
        self._scanners = scanners
        self._token_bytes = token_bytes
        self._alone: dict[int, bool] = {}
        """Tokens that have a match by themselves, or may have."""
        self._before = [b""] * len(scanners or ())
        """End of the text where a match may have begun, with the character before it; one for each scanner."""
        self._starts = [0] * len(self._before)
        """Index in `_before` from which a match may have begun; one for each scanner."""

    def begin(self) -> Alternatives:
        """New `Alternatives` with the same patterns, for another text."""
        return Alternatives(self._scanners, self._token_bytes)

    def shown(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Log probabilities of the next token without alternatives that would show something; the token is added to the
        text."""
        allowed = list(takewhile(lambda other: other == token_id or self._may_follow(other), logprobs.top_ids))
        self.go_on(token_id)
        if len(allowed) == len(logprobs.top_ids):
            return logprobs
        return msgspec.structs.replace(
            logprobs, top_ids=tuple(allowed), top_logprobs=logprobs.top_logprobs[: len(allowed)]
        )

    def _may_follow(self, token_id: int) -> bool:
        if self._scanners is None:
            return False
        has_begun = any(len(before) > start for before, start in zip(self._before, self._starts, strict=True))
        if not has_begun and not self._has_alone(token_id, self._scanners):
            return True
        data = self._token_bytes(token_id)
        return not any(
            _matches(scanner, before + data, start, len(before))
            for scanner, before, start in zip(self._scanners, self._before, self._starts, strict=True)
        )

    def _has_alone(self, token_id: int, scanners: Sequence[Scanner]) -> bool:
        found = self._alone.get(token_id)
        if found is None:
            data = self._token_bytes(token_id)
            found = self._alone[token_id] = any(
                _matches(scanner, before + data, len(before), len(before)) for scanner in scanners for before in _BEFORE
            )
        return found

    def go_on(self, token_id: int) -> None:
        """Add a token to the text."""
        for i, scanner in enumerate(self._scanners or ()):
            text, start = self._before[i] + self._token_bytes(token_id), self._starts[i]
            while (found := scanner.find(text, start, False)) is not None and found.pattern is not None:
                start = found.end  # it was replaced
            start = len(text) if found is None else found.start
            begin = max(0, start - 1)
            self._before[i], self._starts[i] = text[begin:], start - begin


def _matches(scanner: Scanner, text: bytes, start: int, known: int) -> bool:
    """Whether a match that begins at `start` or later ends behind `known`."""
    while (found := scanner.find(text, start, True)) is not None:
        if found.end > known:
            return True
        start = found.end
    return False
