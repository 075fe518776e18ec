"""JSON of calls whose numbers keep the digits that they are written with. Pure.

A double has 15 to 17 of them: an argument that went through one would be another number for the function that is
called, and `1e400` none at all.
"""

from __future__ import annotations

import json
import re
import secrets
from functools import total_ordering
from numbers import Number
from typing import Any, Final

import msgspec

_MARK: Final = secrets.token_hex(16)
"""Around numbers in JSON that is being made. No client knows it."""
_MARKED: Final = re.compile(f'"{_MARK}([^"]*){_MARK}"')


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
    text = json.dumps(value, default=_marked, **options)
    return _MARKED.sub(r"\1", text) if _MARK in text else text


def compact(value: Any) -> str:
    """The JSON of a value that `read_json` may have read, without white space and without escapes that it can do
    without."""
    return msgspec.json.encode(value, enc_hook=_raw).decode()


def _number(text: str) -> float | WrittenNumber:
    value = float(text)
    return value if repr(value) == text else WrittenNumber(text)


def _marked(value: Any) -> str:
    return f"{_MARK}{_text(value)}{_MARK}"


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_text(value).encode())


def _text(value: Any) -> str:
    if isinstance(value, WrittenNumber):
        return value.text
    raise TypeError(f"{type(value).__name__} is no value of JSON")


_DECODER: Final = msgspec.json.Decoder(float_hook=_number)
