"""How many parts a client's message has, counted in its bytes before anything is built from them. Pure.

A parser makes an object for each part, and holds the interpreter while it does: two million empty messages fit into
four megabytes and cost seconds. Counting is linear, builds nothing, and stops at the limit. Both counters are
generators that yield after about a millisecond of work, so that others can go on in between (`run_cooperatively`).

Messages up to `SMALL_BYTES` need no counting: whatever they hold is parsed within a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from disagg.proto.errors import InvalidRequestError

SMALL_BYTES: Final = 16 << 10
MAX_FIELDS: Final = 16_384
"""Maximum number of fields of a protobuf message, nested ones included. A conversation of 4,096 turns has 12,289."""
MAX_JSON_PARTS: Final = 32_768
"""Maximum number of strings (keys included), lists and objects of a JSON body. A conversation of 4,096 turns has about
20,500."""
_FIELDS_A_PIECE: Final = 1024
_SEARCHED_A_PIECE: Final = 256
"""Number of fields that are searched for broken text in one piece; this takes longer than counting them."""
TURNS_A_PIECE: Final = 512
"""Number of turns of a conversation that are read in one piece of work."""
_STRINGS_A_PIECE: Final = 512
_BYTES_A_PIECE: Final = 64 << 10

_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH_DELIMITED: Final = 2
_FIXED32: Final = 5
_MAX_VARINT_BYTES: Final = 10
_NOT_LAST: Final = bytes(range(0x80, 0x100))
"""All byte values that a varint may have before its last byte."""
_VARINT_TYPES: Final = (
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_ENUM,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
)

T = TypeVar("T")
Cooperative = Generator[None, None, T]
"""Work that yields between its pieces."""


class _BrokenWireError(Exception):
    """The bytes are no protobuf, or have groups, which our messages do not have."""


def count_fields(raw: bytes, kind: Descriptor, max_numbers: int) -> Cooperative[None]:
    """Raises `InvalidRequestError` if `raw`, a message of `kind`, has more than `MAX_FIELDS` fields, or groups, or a
    field of more than `max_numbers` packed numbers."""
    num_fields = 0
    todo = [(0, len(raw), kind)]
    while todo:
        begin, end, kind = todo.pop()
        inner = _inner_kinds(kind)
        try:
            for number, wire_type, start, stop in _fields(raw, begin, end):
                num_fields += 1
                if num_fields > MAX_FIELDS:
                    raise InvalidRequestError("request", f"has more than {MAX_FIELDS} fields")
                if num_fields % _FIELDS_A_PIECE == 0:
                    yield
                if wire_type == _LENGTH_DELIMITED and start < stop and (message := inner.get(number)) is not None:
                    todo.append((start, stop, message))
                elif wire_type == _LENGTH_DELIMITED and stop - start > max_numbers and number in _packed(kind):
                    yield from _count_numbers(raw, start, stop, max_numbers)
        except _BrokenWireError:
            raise InvalidRequestError("request", "is no protobuf message, or has groups") from None


def _count_numbers(raw: bytes, start: int, stop: int, max_numbers: int) -> Cooperative[None]:
    """Raises `InvalidRequestError` if there are more than `max_numbers` varints in raw[start:stop]."""
    num_numbers = 0
    for begin in range(start, stop, _BYTES_A_PIECE):
        num_numbers += len(raw[begin : min(stop, begin + _BYTES_A_PIECE)].translate(None, _NOT_LAST))
        if num_numbers > max_numbers:
            raise InvalidRequestError("request", f"has more than {max_numbers} numbers in one field")
        yield


def find_broken_text(raw: bytes, kind: Descriptor) -> Cooperative[str | None]:
    """The path of the first string in `raw`, a message of `kind`, that is not UTF-8; None where there is none, or the
    message has more than `MAX_FIELDS` fields up to there."""
    return (yield from _find_broken_text(raw, 0, len(raw), kind, [0]))


def _find_broken_text(
    raw: bytes, begin: int, end: int, kind: Descriptor, num_fields: list[int]
) -> Cooperative[str | None]:
    seen: dict[int, int] = {}
    try:
        for number, wire_type, start, stop in _fields(raw, begin, end):
            num_fields[0] += 1
            if num_fields[0] > MAX_FIELDS:
                return None
            if num_fields[0] % _SEARCHED_A_PIECE == 0:
                yield
            field = kind.fields_by_number.get(number)
            if field is None or wire_type != _LENGTH_DELIMITED:
                continue
            path = _path(field, seen.get(number, 0))
            seen[number] = seen.get(number, 0) + 1
            if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(raw[start:stop]):
                return path
            if field.message_type is not None:
                inner = yield from _find_broken_text(raw, start, stop, field.message_type, num_fields)
                if inner is not None:
                    return f"{path}.{inner}"
    except _BrokenWireError:
        return None
    return None


def _fields(raw: bytes, pos: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, wire type and the bytes [start, stop) of each field in raw[pos:end]."""
    while pos < end:
        tag = raw[pos]
        pos += 1
        if tag >= 0x80:
            tag, pos = _varint(raw, pos - 1, end)
        wire_type = tag & 7
        start = pos
        if wire_type == _LENGTH_DELIMITED:
            if pos >= end:
                raise _BrokenWireError
            length = raw[pos]
            pos += 1
            if length >= 0x80:
                length, pos = _varint(raw, pos - 1, end)
            start = pos
            pos += length
        elif wire_type == _VARINT:
            _, pos = _varint(raw, pos, end)
        elif wire_type == _FIXED64:
            pos += 8
        elif wire_type == _FIXED32:
            pos += 4
        else:
            raise _BrokenWireError
        if pos > end:
            raise _BrokenWireError
        yield tag >> 3, wire_type, start, pos


