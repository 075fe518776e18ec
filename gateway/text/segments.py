"""What an answer's text is divided into: reasoning, content, calls of functions, and what is left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Channel = Literal["reasoning", "content", "call", "none"]
"""Where a text goes. `none`: tags, and white space beside them."""


class ToolCall(NamedTuple):
    """A complete call of a function."""

    name: str
    arguments: str
    """Arguments as a JSON object."""


class Segment(NamedTuple):
    """A piece of an answer. Joined, the texts of all segments are the answer as the model wrote it."""

    channel: Channel
    text: str
    """Text as the model wrote it; of several calls in one piece of text only the first has it."""
    call: ToolCall | None = None
    """The tool call, in the channel `call`."""


class Parts(NamedTuple):
    """What clients get of some segments."""

    reasoning: str = ""
    content: str = ""
    """Text after the reasoning."""
    calls: tuple[tuple[int, ToolCall], ...] = ()
    """Calls, each with the number of characters of `content` before it."""


def parts_of(segments: Iterable[Segment]) -> Parts:
    """Some segments that follow each other."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[int, ToolCall]] = []
    for channel, text, call in segments:
        if call is not None:
            calls.append((sum(map(len, content)), call))
        elif channel == "content":
            content.append(text)
        elif channel == "reasoning":
            reasoning.append(text)
    return Parts("".join(reasoning), "".join(content), tuple(calls))


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Segments without empty texts, and neighbours of one channel as one; each call remains one of its own."""
    found: list[Segment] = []
    texts: list[str] = []
    channel: Channel = "none"

    def end() -> None:
        if text := "".join(texts):
            found.append(Segment(channel, text))
        texts.clear()

    for one in segments:
        if one.call is not None or one.channel != channel:
            end()
            channel = one.channel
        if one.call is None:
            texts.append(one.text)
        else:
            found.append(one)
    end()
    return found


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)
