"""Sends the answer of a call in the form of another API: as a stream of events, or as one object."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from disagg.gateway.http.shell.exchange import Exchange
from disagg.gateway.other_apis.shared.answers import AnswerWriter
from disagg.gateway.requests.answer_events import Delta, Finish


async def whole_answer(events: AsyncGenerator[Delta | Finish, None], writer: AnswerWriter) -> bytes:
    """The complete answer of a call, once it has ended."""
    async for event in events:
        if isinstance(event, Finish):
            writer.finish(event)
        else:
            writer.delta(event)
    return writer.whole()


async def write_answer(
    exchange: Exchange,
    events: AsyncGenerator[Delta | Finish, None],
    writer: AnswerWriter,
    as_stream: bool,
    before_end: Callable[[], Awaitable[None]],
) -> None:
    """Send the answer of a call. The status of a stream is sent with the first event, so that an earlier error has a
    status of its own. `before_end` is awaited before the end of the answer is sent."""
    if not as_stream:
        body = await whole_answer(events, writer)
        await before_end()
        await exchange.respond(200, body)
        return
    last = b""
    async for event in events:
        written = b""
        if not exchange.started:
            exchange.error_event = writer.failed
            await exchange.start_stream()
            written = writer.begin(event.num_prompt_tokens)
        if isinstance(event, Finish):
            last = written + writer.finish(event)
            continue
        written += writer.delta(event)
        if written:
            await exchange.write(written)
    await before_end()
    await exchange.end(last)
