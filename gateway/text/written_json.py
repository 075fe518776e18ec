"""JSON of calls whose numbers keep the digits that they are written with. Pure.

A double has 15 to 17 of them: an argument that went through one would be another number for the function that is
called, and `1e400` none at all. `unescaped` gives the strings of a JSON text without its escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import total_ordering
from numbers import Number
from typing import Any, Final

import msgspec

_SIGN: Final = "#"
"""Around numbers in JSON that is being made, more often in a row than it stands anywhere else."""


@Number.register
@total_ordering
class WrittenNumber:
    """A number that a `float` would write otherwise; a template sees a number.

    Args:
        text: a number of JSON.
    """

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def __float__(self) -> float:
        return float(self.text)

    def __hash__(self) -> int:
        return hash(float(self.text))

    def __eq__(self, other: object) -> bool:
        return float(self) == (float(other) if isinstance(other, WrittenNumber) else other)

    def __lt__(self, other: Any) -> bool:
        return float(self) < float(other)


def read_json(text: str) -> Any:
    """The value; its decimals are `float`, or `WrittenNumber` where one would write them otherwise. Raises
    `msgspec.DecodeError`, `UnicodeError` or `RecursionError`, also for integers of more digits than Python reads."""
    return _DECODER.decode(text)


def write_json(value: Any, **options: Any) -> str:
    """As `json.dumps`, of a value that `read_json` may have read."""
    numbers: list[str] = []
    text = json.dumps(value, default=lambda number: numbers.append(_text(number)), **options)
    if not numbers:
        return text
    mark = _SIGN * (1 + max(map(len, re.findall(f"{_SIGN}+", text)), default=0))
    text = json.dumps(value, default=lambda number: f"{mark}{_text(number)}{mark}", **options)
    return re.sub(f'"{mark}([^"{_SIGN}]+){mark}"', r"\1", text)


def compact(value: Any) -> str:
    """The JSON of a value that `read_json` may have read, without white space and without escapes that it can do
    without."""
    return msgspec.json.encode(value, enc_hook=_raw).decode()


def _number(text: str) -> float | WrittenNumber:
    value = float(text)
    return value if repr(value) == text else WrittenNumber(text)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_text(value).encode())


def _text(value: Any) -> str:
    if isinstance(value, WrittenNumber):
        return value.text
    raise TypeError(f"{type(value).__name__} is no value of JSON")


_DECODER: Final = msgspec.json.Decoder(float_hook=_number)


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
