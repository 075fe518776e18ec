"""How many combinations a schema has, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.gateway.requests.alternatives import MAX_COMBINATIONS, AlternativesError, check_alternatives


def any_of(count: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "string", "maxLength": i} for i in range(count)]}


def optional(depth: int) -> dict[str, Any]:
    """As pydantic writes a tree of `Optional` fields."""
    below = {"type": "object", "properties": {"a": optional(depth - 1)}} if depth else {"type": "integer"}
    return {"anyOf": [below, {"type": "null"}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [any_of(8), any_of(8)]},
        any_of(MAX_COMBINATIONS + 1),
        {"properties": {f"p{i}": any_of(9) for i in range(9)}},
        optional(20),
        {"$defs": {"tree": {"anyOf": [{"items": {"$ref": "#/$defs/tree"}}, {"type": "null"}]}}, "$ref": "#/$defs/tree"},
        {"$ref": "#/nowhere", "const": {"allOf": [any_of(99), any_of(99)]}},
        {"allOf": 5, "anyOf": None, "oneOf": [5], "items": True},
    ],
)
def test_what_adds_up_is_taken(schema: Any) -> None:
    check_alternatives(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [any_of(8), any_of(9)]},
        {"anyOf": any_of(16)["anyOf"], "oneOf": any_of(17)["anyOf"]},
        {"allOf": [{"properties": {"a": any_of(16)}}, {"properties": {"a": any_of(17)}}]},
        {"$defs": {"a/b": any_of(17)}, "allOf": [{"$ref": "#/$defs/a~1b"}, any_of(16)]},
        {"items": {"allOf": [{"allOf": [any_of(7), any_of(7)]}, any_of(7)]}},
        {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(70)}, "$ref": "#/$defs/d0"},
    ],
)
def test_what_multiplies_is_refused(schema: Any) -> None:
    with pytest.raises(AlternativesError, match=r"^at most \d+ "):
        check_alternatives(schema)
