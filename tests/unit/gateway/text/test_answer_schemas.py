"""Schemas of answers: white space has a bound, and objects have the properties that their schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from disagg.gateway.text.answer_schemas import bound_schema, close_schema
from disagg.proto.grammars import new_matcher

PART = {"type": "object", "properties": {"b": {"type": "integer"}}}
SHUT = {**PART, "additionalProperties": False}
OPEN = {**PART, "additionalProperties": True}
ZEROS = {"type": "array", "items": {"enum": [0]}, "minItems": 3, "maxItems": 3}


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def is_answer(vocabulary: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    grammar = {"grammars": [{"json_schema": bound_schema(schema)}]}
    matcher: LLMatcher = new_matcher(vocabulary, json.dumps(grammar))
    tokens = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (ZEROS, "[0, 0, 0]", True),
        (ZEROS, "[\n0, 0, 0]", False),
        (ZEROS, "[0,0,0]", False),
        ({**ZEROS, "x-guidance": {"whitespace_flexible": True}}, "[\n\n0,0,0]", True),
        ({"type": "object"}, '{"a": [1, {"b": 2}], "c": {}}', True),
        ({"type": "object"}, '{\n"a": 1}', False),
        (PART, '{"b": 1}', True),
        (PART, '{"b": 1, "c": 1}', False),
        (OPEN, '{"b": 1, "c": 1}', True),
        ({"anyOf": [PART, {"type": "null"}]}, "null", True),
        ({"anyOf": [PART, {"type": "null"}]}, '{"b": 1, "c": 1}', False),
        ({"allOf": [PART, {"properties": {"c": {"type": "integer"}}}]}, '{"b": 1, "c": 1}', True),
        ({"$ref": "#/$defs/d", "$defs": {"d": PART}}, '{"b": 1, "c": 1}', False),
    ],
)
def test_what_an_answer_may_be(vocabulary: LLTokenizer, schema: dict[str, Any], text: str, expected: bool) -> None:
    assert is_answer(vocabulary, schema, text) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PART, SHUT),
        (OPEN, OPEN),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}, "patternProperties": {"^x": PART}}, {"properties": {}, "patternProperties": {"^x": SHUT}}),
        ({**PART, "unevaluatedProperties": False}, {**PART, "unevaluatedProperties": False}),
        ({"items": PART, "prefixItems": [PART]}, {"items": SHUT, "prefixItems": [SHUT]}),
        ({"additionalProperties": PART}, {"additionalProperties": SHUT}),
        ({"properties": {"a": OPEN}}, {"properties": {"a": OPEN}, "additionalProperties": False}),
        ({"oneOf": [PART, OPEN], "description": "d"}, {"oneOf": [SHUT, OPEN], "description": "d"}),
        ({"allOf": [PART], "title": "t"}, {"allOf": [SHUT], "title": "t"}),
        ({"not": PART}, {"not": PART}),
        ({"enum": [PART]}, {"enum": [PART]}),
    ],
)
def test_objects_are_closed_where_the_schema_says_nothing(given: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(given)
    assert close_schema(given) == expected
    assert json.dumps(given) == before


@pytest.mark.parametrize(
    "given",
    [
        {"allOf": [PART, {"properties": {"c": {}}}]},
        {"properties": {"c": {}}, "anyOf": [PART, {}]},
        {"properties": {"c": {}}, "$ref": "#/$defs/d", "$defs": {"d": PART}},
        {"properties": {"c": {}}, "required": ["c"], "oneOf": [PART]},
    ],
)
def test_schemas_that_hold_together_stay_open(given: dict[str, Any]) -> None:
    assert close_schema(given) == given


def test_definitions_that_hold_together_with_others_stay_open() -> None:
    together = {"allOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}]}
    given = {
        "properties": {"a": together, "f": {"$ref": "#/$defs/f"}},
        "$defs": {"d": {"properties": {"g": {"$ref": "#/$defs/g"}}}, "e": PART, "f": PART, "g": PART},
    }
    assert close_schema(given) == {
        **given,
        "$defs": {**given["$defs"], "f": SHUT},
        "additionalProperties": False,
    }


def test_a_schema_whose_top_holds_together_with_others_stays_open() -> None:
    given = {"properties": {"a": {"allOf": [{"$ref": "#"}, PART]}}}
    assert close_schema(given) == given