def _varint(raw: bytes, pos: int, end: int) -> tuple[int, int]:
    """The value of a varint, and the position after it."""
    value = 0
    for i in range(_MAX_VARINT_BYTES):
        if pos >= end:
            break
        byte = raw[pos]
        pos += 1
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, pos
    raise _BrokenWireError


@lru_cache(maxsize=64)
def _inner_kinds(kind: Descriptor) -> dict[int, Descriptor]:
    """The messages inside a message, by number of their field."""
    return {field.number: field.message_type for field in kind.fields if field.message_type is not None}


@lru_cache(maxsize=64)
def _packed(kind: Descriptor) -> frozenset[int]:
    """Numbers of the fields that are lists of varints; our messages have no lists of other numbers."""
    return frozenset(field.number for field in kind.fields if field.is_repeated and field.type in _VARINT_TYPES)


def _path(field: FieldDescriptor, index: int) -> str:
    """The field as our errors name it, see `validate`."""
    if field.full_name == "disagg.v1.GenerateRequest.text":
        return "prompt.text"
    return f"{field.name}[{index}]" if field.is_repeated else field.name


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---------------------------------------------------------------- JSON

_IN_STRING: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
"""The rest of a string. Possessive (Python 3.11): no byte is read twice, whatever the string contains."""


def count_json(raw: bytes, max_values: int) -> Cooperative[None]:
    """Raises `InvalidRequestError` if `raw`, a JSON text, has more than `MAX_JSON_PARTS` strings, lists and objects, or
    more than `max_values` values that a comma parts. Does not report invalid JSON: up to where it breaks off it is
    counted, and no parser gets further."""
    num_parts = num_values = num_strings = pos = 0
    while True:
        quote = raw.find(b'"', pos)
        end = len(raw) if quote < 0 else quote
        num_parts += raw.count(b"[", pos, end) + raw.count(b"{", pos, end) + 1
        num_values += raw.count(b",", pos, end)
        if num_parts > MAX_JSON_PARTS:
            raise InvalidRequestError("body", f"has more than {MAX_JSON_PARTS} strings, lists and objects")
        if num_values > max_values:
            raise InvalidRequestError("body", f"has more than {max_values} values")
        if quote < 0:
            return
        num_strings += 1
        if num_strings % _STRINGS_A_PIECE == 0:
            yield
        pos = quote + 1
        while True:
            found = _IN_STRING.match(raw, pos, pos + _BYTES_A_PIECE)
            assert found is not None, "the pattern matches nothing at all, too"
            pos = found.end()
            if pos >= len(raw):
                return
            if raw[pos] == 0x22:  # a quote
                break
            if found.end() == found.start():
                return  # a backslash at the very end
            yield
        pos += 1
