"""Numbers of schemas are exact in answers, or refused with their place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.gateway.requests.exact_numbers import check_embedded_numbers, check_numbers
from disagg.gateway.text.tokenizer import ServedModel
from disagg.proto.errors import InvalidRequestError
from disagg.proto.grammars import new_matcher
from tests.support.gateway import grammar_vocabulary

EXACT = (
    *("0", "-1", "9007199254740992", "-9007199254740992", "90071992547409000000", "123456789012345", "0e99", "-0.0"),
    *("0.1", "1.5", "1e22", "1E+2", "100000000000000000000.0", "3.141592653589793", "9007199254740991e-22", "1e-7"),
    "1.50000000000000000000000000000000000000000000000000",
)
CHANGED = (
    *("9007199254740993", "-9007199254740993", "9223372036854775807", "9223372036854775808", "1" * 400, "1e400"),
    *("0.1000000000000000055511151231257827", "3.14159265358979323846", "1e-400", "1e999999999999", "-1e400"),
    *("123456789012345680000", "90071992547409910000", "0.30000000000000004", "3e300", "1e99999999999999999999"),
)


@pytest.mark.parametrize("number", EXACT)
def test_what_is_kept_exactly_is_taken(number: str) -> None:
    check_numbers(f'{{"enum": [{number}], "minimum": {number}}}', "schema")


@pytest.mark.parametrize("number", CHANGED)
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ('{"enum": [1, %s]}', "schema.enum[1]"),
        ('{"const": {"default": [%s]}}', "schema.const.default[0]"),
        ('{"properties": {"default": {"minimum": %s}}}', "schema.properties.default.minimum"),
        ('{"anyOf": [{}, {"items": {"multipleOf": %s}}]}', "schema.anyOf[1].items.multipleOf"),
        ('{"$defs": {"a": {"const": %s}}, "$ref": "#/$defs/a"}', "schema.$defs.a.const"),
    ],
)
def test_what_is_not_is_refused_with_its_place(schema: str, place: str, number: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_numbers(schema % number, "schema")
    assert refused.value.field == place
    assert number[:40] in refused.value.message
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("number", CHANGED)
def test_what_is_in_no_answer_may_be_anything(number: str) -> None:
    check_numbers(f'{{"default": {number}, "examples": [{number}], "type": "integer"}}', "schema")


def test_schemas_within_a_grammar_are_looked_at_and_what_is_beside_them_is_not() -> None:
    digits = "9007199254740993"
    check_embedded_numbers(f'start: /{digits}/ "{digits}" a\na: %json {{"enum": [1.5]}} /{digits}/', "grammar")
    check_embedded_numbers("start: %json {", "grammar")
    check_embedded_numbers("start: %json " + '{"a":' * 100_000, "grammar")
    with pytest.raises(InvalidRequestError, match=r"^grammar: %json: 9007199254740993 cannot be kept"):
        check_embedded_numbers(f'start: %json {{"enum": [1]}} %json\n {{"enum": [{digits}]}}', "grammar")


@pytest.mark.parametrize("number", EXACT)
def test_an_answer_has_the_number(number: str, model: ServedModel) -> None:
    matcher = new_matcher(
        grammar_vocabulary(model), json.dumps({"grammars": [{"json_schema": json.loads(f'{{"enum": [{number}]}}')}]})
    )
    forced = matcher.compute_ff_bytes()
    value: Any = json.loads(forced)
    assert value == json.loads(number)
