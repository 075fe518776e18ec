"""The guardrails of one answer: tokens in, tokens and text that may go to the client out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from disagg.gateway.guardrails.alternatives import Alternatives
from disagg.gateway.guardrails.channels import GuardedChannels
from disagg.gateway.guardrails.release import Part, TokenRelease
from disagg.gateway.guardrails.stream import Run
from disagg.gateway.requests.validate import RESUMED
from disagg.gateway.requests.verdicts import Decisions, Question, Stop, Verdict
from disagg.proto.errors import InvalidRequestError
from disagg.proto.messages import TokenLogprobs

Ask = Callable[[Question], Awaitable[Verdict]]


class AnswerGuard:
    """Owner of what is held back of one answer.

    Args:
        channels: the checks of all guardrails.
        ask: answers their questions. Raises `UnavailableError`.
        decisions: to which the checks note theirs.
        ended: called once, when the answer has passed or was stopped.
        alternatives: what may be shown beside its tokens.
    """

    def __init__(
        self,
        channels: GuardedChannels,
        ask: Ask,
        decisions: Decisions,
        ended: Callable[[], None],
        alternatives: Alternatives,
    ) -> None:
        self._channels = channels
        self._ask = ask
        self.decisions = decisions
        self._ended = ended
        self._alternatives = alternatives
        self._release = TokenRelease()
        self._runs: list[Run] = []
        self.num_tokens = 0
        """Number of tokens of the answer so far."""
        self._num_known = 0
        """Characters at the beginning that the client has, as far as they have not come out."""

    @property
    def stopped(self) -> Stop | None:
        """Set when the answer is at its end because of a guardrail."""
        return self._channels.stopped

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens up to the one that completed the close tag, or so far."""
        return self._channels.num_reasoning_tokens

    async def resume(self, text: str, num_tokens: int) -> None:
        """The client has this beginning of the answer, of `num_tokens` tokens. Raises `InvalidRequestError` where some
        of it is not what a client would have."""
        self._release = TokenRelease(num_tokens)
        self._num_known = len(text)
        self.num_tokens += num_tokens
        await self._feed(text)

    def alternatives(self) -> Alternatives:
        """What may be shown beside the tokens of another text than this answer."""
        return self._alternatives.begin()

    async def push(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        """The next token, and the text that it brought. Not to be called when it has stopped."""
        if logprobs is not None:
            logprobs = self._alternatives.shown(token_id, logprobs)
        self._release.push(token_id, len(text), logprobs)
        self.num_tokens += 1
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
        channels = self._channels
        if not channels.asks:
            runs = channels.scan(text, self.num_tokens, ended)
            self._runs += runs if not self._num_known else self._unknown(runs)
            return
        work = channels.feed(text, self.num_tokens, ended)
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
                raise InvalidRequestError(RESUMED, "have a text that a guardrail replaces")
            self._num_known -= known
            if run.num_chars > known or not run.is_original:
                new.append(run._replace(text=run.text[known:], num_chars=run.num_chars - known))
        return new
