"""The grammar of an answer that must be tool calls: what a model writes in its format, with arguments by their schemas.

A model's text is what `tool_calls` reads: whatever this grammar allows is, once complete, calls and nothing else.
Arguments are by `answer_schemas`: their white space is what templates show calls with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from disagg.gateway.text.answer_schemas import OPTIONS, WHITE_SPACE, close_schema
from disagg.gateway.text.tool_calls import ToolFormat

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
