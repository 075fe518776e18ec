"""Answers as other APIs send them: typed server-sent events, or one object. Pure."""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from disagg.gateway.requests.answer_events import Delta, Finish
from disagg.gateway.text.segments import ToolCall
from disagg.proto.errors import DisaggError

Part = str | ToolCall

_LINE_ENDS: Final = (("\u0085".encode(), b"\\u0085"), ("\u2028".encode(), b"\\u2028"), ("\u2029".encode(), b"\\u2029"))
"""Characters that JSON allows in strings, but that clients which split text into lines take for line breaks."""


def one_line(value: Any) -> bytes:
    """JSON without any character that a reader may take for a line break."""
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for char, escaped in _LINE_ENDS:
            encoded = encoded.replace(char, escaped)
    return encoded


def typed_event(kind: str, fields: dict[str, Any]) -> bytes:
    """A server-sent event whose name is also the field `type` of its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), one_line({"type": kind, **fields}))


class PartReader:
    """Reads the deltas of one answer: its texts and calls in their order.

    Args:
        is_parallel: whether there may be several calls; else those after the first one are left out.
    """

    def __init__(self, is_parallel: bool = True) -> None:
        self._is_parallel = is_parallel
        self.num_calls = 0

    def read(self, delta: Delta) -> list[Part]:
        """The texts and calls of a delta, without its reasoning."""
        parts: list[Part] = []
        start = 0
        for place, call in delta.calls:
            parts.append(delta.text[start:place])
            start = place
            if self._is_parallel or not self.num_calls:
                self.num_calls += 1
                parts.append(call)
        parts.append(delta.text[start:])
        return [part for part in parts if part]


class AnswerWriter(Protocol):
    """Writes one answer in the form of an API."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The events before the first delta."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The events of a delta; empty where there are none."""
        ...

    def finish(self, finish: Finish) -> bytes:
        """The events that end the answer."""
        ...

    def failed(self, error: DisaggError) -> bytes:
        """The last event of a stream that an error ended."""
        ...

    def whole(self) -> bytes:
        """The complete answer, after its end."""
        ...
