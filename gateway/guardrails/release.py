"""Which tokens of an answer go to the client with the text that is final. Pure.

A token goes with the text that it brought, and text goes in whole tokens: so a position in an answer is the same
however the answer was cut into messages. Tokens whose text was replaced, even in part, are left out with their
probabilities, since they would tell what was replaced; their indices are missing then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.gateway.guardrails.stream import Run
from disagg.gateway.text.segments import ToolCall
from disagg.proto.messages import TokenLogprobs


class _Token(NamedTuple):
    number: int
    """Number of the token in the answer, from 0."""
    token_id: int
    logprobs: TokenLogprobs | None
    start: int
    end: int
    """End of the token's text, in characters of the original text."""


class _Piece(NamedTuple):
    start: int
    end: int
    """End in characters of the original text."""
    run: Run


@dataclass(slots=True)
class Part:
    """Tokens that follow each other, with their text."""

    first_index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    skipped_chars: int = 0
    """Characters of text before these tokens that belong to no token."""
    reasoning: list[str] = field(default_factory=list)
    """Reasoning, which comes before the texts."""
    calls: list[tuple[int, ToolCall]] = field(default_factory=list)
    """Calls, each with the number of characters of `texts` before it."""

    def add(self, run: Run) -> None:
        """Add what a client gets of a run."""
        if run.call is not None:
            self.calls.append((sum(map(len, self.texts)), run.call))
        elif run.channel == "content":
            self.texts.append(run.text)
        elif run.channel == "reasoning":
            self.reasoning.append(run.text)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for a client."""
        return not (self.token_ids or self.calls or any(self.texts) or any(self.reasoning))


class TokenRelease:
    """The tokens and texts of one answer, until they are final.

    Args:
        first_index: of the first token that comes.
    """

    def __init__(self, first_index: int = 0) -> None:
        self._next_index = first_index
        self._tokens: deque[_Token] = deque()
        self._pieces: deque[_Piece] = deque()
        self._num_pushed = 0
        """Characters of the original text that tokens brought."""
        self._num_final = 0
        self._skipped = 0
        self._replaced_until = 0
        """The end of the last text that was replaced."""

    def push(self, token_id: int, num_chars: int, logprobs: TokenLogprobs | None) -> None:
        """The next token of the answer, and how much text it brought."""
        start = self._num_pushed
        self._num_pushed += num_chars
        self._tokens.append(_Token(self._next_index, token_id, logprobs, start, self._num_pushed))
        self._next_index += 1

    def take(self, runs: Sequence[Run], ended: bool = False) -> list[Part]:
        """Tokens and text that are final now that `runs` are; with `ended`, text without its tokens too."""
        if len(runs) == 1 and len(self._tokens) == 1 and not self._pieces and runs[0].is_original and not ended:
            (token,), run = self._tokens, runs[0]
            if (
                run.channel == "content"
                and token.end == self._num_final + run.num_chars
                and token.start == self._num_final
            ):  # as nearly always
                self._tokens.popleft()
                self._num_final = token.end
                skipped, self._skipped = self._skipped, 0
                logprobs = [] if token.logprobs is None else [token.logprobs]
                return [Part(token.number, [token.token_id], logprobs, [run.text], skipped)]
        for run in runs:
            end = self._num_final + run.num_chars
            self._pieces.append(_Piece(self._num_final, end, run))
            self._num_final = end
        parts: list[Part] = []
        part: Part | None = None
        while self._tokens and self._tokens[0].end <= self._num_final:
            token = self._tokens.popleft()
            before, was_replaced = self._runs_until(token)
            if part is None or (was_replaced and part.token_ids):
                part = Part(token.number)
                parts.append(part)
            for run in before:
                part.add(run)
            if was_replaced:
                self._skipped += sum(len(run.text) for run in before if run.channel == "content")
                continue
            if not part.token_ids:
                part.first_index = token.number
            part.skipped_chars += self._skipped
            self._skipped = 0
            part.token_ids.append(token.token_id)
            if token.logprobs is not None:
                part.logprobs.append(token.logprobs)
        if ended:
            rest = Part(self._next_index if not self._tokens else self._tokens[0].number)
            for piece in self._pieces:
                rest.add(piece.run)
            self._pieces.clear()
            parts.append(rest)
        return [part for part in parts if not part.is_empty]

    def _runs_until(self, token: _Token) -> tuple[list[Run], bool]:
        """What comes up to the end of a token that is final, and whether some of its own text was replaced."""
        runs: list[Run] = []
        was_replaced = token.start < self._replaced_until
        while self._pieces and self._pieces[0].start <= token.end:
            start, end, run = self._pieces[0]
            if start == token.end < end:
                break
            if not run.is_original:
                was_replaced = was_replaced or (start < token.end and end > token.start)
                self._replaced_until = max(self._replaced_until, end)
            if not (run.is_original and run.text) and end > token.end:  # it goes with the last token of it
                break
            self._pieces.popleft()
            if end <= token.end:
                runs.append(run)
                continue
            num_chars = token.end - start
            runs.append(run._replace(text=run.text[:num_chars], num_chars=num_chars))
            rest = run._replace(text=run.text[num_chars:], num_chars=end - token.end)
            self._pieces.appendleft(_Piece(token.end, end, rest))
            break
        return runs, was_replaced
