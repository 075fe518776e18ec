"""The guardrails of one answer: tokens in, tokens and text that may go to the client out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from disagg.proto.errors import InvalidRequestError
from disagg.proto.messages import TokenLogprobs
from disagg.router.gateway.guardrails.release import Part, TokenRelease
from disagg.router.gateway.guardrails.stream import Chain, Run
from disagg.router.gateway.guardrails.verdicts import Decisions, Question, Stop, Verdict

Ask = Callable[[Question], Awaitable[Verdict]]


class AnswerGuard:
    """Owner of what is held back of one answer.

    Args:
        chain: the stages of all guardrails.
        ask: answers their questions. Raises `UnavailableError`.
        decisions: to which the stages note theirs.
        ended: called once, when the answer has passed or was stopped.
    """

    def __init__(self, chain: Chain, ask: Ask, decisions: Decisions, ended: Callable[[], None]) -> None:
        self._chain = chain
        self._ask = ask
        self.decisions = decisions
        self._ended = ended
        self._release = TokenRelease()
        self._runs: list[Run] = []
        self._num_known = 0
        """Characters at the beginning that the client has, as far as they have not come out."""

    @property
    def stopped(self) -> Stop | None:
        """Set when the answer is at its end because of a guardrail."""
        return self._chain.stopped

    async def resume(self, text: str, num_tokens: int) -> None:
        """The client has this beginning of the answer, of `num_tokens` tokens. Raises `InvalidRequestError` where some
        of it is not what a client would have."""
        self._release = TokenRelease(num_tokens)
        self._num_known = len(text)
        await self._feed(text)

    async def push(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        """The next token, and the text that it brought. Not to be called when it has stopped."""
        self._release.push(token_id, len(text), logprobs)
        if text:
            await self._feed(text)

    async def finish(self, text: str) -> None:
        """No more tokens come; `text` is what is left. Not to be called when it has stopped."""
        if text:
            await self._feed(text)
        if self.stopped is None:
            await self._feed("", ended=True)

    def take(self, ended: bool = False) -> list[Part]:
        """What is final and was not taken. With `ended` for the last time: all text, and no token without its text."""
        runs, self._runs = self._runs, []
        if ended:
            self._ended()
        return self._release.take(runs, ended)

    async def _feed(self, text: str, ended: bool = False) -> None:
        if not self._chain.asks:
            runs = self._chain.scan(text, ended)
            self._runs += runs if not self._num_known else self._unknown(runs)
            return
        work = self._chain.feed(text, ended)
        try:
            question = next(work)
            while True:
                question = work.send(await self._ask(question))
        except StopIteration as end:
            self._runs += end.value if not self._num_known else self._unknown(end.value)

    def _unknown(self, runs: list[Run]) -> list[Run]:
        """The runs without what the client has."""
        new: list[Run] = []
        for run in runs:
            known = min(run.num_chars, self._num_known)
            if known and not run.is_original:
                raise InvalidRequestError("resume.token_ids", "have a text that a guardrail replaces")
            self._num_known -= known
            if run.text[known:] or not run.is_original:
                new.append(Run(run.text[known:], run.num_chars - known, run.is_original))
        return new
