"""Structured output at the gateway: what becomes a grammar, and what is refused before and by the compiler."""

from __future__ import annotations

import json

import pytest

from disagg.gateway.requests.request import GenerationInput
from disagg.gateway.requests.structured import MAX_SCHEMA_DEPTH, StructuredOutput, check_structured
from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import MAX_GRAMMAR_BYTES

WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(wanted: StructuredOutput | None, **others: object) -> str:
    return check_structured(GenerationInput(model="m", prompt=None, structured=wanted, **others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json_object", "", {"json_schema": {"type": "object", "x-guidance": WHITE_SPACE}}),
        ("json_schema", '{"type": "integer"}', {"json_schema": {"type": "integer", "x-guidance": WHITE_SPACE}}),
        (
            "json_schema",
            '{"properties": {"a": {}}}',
            {"json_schema": {"properties": {"a": {}}, "additionalProperties": False, "x-guidance": WHITE_SPACE}},
        ),
        ("regex", "a/b\\/c\n", {"lark_grammar": "start: /a\\/b\\/c\\n/"}),
        ("choice", '["yes", "\\"no\\""]', {"lark_grammar": 'start: "yes" | "\\"no\\""'}),
        ("grammar", "start: /a/", {"lark_grammar": "start: /a/"}),
    ],
)
def test_each_kind_becomes_one_grammar(kind: str, text: str, expected: object) -> None:
    wanted = StructuredOutput(kind, text)  # type: ignore[arg-type]
    assert json.loads(grammar_of(wanted)) == {"grammars": [expected]}


def test_any_text_has_no_grammar() -> None:
    assert grammar_of(None) == ""


def nested(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "5"),
        ("json_schema", "{"),
        ("json_schema", nested(MAX_SCHEMA_DEPTH)),
        ("regex", ""),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1)),
        ("choice", "[]"),
        ("choice", '["a", ""]'),
    ],
)
def test_what_cannot_be_a_grammar_is_refused_by_name(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(StructuredOutput(kind, text, "f"))  # type: ignore[arg-type]
    assert refused.value.field == "f"


def test_the_deepest_schema_is_taken() -> None:
    assert grammar_of(StructuredOutput("json_schema", nested(MAX_SCHEMA_DEPTH - 1)))


@pytest.mark.parametrize(("others", "field"), [({"min_tokens": 1}, "min_tokens"), ({"ignore_eos": True}, "ignore_eos")])
def test_fields_that_contradict_it_are_refused(others: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        grammar_of(StructuredOutput("json_object"), **others)
    assert refused.value.field == f"stopping.{field}"
