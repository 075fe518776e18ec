"""Numbers of JSON schemas that the compiler of grammars would change. Pure.

It keeps numbers as 64-bit floating point, so an answer by `{"enum": [9007199254740993]}` would be ...992. Its reader of
numbers rounds correctly where an integer of 53 bits is multiplied or divided by a power of ten that is exact, too (W.
Clinger, "How to read floating point numbers accurately", 1990); it writes a double by its shortest decimals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from disagg.proto.errors import InvalidRequestError

_SAFE_CHARS: Final = 15
_MAX_INTEGER: Final = 2**53
_MAX_EXPONENT: Final = 22
_SHOWN_CHARS: Final = 40
_NOTES: Final = frozenset(("default", "examples", "title", "description", "$comment"))
"""Keywords whose value never occurs in an answer."""
_DATA: Final = frozenset(("enum", "const"))
_BY_NAME: Final = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
"""Keywords whose value maps names to schemas; a name may be equal to a keyword."""
_EMBEDDED: Final = re.compile(r"%json\s*(?=\{)")


class _Inexact:
    """Stands for a number in the decoded JSON."""

    def __init__(self, text: str) -> None:
        self.text = text


def check_numbers(text: str, field: str) -> None:
    """Raises `InvalidRequestError` naming the place in `field` of a number that would be changed.

    Args:
        text: a JSON schema that was decoded before, so that its depth is bounded.
    """
    for place, number in _inexact(_DECODER.decode(text), "", is_schema=True):
        raise InvalidRequestError(f"{field}{place}", _why(number))


def check_embedded_numbers(grammar: str, field: str) -> None:
    """Check the JSON schemas in a Lark grammar (`%json {...}`) as `check_numbers` does; errors name `field`."""
    for found in _EMBEDDED.finditer(grammar):
        try:
            schema, _ = _DECODER.raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # the compiler says so
            continue
        for _, number in _inexact(schema, "", is_schema=True):
            raise InvalidRequestError(field, f"%json: {_why(number)}")


def _why(number: _Inexact) -> str:
    text = number.text if len(number.text) <= _SHOWN_CHARS else f"{number.text[:_SHOWN_CHARS]}..."
    return f"{text} cannot be kept exactly, as integers up to 2**53 and decimals of up to 15 digits can"


def _number(text: str) -> Any:
    """The number if the compiler would change it; None if it is exact."""
    if len(text) <= _SAFE_CHARS and "e" not in text and "E" not in text:
        return None
    try:
        _, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation:  # an exponent beyond what decimals have
        return _Inexact(text)
    assert isinstance(exponent, int)
    kept = "".join(map(str, digits)).rstrip("0")
    exponent += len(digits) - len(kept)
    is_exact = len(kept) <= _SAFE_CHARS + 1 and int(kept or "0") <= _MAX_INTEGER and abs(exponent) <= _MAX_EXPONENT
    if not kept or (is_exact and Decimal(repr(float(text))) == Decimal(text)):
        return None
    return _Inexact(text)


_DECODER: Final = json.JSONDecoder(parse_float=_number, parse_int=_number)


def _inexact(value: Any, place: str, *, is_schema: bool) -> Iterator[tuple[str, _Inexact]]:
    if isinstance(value, _Inexact):
        yield place, value
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _inexact(each, f"{place}[{i}]", is_schema=is_schema)
    elif isinstance(value, dict):
        for key, each in value.items():
            if is_schema and key in _NOTES:
                continue
            if is_schema and key in _BY_NAME and isinstance(each, dict):
                for name, schema in each.items():
                    yield from _inexact(schema, f"{place}.{key}.{name}", is_schema=True)
            else:
                yield from _inexact(each, f"{place}.{key}", is_schema=is_schema and key not in _DATA)
