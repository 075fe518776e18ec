"""The guardrails of one answer: tokens in, tokens and text that may go to the client out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from disagg.proto.errors import InvalidRequestError
from disagg.proto.messages import TokenLogprobs
from disagg.router.gateway.guardrails.release import Part, TokenRelease
from disagg.router.gateway.guardrails.stream import Chain, Run
from disagg.router.gateway.guardrails.verdicts import Decisions, Question, Stop, Verdict
from disagg.router.gateway.text.reasoning import Parts, Phase, ReasoningSplitter

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
        self._splitter: ReasoningSplitter | None = None
        """Of what goes out."""
        self._counter: ReasoningSplitter | None = None
        """Of what the model wrote, to count its tokens."""
        self.num_tokens = 0
        """Of the answer so far."""
        self.num_reasoning_tokens = 0
        """Tokens up to the one that completed the close tag, or so far."""
        self._num_known = 0
        """Characters at the beginning that the client has, as far as they have not come out."""

    @property
    def stopped(self) -> Stop | None:
        """Set when the answer is at its end because of a guardrail."""
        return self._chain.stopped

    def separate(self, phase: Phase) -> None:
        """Separate reasoning from what follows, after the guardrails looked at both with the tags. To be called before
        anything else."""
        self._splitter, self._counter = ReasoningSplitter(phase), ReasoningSplitter(phase)

    async def resume(self, text: str, num_tokens: int) -> None:
        """The client has this beginning of the answer, of `num_tokens` tokens. Raises `InvalidRequestError` where some
        of it is not what a client would have."""
        self._release = TokenRelease(num_tokens)
        self._num_known = len(text)
        if self._splitter is not None:
            self._splitter.feed(text)
        self._count(text, num_tokens)
        await self._feed(text)

    async def push(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        """The next token, and the text that it brought. Not to be called when it has stopped."""
        self._release.push(token_id, len(text), logprobs)
        self._count(text, 1)
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

    def split(self, text: str) -> Parts:
        """Reasoning and content of the next text that goes out."""
        return Parts("", text) if self._splitter is None else self._splitter.feed(text)

    def split_rest(self) -> Parts:
        """What is left of them at the end."""
        return Parts("", "") if self._splitter is None else self._splitter.finish()

    def _count(self, text: str, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if self._counter is not None and self._counter.phase is not Phase.AFTER:
            self._counter.feed(text)
            if self._counter.has_reasoned:
                self.num_reasoning_tokens = self.num_tokens

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
