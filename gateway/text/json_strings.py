"""What JSON says to whoever reads it: its strings, without the escapes of the JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from disagg.gateway.text.written_json import read_json

_ESCAPE = "\\"


def unescaped(text: str) -> str:
    """The strings of a JSON text that has escapes, one below the other. Empty where it has none, so that they can be
    read in the text itself, and for what is no JSON."""
    if _ESCAPE not in text:
        return ""
    try:
        value = read_json(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""
    return "\n".join(_strings(value))


def _strings(value: Any) -> Iterator[str]:
    """Keys and values, in their order. As deep as msgspec reads."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            waiting.extend(reversed(one))
        elif isinstance(one, dict):
            for key, inner in reversed(one.items()):
                waiting += (inner, key)
