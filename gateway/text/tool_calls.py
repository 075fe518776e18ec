"""Tool calls in the text of an answer, found as it comes. Pure state machines: what is found does not depend on how the
text was cut, each character is looked at a bounded number of times, and text that cannot be a call is given on at once.

A call counts only where its name is that of an offered tool and its arguments are an object; anything else is text.
Its arguments are sent as compact JSON, in which numbers keep the digits that the model wrote.

`call_grammar` is the grammar of an answer that must be tool calls: what a model writes in its format, with arguments by
their schemas. Whatever this grammar allows is, once complete, calls and nothing else. Arguments are by
`answer_schemas`: their white space is what templates show calls with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
from typing_extensions import override

from disagg.gateway.text.answer_schemas import OPTIONS, WHITE_SPACE, close_schema
from disagg.gateway.text.json_prefix import JsonPrefix
from disagg.gateway.text.segments import Segment, ToolCall, joined, overlap
from disagg.gateway.text.written_json import compact, read_json

ToolFormat = Literal["hermes", "json"]
"""How a model writes calls. `hermes`: `<tool_call>{...}</tool_call>` anywhere in the text (Hermes, Qwen). `json`: the
whole answer is an object, several with `;` or white space between them, or a list, after `<|python_tag|>` (Llama 3),
`[TOOL_CALLS]` (Mistral) or nothing, since both marks are special tokens, which an answer's text is without."""

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MARKS: Final = ("<|python_tag|>", "[TOOL_CALLS]")
_GAP: Final = re.compile(r"[ \t\r\n]*;?[ \t\r\n]*")
"""What stands between two calls that are no list (Llama 3)."""
_SPACE: Final = " \t\r\n"
_NO_JSON: Final = (msgspec.DecodeError, UnicodeError, RecursionError)


class _Call(msgspec.Struct, frozen=True):
    """A tool call as models write it."""

    name: str
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_CALL: Final = msgspec.json.Decoder(_Call)
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


class ToolParser(Protocol):
    """Reads the tool calls of one answer."""

    def feed(self, text: str) -> list[Segment]:
        """What is certain after the next piece of text."""
        ...

    def finish(self) -> list[Segment]:
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
    """Calls between tags. A close tag inside a string of the call's JSON is a part of that."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._json: JsonPrefix | None = None
        """Reader of the current call; `None` outside of a call."""
        self._body: list[str] = []
        """Text of the current call, except for `_tail`."""
        self._tail = ""
        """Shorter than a tag, and may begin one."""
        self._after_call = False
        """Whether only white space came since the last call, which is text only if other text follows."""
        self._space: list[str] = []

    @override
    def feed(self, text: str) -> list[Segment]:
        return self._read(text, ended=False)

    @override
    def finish(self) -> list[Segment]:
        found = self._read("", ended=True)
        return joined([*found, Segment("none", "".join(self._space))])

    def _read(self, text: str, ended: bool) -> list[Segment]:
        found: list[Segment] = []
        text, self._tail = self._tail + text, ""
        place = 0
        while True:
            if self._json is None:
                tag = text.find(_OPEN, place)
                if tag < 0:
                    end = len(text) if ended else len(text) - overlap(text[place:], _OPEN)
                    self._give_text(text[place:end], found)
                    self._tail = text[end:]
                    return joined(found)
                self._give_text(text[place:tag], found)
                self._json, place = JsonPrefix(), tag + len(_OPEN)
            begin, place = place, self._json.read(text, place)
            rest = text[place : place + len(_CLOSE)]
            if not ended and (not rest or (not self._json.in_string and rest != _CLOSE and _CLOSE.startswith(rest))):
                self._body.append(text[begin:place])
                self._tail = rest
                return joined(found)
            before = "".join(self._body)
            self._body.clear()
            is_closed = rest == _CLOSE and not self._json.in_string
            self._json = None
            body = before + text[begin:place]
            call = _call_of(body, self._names) if is_closed or not rest else None
            if call is not None:
                place += len(_CLOSE) if is_closed else 0
                self._give_call(call, _OPEN + body + (_CLOSE if is_closed else ""), found)
            elif (closed := body.find(_CLOSE)) >= 0:  # it was no string that the tag seemed to be in
                self._give_text(_OPEN + body[: closed + len(_CLOSE)], found)
                if before:
                    text, begin = body + text[place:], 0
                place = begin + closed + len(_CLOSE)
            else:
                self._give_text(_OPEN + body + (_CLOSE if is_closed else ""), found)
                place += len(_CLOSE) if is_closed else 0

    def _give_text(self, text: str, found: list[Segment]) -> None:
        if self._after_call and not text.strip(_SPACE):
            self._space.append(text)
            return
        found.append(Segment("content", "".join(self._space) + text))
        self._space.clear()
        self._after_call = False

    def _give_call(self, call: ToolCall, text: str, found: list[Segment]) -> None:
        found += [Segment("none", "".join(self._space)), Segment("call", text, call)]
        self._space.clear()
        self._after_call = True


class _JsonParser(ToolParser):
    """Answers that are calls and nothing else: the first characters tell whether one can be."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held: list[str] = []
        self._start = ""
        """The first characters but for white space, as far as they are needed to decide."""
        self._is_text = False

    @override
    def feed(self, text: str) -> list[Segment]:
        if self._is_text:
            return [Segment("content", text)] if text else []
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
    def finish(self) -> list[Segment]:
        text = "".join(self._held)
        body = text.strip(_SPACE)
        for mark in _MARKS:
            body = body.removeprefix(mark)
        calls = [] if self._is_text else self._calls(body)
        if calls:
            self._held.clear()
            return [Segment("call", "" if i else text, call) for i, call in enumerate(calls)]
        return self._flush()

    def _calls(self, body: str) -> list[ToolCall]:
        try:
            if body.lstrip(_SPACE).startswith("["):
                items = [bytes(item).decode() for item in _LIST.decode(body)]
            else:
                items = _objects(body)
        except _NO_JSON:
            return []
        calls = [_call_of(item, self._names) for item in items]
        return [call for call in calls if call is not None] if None not in calls else []

    def _flush(self) -> list[Segment]:
        text = "".join(self._held)
        self._held.clear()
        return [Segment("content", text)] if text else []


