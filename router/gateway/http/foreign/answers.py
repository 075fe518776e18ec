"""Answers as other APIs send them: typed server-sent events, or one object, from text in which calls are found."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

import msgspec

from disagg.proto.errors import DisaggError
from disagg.router.gateway.answers.generation import Delta, Finish
from disagg.router.gateway.http.exchange import Exchange
from disagg.router.gateway.http.tools import OfferedTools
from disagg.router.gateway.text.tokenizer import Tokenizer
from disagg.router.gateway.text.tool_calls import Part, ToolCall, tool_parser

_LINE_ENDS: Final = (("\u0085".encode(), b"\\u0085"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))
"""JSON lets these stand, but clients that split lines of text, not of bytes, would take them for ends of lines."""


def one_line(value: Any) -> bytes:
    """JSON that is one line for every reader."""
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for char, escaped in _LINE_ENDS:
            encoded = encoded.replace(char, escaped)
    return encoded


def typed_event(kind: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event whose name is in its data too."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), one_line({"type": kind, **fields}))


class PartReader:
    """Finds the calls in the text of one answer.

    Args:
        tokenizer: of the model, whose format of calls it knows.
        tools: what may be called; `None` for an answer that is text only.
    """

    def __init__(self, tokenizer: Tokenizer, tools: OfferedTools | None) -> None:
        self._parser = None if tools is None else tool_parser(tokenizer.tool_format, tools.names)
        self._is_parallel = tools is not None and tools.parallel
        self.num_calls = 0

    def feed(self, text: str) -> list[Part]:
        """What is certain after the next piece of text."""
        if self._parser is None:
            return [text] if text else []
        return self._counted(self._parser.feed(text))

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer."""
        return [] if self._parser is None else self._counted(self._parser.finish())

    def _counted(self, parts: list[Part]) -> list[Part]:
        """Without the calls after the first one, where there may be one only."""
        kept: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCall):
                if self.num_calls and not self._is_parallel:
                    continue
                self.num_calls += 1
            kept.append(part)
        return kept


class AnswerWriter(Protocol):
    """Writes one answer."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The events before the first one of the answer."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta; empty where there are none."""
        ...

    def finish(self, finish: Finish) -> bytes:
        """The events of the end."""
        ...

    def failed(self, error: DisaggError) -> bytes:
        """The last event of a stream that an error ended."""
        ...

    def whole(self) -> bytes:
        """The complete answer, after its end."""
        ...


async def whole_answer(events: AsyncGenerator[Delta | Finish, None], writer: AnswerWriter) -> bytes:
    """The one answer of a call, once it has ended."""
    async for event in events:
        if isinstance(event, Finish):
            writer.finish(event)
        else:
            writer.delta(event)
    return writer.whole()


async def write_answer(
    exchange: Exchange, events: AsyncGenerator[Delta | Finish, None], writer: AnswerWriter, as_stream: bool
) -> None:
    """Send the one answer of a call. A stream's status waits for the first event, so that whatever is wrong before has
    a status of its own."""
    if not as_stream:
        await exchange.respond(200, await whole_answer(events, writer))
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
    await exchange.end(last)
