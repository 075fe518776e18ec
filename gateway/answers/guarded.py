"""An answer whose text guardrails look at before it goes to the client.

tokens ──> text ──> AnswerGuard ──> deltas of what is final ──> finish
                        └─ stop: cancelled in the cluster, `content_filter`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, Literal

import msgspec
from typing_extensions import override

from disagg.gateway.answers.answer import Answer
from disagg.gateway.guardrails.answers import AnswerGuard
from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.detokenizer import TextStream
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import RoutedRequest, Router, TokenBatch

_TOKENS_A_TURN: Final = 128
"""That are looked at in one turn of the event loop, where a slow client lets many come together: about a millisecond.
"""

_PROMPT_TOKENS_A_TURN: Final = 8
"""Whose likeliest tokens are looked at in one turn of the event loop: about a millisecond."""


class GuardedAnswer(Answer):
    """An `Answer` of which nothing goes out that a guardrail has not let pass.

    Args:
        guard: looks at the text; the other arguments are those of `Answer`.
    """

    def __init__(
        self,
        router: Router,
        routed: RoutedRequest,
        arrival: float,
        text: TextStream,
        clock: Callable[[], float],
        answer_index: int,
        guard: AnswerGuard,
    ) -> None:
        super().__init__(router, routed, arrival, text, clock, answer_index)
        self._guard = guard
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Logprobs of the prompt's tokens, which come with the first token of the answer."""
        self.note_decisions(guard.decisions.counts)

    @override
    async def events(self) -> AsyncGenerator[Delta | Finish, None]:
        text, guard, tokens = self._text, self._guard, aiter(self._handle)
        tells_version = True
        try:
            while (batch := await self._read(tokens)) is not None:
                ended = await self._take(batch)
                for delta in deltas(guard, self._index, self._routed.num_prompt_tokens, ended):
                    if not delta.token_ids:
                        yield delta
                        continue
                    version = self.told_version if tells_version and self._trace is not None else ""
                    if tells_version:
                        delta = self._with_prompt(delta)
                    tells_version = False
                    yield replace(delta, model_version=version)
                if ended:
                    self._handle.num_answered = text.num_tokens
                    self.cancel()
                    yield self._guarded_finish(stopped=True)
                    return
            tail = text.finish()
            await guard.finish(tail.text)
            for delta in deltas(guard, self._index, self._routed.num_prompt_tokens, ended=True):
                yield delta
            yield self._guarded_finish(tail.stopped)
        finally:
            self.cancel()

    async def _take(self, batch: TokenBatch) -> bool:
        """The next tokens, one by one, so that where the answer ends does not depend on how they came. Whether it ended
        here."""
        logprobs = self._logprobs(batch, len(batch.token_ids))
        if logprobs and not self._text.num_tokens:
            self._prompt_logprobs = await self._shown_prompt(logprobs[0].prompt)
        for i, token_id in enumerate(batch.token_ids):
            if i % _TOKENS_A_TURN == _TOKENS_A_TURN - 1:
                await asyncio.sleep(0)
            piece = self._text.push((token_id,))
            await self._guard.push(token_id, piece.text, logprobs[i] if logprobs else None)
            if self._guard.stopped is not None:
                return True
            if piece.stopped:
                await self._guard.finish("")
                return True
        return False

    async def _shown_prompt(self, logprobs: Sequence[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
        """Of the prompt's tokens but the first, those that may be shown."""
        alternatives, shown = self._guard.alternatives(), list[TokenLogprobs]()
        for i, token_id in enumerate(unpack_token_ids(self._prompt_ids(0))):
            if i % _PROMPT_TOKENS_A_TURN == _PROMPT_TOKENS_A_TURN - 1:
                await asyncio.sleep(0)
            if i:
                shown.append(alternatives.shown(token_id, logprobs[i - 1]))
            else:
                alternatives.go_on(token_id)
        return tuple(shown)

    def _with_prompt(self, delta: Delta) -> Delta:
        """The first delta with tokens, with what is known of the prompt: the first token may have been replaced."""
        if not delta.logprobs or self._routed.sampling.prompt_logprobs < 0:
            return delta
        first = msgspec.structs.replace(delta.logprobs[0], prompt=self._prompt_logprobs)
        return replace(delta, logprobs=(first, *delta.logprobs[1:]), prompt_token_ids=self._prompt_ids(0))

    def _guarded_finish(self, stopped: bool) -> Finish:
        was_stopped = self._guard.stopped is not None
        finish = replace(self._finish(stopped or was_stopped), num_reasoning_tokens=self._guard.num_reasoning_tokens)
        if was_stopped:
            finish = replace(finish, reason="content_filter", stop_string="")
        self._end = finish
        return finish


def deltas(guard: AnswerGuard, answer_index: int, num_prompt_tokens: int, ended: bool) -> Iterator[Delta]:
    """What may go to the client now."""
    for part in guard.take(ended):
        yield Delta(
            first_index=part.first_index,
            token_ids=tuple(part.token_ids),
            text="".join(part.texts),
            logprobs=tuple(part.logprobs),
            answer_index=answer_index,
            num_prompt_tokens=num_prompt_tokens,
            reasoning="".join(part.reasoning),
            calls=tuple(part.calls),
            num_reasoning_tokens=guard.num_reasoning_tokens,
            skipped=((0, part.skipped_chars),) if part.skipped_chars and part.token_ids else (),
        )


async def guarded_rest(
    guard: AnswerGuard, routed: RoutedRequest, text: TextStream, reason: Literal["stop", "length"]
) -> AsyncGenerator[Delta | Finish, None]:
    """What comes after the last token of an answer of which the client has all tokens."""
    if guard.stopped is None:
        tail = text.finish() if not text.stopped else None
        await guard.finish("" if tail is None else tail.text)
        reason = "stop" if tail is not None and tail.stopped else reason
    for delta in deltas(guard, 0, routed.num_prompt_tokens, ended=True):
        yield delta
    end: Literal["stop", "length", "content_filter"] = reason if guard.stopped is None else "content_filter"
    yield Finish(
        request_id=routed.request_id,
        reason=end,
        num_prompt_tokens=routed.num_prompt_tokens,
        num_cached_tokens=0,
        num_output_tokens=text.num_tokens,
        num_reasoning_tokens=guard.num_reasoning_tokens,
    )