def _objects(body: str) -> list[str]:
    """The texts of objects one after the other; a part that is none is the last one."""
    items: list[str] = []
    place = 0
    while place < len(body):
        begin, reader = place, JsonPrefix()
        place = reader.read(body, begin)
        items.append(body[begin:place] if reader.is_complete else body[begin:])
        if not reader.is_complete:
            break
        gap = _GAP.match(body, place)
        assert gap is not None
        place = gap.end()
    return items


def _call_of(body: str, names: Collection[str]) -> ToolCall | None:
    try:
        call = _CALL.decode(body)
        if call.name not in names:
            return None
        raw = next((each for each in (call.arguments, call.parameters) if each is not msgspec.UNSET), None)
        arguments = {} if raw is None else read_json(bytes(raw).decode())
        return ToolCall(call.name, compact(arguments)) if isinstance(arguments, dict) else None
    except _NO_JSON:
        return None


MAX_CALLS: Final = 128
"""Maximum number of calls in one turn."""


class Function(NamedTuple):
    """Function that may be called."""

    name: str
    schema: dict[str, Any]
    """JSON schema of its arguments, which are an object."""
    strict: bool
    """Whether keywords of the schema that grammars do not support are an error; else they are ignored."""


def call_grammar(tool_format: ToolFormat, functions: Sequence[Function], single: bool) -> str:
    """A Lark grammar of one call, or of 1 to `MAX_CALLS` calls unless `single`, of these functions."""
    more = MAX_CALLS - 1
    key = _literal('"arguments": ')
    if tool_format == "hermes":
        start = '"<tool_call>\\n" call "\\n</tool_call>"'
        start += "" if single else f' ("\\n<tool_call>\\n" call "\\n</tool_call>"){{0,{more}}}'
    else:
        start = 'call | "[" call ' + ("" if single else f'(", " call){{0,{more}}} ') + '"]"'
        key += " | " + _literal('"parameters": ')
    rules = [f"start: {start}", f"key: {key}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        begin = _literal(f'{{"name": "{function.name}", ')
        options = {**WHITE_SPACE, "lenient": not function.strict}
        schema = {**close_schema(function.schema), "type": "object", OPTIONS: options}
        rules.append(f'call_{i}: {begin} key arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {msgspec.json.encode(schema).decode()}")
    return "\n".join(rules)


def _literal(text: str) -> str:
    return msgspec.json.encode(text).decode()
