"""One answer in the gateway: the router's tokens become text, until the router or a stop string ends it.

submitted ──> delta* ──> finish
    └─ stop string, error, deadline, the consumer leaves ──> cancelled in the cluster

The answers of one call are one stream (`merge`): the next item of an answer is read only after its last one was taken,
so a consumer that reads slowly holds back all of them, and costs one item a stream.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar

from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.detokenizer import Piece, TextStream
from disagg.proto.adapters import version_with
from disagg.proto.errors import DeadlineError, InternalError
from disagg.proto.messages import TokenLogprobs
from disagg.proto.token_ids import PackedTokenIds
from disagg.router.api import RoutedRequest, Router, TokenBatch


class Answer:
    """Owner of one request in the cluster, which runs from here on. It must be cancelled or read to its end.

    Args:
        router: where the request goes.
        routed: the request.
        arrival: when it came in, on `clock`.
        text: makes the text.
        clock: monotonic seconds, the clock of the deadline.
        answer_index: which answer of its call.

    Raises:
        DisaggError: if the router refuses it.
    """

    def __init__(
        self,
        router: Router,
        routed: RoutedRequest,
        arrival: float,
        text: TextStream,
        clock: Callable[[], float],
        answer_index: int = 0,
    ) -> None:
        self._routed = routed
        self._text = text
        self._clock = clock
        self._index = answer_index
        self._cancelled = False
        self._end: Finish | None = None
        self._handle = router.submit(routed, arrival)
        self._trace = router.trace(routed.request_id)
        self._noted: array[int] | None = None
        """Where its tokens are noted."""

    def note_decisions(self, decisions: Mapping[tuple[str, str, str, str, str], int]) -> None:
        """What guardrails do to it, for `explain`; it may still grow."""
        if self._trace is not None:
            self._trace.guardrails = decisions

    def note_tokens(self, token_ids: array[int]) -> None:
        """Add its tokens to `token_ids` as they come."""
        self._noted = token_ids

    @property
    def model_version(self) -> str:
        """Of the model that makes it; empty while that is not known."""
        return self._routed.model_version if self._trace is None else self._trace.model_version

    @property
    def told_version(self) -> str:
        """What the client is told of that version, see `version_with`."""
        return version_with(self.model_version, self._routed.adapter)

    def cancel(self) -> None:
        """Give it up, unless it ended. Idempotent."""
        if self._handle.completion is None and not self._cancelled:
            self._cancelled = True
            self._handle.cancel()

    def used(self) -> tuple[int, int]:
        """Cached prompt tokens and output tokens: of an ended answer as its client reads them, else all that were made
        so far. The first tokens of an answer that is continued count."""
        if self._end is not None:
            return self._end.num_cached_tokens, self._end.num_output_tokens
        num_made = 0 if self._trace is None else self._trace.num_output_tokens
        num_made += len(self._routed.resumed_token_ids)
        return self._traced_cached_tokens(), max(num_made, self._text.num_tokens)

    async def events(self) -> AsyncGenerator[Delta | Finish, None]:
        """The answer; for one consumer. However it ends, nothing of it is left in the cluster.

        Raises:
            DisaggError: whatever happens to the request.
        """
        text, tokens = self._text, aiter(self._handle)
        num_prompt_tokens = self._routed.num_prompt_tokens
        tells_version = True
        try:
            while (batch := await self._read(tokens)) is not None:
                first_index = text.num_tokens
                piece = self._push(batch)
                logprobs = self._logprobs(batch, len(piece.token_ids))
                version = self.told_version if tells_version and self._trace is not None else ""
                tells_version = False
                yield Delta(
                    first_index=first_index,
                    token_ids=piece.token_ids,
                    text=piece.text,
                    logprobs=logprobs,
                    answer_index=self._index,
                    num_prompt_tokens=num_prompt_tokens,
                    model_version=version,
                    reasoning=piece.reasoning,
                    calls=piece.calls,
                    num_reasoning_tokens=text.num_reasoning_tokens,
                    prompt_token_ids=self._prompt_ids(first_index),
                )
                if piece.stopped:
                    self._handle.num_answered = text.num_tokens
                    self.cancel()
                    self._end = self._finish(stopped=True)
                    yield self._end
                    return
            tail = text.finish()
            if tail.text or tail.reasoning or tail.calls:
                yield Delta(
                    first_index=text.num_tokens,
                    token_ids=(),
                    text=tail.text,
                    answer_index=self._index,
                    num_prompt_tokens=num_prompt_tokens,
                    reasoning=tail.reasoning,
                    calls=tail.calls,
                    num_reasoning_tokens=text.num_reasoning_tokens,
                )
            self._end = self._finish(tail.stopped)
            yield self._end
        finally:
            self.cancel()

    async def _read(self, tokens: AsyncIterator[TokenBatch]) -> TokenBatch | None:
        """The next batch, `None` at the end. Raises `DeadlineError` on time also where the router does not."""
        batch = await self._next(tokens)
        if self._noted is not None and batch is not None:
            self._noted.extend(batch.token_ids)
        return batch

    async def _next(self, tokens: AsyncIterator[TokenBatch]) -> TokenBatch | None:
        deadline = self._routed.deadline
        if deadline is None:
            return await anext(tokens, None)
        scope = asyncio.timeout(max(0.0, deadline - self._clock()))
        try:
            async with scope:
                return await anext(tokens, None)
        except TimeoutError:
            if not scope.expired():
                raise
            raise DeadlineError("the deadline passed while the answer was generated") from None

    def _push(self, batch: TokenBatch) -> Piece:
        """The text of `batch`; its time is added to the request's trace."""
        began = self._clock()
        piece = self._text.push(batch.token_ids)
        if self._trace is not None:
            self._trace.detokenize_s += self._clock() - began
        return piece

    def _logprobs(self, batch: TokenBatch, num_tokens: int) -> tuple[TokenLogprobs, ...]:
        """Those of the first `num_tokens` tokens of `batch`, if the request has logprobs."""
        if self._routed.sampling.logprobs < 0:
            return ()
        if len(batch.logprobs) != len(batch.token_ids):
            raise InternalError(
                f"request {self._routed.request_id} has {len(batch.logprobs)} logprobs of {len(batch.token_ids)} tokens"
            )
        return tuple(batch.logprobs[:num_tokens])

    def _prompt_ids(self, first_index: int) -> PackedTokenIds:
        is_wanted = first_index == 0 and self._routed.sampling.prompt_logprobs >= 0
        return self._routed.prompt_token_ids if is_wanted else PackedTokenIds(b"")

    def _finish(self, stopped: bool) -> Finish:
        """The end: by a stop string, or as the router saw it."""
        completion = None if stopped else self._handle.completion
        if completion is None and not stopped:
            raise InternalError(f"request {self._routed.request_id} ended without a completion")
        return Finish(
            request_id=self._routed.request_id,
            reason="stop" if completion is None else completion.reason,
            num_prompt_tokens=self._routed.num_prompt_tokens,
            num_cached_tokens=self._traced_cached_tokens() if completion is None else completion.cached_tokens,
            num_output_tokens=self._text.num_tokens,
            answer_index=self._index,
            num_reasoning_tokens=self._text.num_reasoning_tokens,
            stop_string=self._text.stop_string,
        )

    def _traced_cached_tokens(self) -> int:
        """Cached prompt tokens of an answer that was cut short."""
        trace = self._trace
        if trace is None:
            return 0
        return trace.decode_cached_tokens if trace.prefill_worker is None else trace.prefill_cached_tokens


T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all `streams` as they come, each stream's in its order. Ends after the last stream, or with the
    first error; then, and when it is closed early, every stream is closed. Close it (`contextlib.aclosing`)."""
    reading: dict[asyncio.Task[tuple[T, ...]], AsyncGenerator[T, None]] = {}
    try:
        for stream in streams:
            reading[asyncio.create_task(_next(stream))] = stream
            await asyncio.sleep(0)  # what a stream does first is done in a turn of the event loop of its own
        while reading:
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in reading if task.done()]:
                stream = reading.pop(task)
                for item in task.result():
                    yield item
                    reading[asyncio.create_task(_next(stream))] = stream
    finally:
        for task in reading:
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not all(task.done() for task in reading):
            try:
                await asyncio.gather(*(asyncio.shield(task) for task in reading), return_exceptions=True)
            except asyncio.CancelledError as error:  # once more: the streams are closed before it goes on
                cancelled = error
        for stream in streams:
            await stream.aclose()
        if cancelled is not None:
            raise cancelled


async def _next(stream: AsyncGenerator[T, None]) -> tuple[T, ...]:
    """The next item, none at the end."""
    async for item in stream:
        return (item,)
    return ()
