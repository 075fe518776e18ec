"""Tool calls in the text of an answer, found as it comes. Pure state machines: what is found does not depend on how the
text was cut, each character is looked at a bounded number of times, and text that cannot be a call is given on at once.

A call counts only where its name is that of an offered tool and its arguments are an object; anything else is text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
from typing_extensions import override

ToolFormat = Literal["hermes", "json"]
"""How a model writes calls. `hermes`: `<tool_call>{...}</tool_call>` anywhere in the text (Hermes, Qwen). `json`: the
whole answer is an object or a list of them, after `<|python_tag|>` (Llama 3), `[TOOL_CALLS]` (Mistral) or nothing,
since both marks are special tokens, which an answer's text is without."""

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MARKS: Final = ("<|python_tag|>", "[TOOL_CALLS]")
_SPACE: Final = " \t\r\n"


class ToolCall(NamedTuple):
    """A complete call."""

    name: str
    arguments: str
    """A JSON object."""


Part = str | ToolCall


class ToolParser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Part]:
        """What is certain after the next piece of text."""
        ...

    def finish(self) -> list[Part]:
        """The rest, at the end of the answer."""
        ...


def format_of(template_source: str) -> ToolFormat:
    """The format that a chat template asks its model for."""
    if _OPEN not in template_source and any(mark in template_source for mark in (*_MARKS, '"parameters"')):
        return "json"
    return "hermes"


def tool_parser(tool_format: ToolFormat, names: Collection[str]) -> ToolParser:
    """A parser for one answer to a request that offers tools of these names."""
    return _HermesParser(names) if tool_format == "hermes" else _JsonParser(names)


class _HermesParser(ToolParser):
    """Calls between tags."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._inside = False
        self._pieces: list[str] = []
        """Of the call that is read, but for `_tail`."""
        self._tail = ""
        """Shorter than a tag, and may begin one."""
        self._after_call = False
        """Whether only white space came since the last call, which is text only if other text follows."""
        self._space: list[str] = []

    @override
    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text = self._tail + text
        start = 0
        while True:
            tag = _CLOSE if self._inside else _OPEN
            found = text.find(tag, start)
            if found < 0:
                break
            self._take(text[start:found], parts)
            if self._inside:
                self._end_call(parts, _CLOSE)
            self._inside = not self._inside
            start = found + len(tag)
        cut = max(start, len(text) - _overlap(text[start:], tag))
        self._take(text[start:cut], parts)
        self._tail = text[cut:]
        return _joined(parts)

    @override
    def finish(self) -> list[Part]:
        parts: list[Part] = []
        self._take(self._tail, parts)
        self._tail = ""
        if self._inside:
            self._end_call(parts, "")
            self._inside = False
        return _joined(parts)

    def _take(self, text: str, parts: list[Part]) -> None:
        if self._inside:
            self._pieces.append(text)
        elif self._after_call and not text.strip(_SPACE):
            self._space.append(text)
        else:
            self._give(text, parts)

    def _give(self, part: Part, parts: list[Part]) -> None:
        if isinstance(part, str):
            parts.extend(self._space)
        self._space.clear()
        self._after_call = isinstance(part, ToolCall)
        parts.append(part)

    def _end_call(self, parts: list[Part], close: str) -> None:
        body = "".join(self._pieces)
        self._pieces.clear()
        call = _call_of(_loaded(body), self._names)
        self._give(_OPEN + body + close if call is None else call, parts)


class _JsonParser(ToolParser):
    """Answers that are calls and nothing else: the first characters tell whether one can be."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: list[str] = []
        self._start = ""
        """The first characters but for white space, as far as they are needed to decide."""
        self._is_text = False

    @override
    def feed(self, text: str) -> list[Part]:
        if self._is_text:
            return [text] if text else []
        self._held.append(text)
        needed = max(map(len, _MARKS)) - len(self._start)
        if needed > 0:
            self._start += (text if self._start else text.lstrip(_SPACE))[:needed]
        if not self._start or self._start[0] in "{[" or any(mark.startswith(self._start) for mark in _MARKS):
            return []
        if self._start.startswith(_MARKS):
            return []
        self._is_text = True
        return self._flush()

    @override
    def finish(self) -> list[Part]:
        body = "".join(self._held).strip(_SPACE)
        for mark in _MARKS:
            body = body.removeprefix(mark)
        calls = [] if self._is_text else self._calls(_loaded(body))
        if calls:
            self._held.clear()
            return list(calls)
        return self._flush()

    def _calls(self, value: Any) -> list[ToolCall]:
        calls = [_call_of(item, self._names) for item in (value if isinstance(value, list) else [value])]
        return [call for call in calls if call is not None] if None not in calls else []

    def _flush(self) -> list[Part]:
        text = "".join(self._held)
        self._held.clear()
        return [text] if text else []


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _joined(parts: list[Part]) -> list[Part]:
    """Without empty texts, and neighbouring texts as one."""
    joined: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if text := "".join(texts):
            joined.append(text)
        texts.clear()
        joined.append(part)
    if text := "".join(texts):
        joined.append(text)
    return joined


def _loaded(body: str) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _call_of(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], msgspec.json.encode(arguments).decode())
