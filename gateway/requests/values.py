"""Checks of single values, of whatever size and content a client may have written. Pure.

Numbers come from protobuf, where they are bounded, and from JSON, where an integer may have a million digits and a text
may have half of a surrogate pair. Nothing here computes with a number before it is known to be in range.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from disagg.proto.errors import InvalidRequestError

_MAX_SHOWN_BITS = 64
_MAX_SHOWN_CHARS = 64


class FloatRange(NamedTuple):
    """`low` to `high`, both allowed unless `low_is_open`. NaN is in no range."""

    low: float
    high: float
    low_is_open: bool = False

    def __contains__(self, value: object) -> bool:
        assert isinstance(value, int | float)
        return (self.low < value if self.low_is_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.low_is_open else '['}{self.low:g}, {self.high:g}]"


def as_float32(value: float) -> float:
    """The nearest 32-bit float. Raises `OverflowError` where there is none."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def check_float(value: float, field: str, allowed: FloatRange) -> float:
    """`value` as the nearest 32-bit float, which is what gRPC carries: both protocols sample alike. Raises
    `InvalidRequestError` naming `field`, also where only the nearest 32-bit float is out of range."""
    if value in allowed and (rounded := as_float32(value)) in allowed:
        return rounded
    raise InvalidRequestError(field, f"must be in {allowed}, not {shown(value)}")


def as_floats32(values: Sequence[float], allowed: FloatRange) -> tuple[float, ...] | None:
    """The nearest 32-bit floats, all at once; `None` where `check_float` refuses one of them."""
    try:
        rounded: tuple[float, ...] = struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))
    except (OverflowError, struct.error):  # a number that is too large
        return None
    if math.isnan(sum(rounded)):
        return None
    bounds = (min(values), max(values), min(rounded), max(rounded)) if rounded else ()
    return rounded if all(value in allowed for value in bounds) else None


def check_int(value: int, field: str, low: int, high: int) -> int:
    """`value` if it is in [low, high]. Raises `InvalidRequestError` naming `field`."""
    if not low <= value <= high:
        raise InvalidRequestError(field, f"must be in [{low}, {high}], not {shown(value)}")
    return value


def check_length(length: int, field: str, limit: int, what: str = "") -> None:
    """Raises `InvalidRequestError` naming `field` if it has more than `limit` entries. `what` is the noun of the
    message."""
    if length > limit:
        raise InvalidRequestError(field, f"at most {limit}{what and ' '}{what}, not {length}")


def check_ids(token_ids: Sequence[int], field: str, vocab_size: int) -> tuple[int, ...]:
    """Ids below `vocab_size`. Raises `InvalidRequestError` naming the first wrong one, as `field[i]`."""
    ids = tuple(token_ids)
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequestError(
            f"{field}[{i}]", f"must be at least 0 and below the vocabulary size {vocab_size}, not {shown(ids[i])}"
        )
    return ids


def check_unicode(text: str, field: str) -> int:
    """The size of `text` in bytes of UTF-8. Raises `InvalidRequestError` naming `field` for a lone surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, f"is not Unicode: character {error.start} is a lone surrogate") from None


def shown(value: float | str) -> str:
    """A client's wrong value, as an error may repeat it: short, and without failing."""
    if isinstance(value, str):
        return repr(value[:_MAX_SHOWN_CHARS])
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, int) else f"{value:g}"


def is_deeper(value: Any, most: int) -> bool:
    """Whether objects and arrays of a decoded JSON value are in each other more than `most` deep. Goes level by level:
    clients may send hundreds of thousands of values."""
    level = [value] if isinstance(value, dict | list) else []
    while level and most > 0:
        most -= 1
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, (dict, list))
        ]
    return bool(level)
