"""What the grammar of calls allows is what the parser reads as calls; nothing else is allowed."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from disagg.gateway.text.tool_calls import MAX_CALLS, Function, ToolFormat, call_grammar, tool_parser
from disagg.proto.grammars import new_matcher

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"b": {"enum": ["x", "</tool_call>"]}},
}
FUNCTIONS = (Function("add", SCHEMA, True), Function("now", {"properties": {}, "additionalProperties": False}, False))
ADD, NOW = '{"name": "add", "arguments": {"a": 1, "b": "x"}}', '{"name": "now", "arguments": {}}'
BAD_TYPE, BAD_NAME = '{"name": "add", "arguments": {"a": "1"}}', '{"name": "sub", "arguments": {}}'


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def is_answer(vocabulary: LLTokenizer, tool_format: ToolFormat, text: str, single: bool) -> bool:
    grammar = {"grammars": [{"lark_grammar": call_grammar(tool_format, FUNCTIONS, single)}]}
    matcher: LLMatcher = new_matcher(vocabulary, json.dumps(grammar))
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("tool_format", "text", "num_calls"),
    [
        ("hermes", tagged(ADD), 1),
        ("hermes", tagged(ADD, NOW, ADD), 3),
        ("hermes", tagged(*[NOW] * (MAX_CALLS + 1)), 0),
        ("hermes", tagged(BAD_TYPE), 0),
        ("hermes", tagged(BAD_NAME), 0),
        ("hermes", tagged(ADD) + " so", 0),
        ("hermes", ADD, 0),
        ("json", ADD, 1),
        ("json", ADD.replace("arguments", "parameters"), 1),
        ("json", f"[{NOW}]", 1),
        ("json", f"[{ADD}, {NOW}]", 2),
        ("json", "[]", 0),
        ("json", f"[{ADD}, {BAD_NAME}]", 0),
        ("json", "hello", 0),
    ],
)
def test_only_calls_by_their_schemas(
    vocabulary: LLTokenizer, tool_format: ToolFormat, text: str, num_calls: int, single: bool
) -> None:
    assert is_answer(vocabulary, tool_format, text, single) == (num_calls == 1 or (num_calls > 1 and not single))
    if num_calls:
        parser = tool_parser(tool_format, {"add", "now"})
        parts = parser.feed(text) + parser.finish()
        assert [part.channel for part in parts if part.channel != "none"] == ["call"] * num_calls


def test_strict_decides_whether_unsupported_keywords_are_errors(vocabulary: LLTokenizer) -> None:
    schema = {"properties": {"a": {"not": {"type": "string"}}}}
    for strict in (False, True):
        lark = call_grammar("hermes", [Function("f", schema, strict)], True)
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
        if strict:
            with pytest.raises(ValueError, match="not"):
                new_matcher(vocabulary, grammar)
        else:
            new_matcher(vocabulary, grammar)


def test_as_many_tools_as_there_may_be_compile(vocabulary: LLTokenizer) -> None:
    functions = [Function(f"function_{i}", SCHEMA, True) for i in range(80)]
    lark = call_grammar("hermes", functions, False)
    assert 16 << 10 < len(lark) < 32 << 10
    new_matcher(vocabulary, json.dumps({"grammars": [{"lark_grammar": lark}]})).compute_bitmask()


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_have_the_names_of_their_schema_only(vocabulary: LLTokenizer, strict: bool) -> None:
    function = Function("f", {"type": "object", "properties": {"a": {"type": "integer"}}}, strict)
    grammar = {"grammars": [{"lark_grammar": call_grammar("json", [function], single=True)}]}
    for arguments, expected in (('{"a": 1}', True), ('{"a": 1, "b": 2}', False)):
        matcher: LLMatcher = new_matcher(vocabulary, json.dumps(grammar))
        tokens = vocabulary.tokenize_str(f'{{"name": "f", "arguments": {arguments}}}')
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == expected
