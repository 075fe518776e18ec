"""JSON schemas as grammars of answers take them: with bounded white space and closed objects. Pure.

A model whose next token may always be white space, or always another property, may never reach the end of its answer.
So white space is what `json.dumps` writes, and an object has the properties that its schema names, unless the schema
says something of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

OPTIONS: Final = "x-guidance"
"""Keyword of the compiler's options, at the top of a schema."""
WHITE_SPACE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OF_WHITE_SPACE: Final = WHITE_SPACE.keys() | {"whitespace_pattern"}
_BRANCHES: Final = frozenset(("anyOf", "oneOf", "allOf"))
_COMBINING: Final = _BRANCHES | {
    "$ref", "$dynamicRef", "not", "if", "then", "else", "dependentSchemas", "propertyNames", "unevaluatedProperties"
}  # fmt: skip
_DEFINITIONS: Final = ("$defs", "definitions")
_OF_OTHERS: Final = frozenset(("additionalProperties", "patternProperties"))
"""Keywords by which a schema says which other properties its object may have."""
_BESIDE_BRANCHES: Final = frozenset(
    ("title", "description", "default", "examples", "$comment", "$schema", "$id", "type", "discriminator", OPTIONS)
)
"""Keywords that name no property and contain no schema."""


def bound_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A client's schema as the grammar of an answer. White space that its own options describe stays as they say."""
    given = schema.get(OPTIONS, {})
    if isinstance(given, dict) and _OF_WHITE_SPACE.isdisjoint(given):
        given = {**WHITE_SPACE, **given}
    return {**close_schema(schema), OPTIONS: given}


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema whose objects have only the properties that it names, where it says nothing of others.

    Schemas that hold together for one object (`allOf` of several, `anyOf` beside `properties`) stay as they are, with
    the definitions that they refer to: each closed for itself, they would contradict each other.
    """
    open_names = _definitions_that_stay_open(schema)
    if open_names is None:
        return schema
    result: dict[str, Any] = {**_closed(schema)}
    for key in _DEFINITIONS:
        if isinstance(given := schema.get(key), dict):
            result[key] = {
                name: one if f"#/{key}/{name}" in open_names else _closed(one) for name, one in given.items()
            }
    return result


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict) or _holds_together(schema):
        return schema
    changed = dict(schema)
    for key in ("properties", "patternProperties"):
        if isinstance(inner := schema.get(key), dict):
            changed[key] = {name: _closed(one) for name, one in inner.items()}
    for key in ("items", "additionalProperties"):
        if key in schema:
            changed[key] = _closed(schema[key])
    for key in ("prefixItems", *_BRANCHES):
        if isinstance(listed := schema.get(key), list):
            changed[key] = [_closed(one) for one in listed]
    if isinstance(schema.get("properties"), dict) and _OF_OTHERS.isdisjoint(schema):
        changed["additionalProperties"] = False
    return changed


def _holds_together(schema: dict[str, Any]) -> bool:
    """Whether several schemas in `schema` describe the same object."""
    combining = [key for key in schema if key in _COMBINING]
    if not combining:
        return False
    key = combining[0]
    others = schema.keys() - _BESIDE_BRANCHES - {key, *_DEFINITIONS}
    is_one = key in ("anyOf", "oneOf", "$ref") or (key == "allOf" and _is_single(schema[key]))
    return bool(others) or not is_one


def _is_single(branches: Any) -> bool:
    return isinstance(branches, list) and len(branches) == 1


def _definitions_that_stay_open(schema: dict[str, Any]) -> frozenset[str] | None:
    """Pointers to the definitions at the top of `schema` that hold together with others; None where something else of
    the schema does, such as its top."""
    definitions = {
        f"#/{key}/{name}": one
        for key in _DEFINITIONS
        if isinstance(given := schema.get(key), dict)
        for name, one in given.items()
    }
    top = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    waiting = [pointer for one in (top, *definitions.values()) for pointer in _held_references(one)]
    found: set[str] = set()
    while waiting:
        pointer = waiting.pop()
        if pointer in found:
            continue
        if pointer not in definitions:
            return None
        found.add(pointer)
        waiting += _references(definitions[pointer])
    return frozenset(found)


def _held_references(value: Any) -> Iterator[str]:
    """References in schemas that hold together with others."""
    if isinstance(value, dict):
        if _holds_together(value):
            yield from _references(value)
            return
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _held_references(each)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                yield each
            else:
                yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)
