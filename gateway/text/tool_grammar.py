"""The grammar of an answer that must be tool calls: what a model writes in its format, with arguments by their schemas.

A model's text is what `tool_calls` reads: whatever this grammar allows is, once complete, calls and nothing else.
White space is what `json.dumps` writes, as templates show calls: a model without a choice cannot get lost in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from disagg.gateway.text.tool_calls import ToolFormat

MAX_CALLS: Final = 128
"""Maximum number of calls in one turn."""
_WHITE_SPACE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


_COMBINING: Final = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "unevaluatedProperties", "propertyNames")
)
_DEFINITIONS: Final = ("$defs", "definitions")


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
        arguments = function.schema if function.strict else close_schema(function.schema)
        schema = {**arguments, "type": "object", "x-guidance": {**_WHITE_SPACE, "lenient": not function.strict}}
        rules.append(f'call_{i}: {begin} key arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {msgspec.json.encode(schema).decode()}")
    return "\n".join(rules)


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema for arguments with names that it has only, where it says nothing of others: a model without a
    choice would go on inventing some. Combined schemas are left as they are: closed, they might contradict each other.
    """
    result: dict[str, Any] = _closed(schema, with_definitions=b'"allOf"' not in msgspec.json.encode(schema))
    return result


def _closed(schema: Any, with_definitions: bool) -> Any:
    if not isinstance(schema, dict) or not _COMBINING.isdisjoint(schema):
        return schema
    changed = dict(schema)
    for key in ("properties", *(_DEFINITIONS if with_definitions else ())):
        if isinstance(inner := schema.get(key), dict):
            changed[key] = {name: _closed(one, with_definitions) for name, one in inner.items()}
    if "items" in schema:
        changed["items"] = _closed(schema["items"], with_definitions)
    if isinstance(schema.get("properties"), dict) and not schema.keys() & {"additionalProperties", "patternProperties"}:
        changed["additionalProperties"] = False
    return changed


def _literal(text: str) -> str:
    return msgspec.json.encode(text).decode()
