"""Tool calls found in text do not depend on how the text was cut."""

import json

import msgspec
import pytest

from disagg.gateway.text.segments import Segment, ToolCall, joined
from disagg.gateway.text.tool_calls import ToolFormat, format_of, tool_parser

Part = str | ToolCall

NAMES = {"add", "now"}
ADD, NOW = ToolCall("add", '{"a":1}'), ToolCall("now", "{}")
HERMES_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

ADDED = HERMES_ADD.replace("\n", "")


def echo(text: str) -> str:
    return "<tool_call>" + json.dumps({"name": "now", "arguments": {"text": text}}) + "</tool_call>"


def echoed(text: str) -> ToolCall:
    return ToolCall("now", msgspec.json.encode({"text": text}).decode())


NUMBERS = '{"x":123456789.123456789123,"y":1.10,"z":1e400,"i":123456789012345678901234567890}'
WRITTEN = ToolCall("add", NUMBERS)
ESCAPED = ToolCall("add", '{"a":"s"}')


CASES: list[tuple[ToolFormat, str, list[Part]]] = [
    ("hermes", "a < b <tool", ["a < b <tool"]),
    ("hermes", f"so {HERMES_ADD}.", ["so ", ADD, "."]),
    ("hermes", HERMES_ADD + '<tool_call>{"name":"now"}</tool_call>', [ADD, NOW]),
    ("hermes", HERMES_ADD + "\n" + HERMES_ADD + "\n", [ADD, ADD]),
    ("hermes", HERMES_ADD + "\n so", [ADD, "\n so"]),
    ("hermes", HERMES_ADD + "\n<tool_call>{</tool_call> ", [ADD, "\n<tool_call>{</tool_call> "]),
    ("hermes", '<tool_call>{"name":"now"}', [NOW]),
    ("hermes", "<tool_call>{</tool_call>!", ["<tool_call>{</tool_call>!"]),
    ("hermes", '<tool_call>{"name":"no"}</tool_call>', ['<tool_call>{"name":"no"}</tool_call>']),
    ("hermes", '<tool_call>{"name":["add"]}</tool_call>', ['<tool_call>{"name":["add"]}</tool_call>']),
    ("hermes", "<<tool_call>" + '{"name":"now","arguments":[]}', ['<<tool_call>{"name":"now","arguments":[]}']),
    ("hermes", "<tool_call></tool_cal", ["<tool_call></tool_cal"]),
    ("hermes", "a" + echo("x</tool_call>y") + "b", ["a", echoed("x</tool_call>y"), "b"]),
    ("hermes", echo('\\"</tool_call>') + ADDED, [echoed('\\"</tool_call>'), ADD]),
    ("hermes", echo(echo("")), [echoed(echo(""))]),
    ("hermes", '<tool_call>{"name": "a</tool_call>' + ADDED, ['<tool_call>{"name": "a</tool_call>', ADD]),
    ("hermes", '<tool_call>{"name": "a</tool_call>\n' + ADDED, ['<tool_call>{"name": "a</tool_call>\n', ADD]),
    ("hermes", "<tool_call> is a tag; " + ADDED, ["<tool_call> is a tag; ", ADD]),
    ("hermes", f'<tool_call>{{"name":"add","arguments":{NUMBERS.replace(",", ", ")}}}</tool_call>', [WRITTEN]),
    ("json", f'{{"name":"add","parameters":{NUMBERS}}}', [WRITTEN]),
    ("json", f' [{{"name":"add","arguments":{NUMBERS}}}]', [WRITTEN]),
    ("hermes", '<tool_call>{"name":"add","arguments":{"a": "\\u0073"}}', [ESCAPED]),
    ("hermes", '{"name":"add","arguments":{"a":"\\ud800"}}', ['{"name":"add","arguments":{"a":"\\ud800"}}']),
    ("hermes", "<tool_call>{}}</tool_call>" + ADDED, ["<tool_call>{}}</tool_call>", ADD]),
    ("json", ' {"name": "add", "parameters": {"a": 1}}', [ADD]),
    ("json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', [ADD]),
    ("json", '[TOOL_CALLS] [{"name":"add","arguments":{"a":1}},{"name":"now","arguments":{}}]', [ADD, NOW]),
    ("json", '{"name":"add","parameters":{"a":1}}; {"name":"now"}', [ADD, NOW]),
    ("json", '<|python_tag|>{"name":"add","parameters":{"a":1}}\n{"name":"now"} ;', [ADD, NOW]),
    ("json", '{"name":"now","parameters":{"text":"}; {"}}{"name":"now"}', [echoed("}; {"), NOW]),
    ("json", '{"name":"now"};; {"name":"now"}', ['{"name":"now"};; {"name":"now"}']),
    ("json", '{"name":"now"}; {"name":"no"}', ['{"name":"now"}; {"name":"no"}']),
    ("json", '{"name":"now"}; so', ['{"name":"now"}; so']),
    ("json", '{"name":"now"}; {"name":', ['{"name":"now"}; {"name":']),
    ("json", '[{"name":"now"},{"name":"no"}]', ['[{"name":"now"},{"name":"no"}]']),
    ("json", '{"answer": 3}', ['{"answer": 3}']),
    ("json", " <|pyth", [" <|pyth"]),
    ("json", "<|other {", ["<|other {"]),
    ("json", "[]", ["[]"]),
]


def shown(segments: list[Segment]) -> list[Part]:
    return [one.call or one.text for one in joined(segments) if one.channel != "none"]


def parsed(tool_format: ToolFormat, pieces: list[str]) -> list[Part]:
    parser = tool_parser(tool_format, NAMES)
    segments = [one for piece in pieces for one in parser.feed(piece)] + parser.finish()
    assert "".join(one.text for one in segments) == "".join(pieces)
    return shown(segments)


@pytest.mark.parametrize(("tool_format", "text", "expected"), CASES)
def test_every_split_gives_the_same(tool_format: ToolFormat, text: str, expected: list[Part]) -> None:
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert parsed(tool_format, [text[:i], text[i:j], text[j:]]) == expected
    assert parsed(tool_format, list(text)) == expected


def test_text_that_cannot_be_a_call_comes_at_once() -> None:
    parser = tool_parser("hermes", NAMES)
    assert shown(parser.feed("a<tool")) == ["a"]
    assert shown(parser.feed("s>b")) == ["<tools>b"]
    assert shown(parser.feed("<tool_call>x")) == ["<tool_call>x"]
    parser = tool_parser("json", NAMES)
    assert parser.feed(" ") == []
    assert parser.feed("<|p") == []
    assert shown(parser.feed("x")) == [" <|px"]
    assert shown(parser.feed("{")) == ["{"]


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "<tool_call", "<tool_call>{</tool_call>", '<tool_call>{"</tool_call>', "</tool_call><tool_call>{"],
)
def test_a_flood_of_tags_is_given_back_as_it_came(text: str) -> None:
    flood = text * ((2 << 20) // len(text))
    pieces = [flood[i : i + 4096] for i in range(0, len(flood), 4096)]
    assert parsed("hermes", pieces) == [flood]


def test_a_flood_of_calls_is_read_once() -> None:
    flood = '{"name":"now"};' * 20_000
    assert parsed("json", [flood]) == [NOW] * 20_000


def test_the_template_tells_the_format() -> None:
    assert format_of("<tool_call>{{ x }}") == "hermes"
    assert (
        format_of("[TOOL_CALLS]") == format_of("<|python_tag|>") == format_of('{"name": n, "parameters": p}') == "json"
    )
    assert format_of("{{ messages }}") == "hermes"
