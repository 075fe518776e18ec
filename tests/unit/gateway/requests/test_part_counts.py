"""Counting the parts of messages: what is too much is refused before anything is built, in pieces of bounded work."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any, cast

import msgspec
import pytest
from google.protobuf.descriptor import Descriptor

from disagg.gateway.requests.part_counts import MAX_FIELDS, MAX_JSON_PARTS, count_fields, count_json, find_broken_text
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb

GENERATE = cast(Descriptor, pb.GenerateRequest.DESCRIPTOR)
MEBI = 1 << 20
MAX_NUMBERS = 100_000


def drive(work: Generator[None, None, Any]) -> tuple[Any, int]:
    """What it returns, and in how many pieces."""
    pieces = 1
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, pieces
        pieces += 1


def chat_of(inner: bytes) -> bytes:
    """A `GenerateRequest` whose chat has these bytes."""
    length = len(inner)
    varint = bytearray()
    while length >= 0x80:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    varint.append(length)
    return b"\x22" + bytes(varint) + inner


@pytest.mark.parametrize(
    "raw",
    [
        chat_of(b"\x0a\x00" * (2 * MEBI)),  # 2.1 million empty messages
        chat_of(b"\x0a\x02\x0a\x00" * MEBI),
        b"\x0a\x00" * (2 * MEBI),  # the model's name again and again
        b"\xf8\x07\x01" * MEBI,  # a field that is not known
        b"\x2a\x06\x4a\x04\x08\x01\x10\x01" * (MEBI // 2),
    ],
    ids=["empty turns", "turns", "one field again", "unknown fields", "maps"],
)
def test_messages_of_many_fields_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"has more than {MAX_FIELDS} fields"):
        drive(count_fields(raw, GENERATE, MAX_NUMBERS))


@pytest.mark.parametrize("raw", [b"\x0b\x0c", b"\x0f", b"\x0a\x7f", b"\x08" + b"\xff" * 11, b"\x0a"])
def test_what_no_message_of_ours_has_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="is no protobuf message, or has groups"):
        drive(count_fields(raw, GENERATE, MAX_NUMBERS))


def test_the_longest_conversation_is_counted_in_pieces() -> None:
    turns = [pb.ChatMessage(role="user", content="hello")] * 4096
    raw = pb.GenerateRequest(model="m", chat=pb.ChatMessages(messages=turns)).SerializeToString()
    assert drive(count_fields(raw, GENERATE, MAX_NUMBERS)) == (None, 1 + (2 + 3 * 4096) // 1024)


def test_a_long_text_and_packed_ids_are_one_field_each() -> None:
    raw = pb.GenerateRequest(text="x" * MEBI).SerializeToString()
    assert drive(count_fields(raw, GENERATE, MAX_NUMBERS)) == (None, 1)
    raw = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(30_000))).SerializeToString()
    assert drive(count_fields(raw, GENERATE, MAX_NUMBERS)) == (None, 1)


@pytest.mark.parametrize("token_id", [1, 300, 100_000], ids=["one byte", "two bytes", "three bytes"])
def test_packed_numbers_are_counted_in_pieces(token_id: int) -> None:
    most = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[token_id] * MAX_NUMBERS))
    num_bytes = most.token_ids.ByteSize() - 4
    counted = 0 if num_bytes <= MAX_NUMBERS else -(-num_bytes // (64 << 10))
    assert drive(count_fields(most.SerializeToString(), GENERATE, MAX_NUMBERS)) == (None, 1 + counted)
    most.token_ids.ids.append(token_id)
    with pytest.raises(InvalidRequestError, match=f"^request: has more than {MAX_NUMBERS} numbers in one field"):
        drive(count_fields(most.SerializeToString(), GENERATE, MAX_NUMBERS))


def test_a_long_text_has_no_numbers() -> None:
    raw = pb.GenerateRequest(text="x" * MEBI, cache_salt="y" * MEBI).SerializeToString()
    assert drive(count_fields(raw, GENERATE, 1)) == (None, 1)


def test_empty_messages_are_not_looked_into() -> None:
    raw = chat_of(b"\x0a\x00" * 16_000)
    assert drive(count_fields(raw, GENERATE, MAX_NUMBERS)) == (None, 1 + 16_001 // 1024)


def test_random_messages_have_as_many_fields_as_were_written() -> None:
    dice = random.Random(1)
    for _ in range(300):
        turns = [pb.ChatMessage(role="user", content="x" * dice.randrange(300)) for _ in range(dice.randrange(50))]
        message = pb.GenerateRequest(
            model="m" * dice.randrange(1, 200),
            chat=pb.ChatMessages(messages=turns),
            sampling=pb.SamplingParams(temperature=1.0, seed=dice.getrandbits(64), logit_bias={5: 1.0}),
            n=dice.randrange(2**32),
        )
        raw = message.SerializeToString()
        assert drive(count_fields(raw, GENERATE, MAX_NUMBERS))[0] is None
        cut = raw[: dice.randrange(len(raw))]
        try:
            pb.GenerateRequest.FromString(cut)
        except Exception:
            with pytest.raises(InvalidRequestError):
                drive(count_fields(cut, GENERATE, MAX_NUMBERS))
        else:
            assert drive(count_fields(cut, GENERATE, MAX_NUMBERS))[0] is None


def test_the_search_for_broken_text_ends_at_the_limit() -> None:
    raw = chat_of(b"\x0a\x00" * (2 * MEBI)) + b"\x0a\x01\xff"
    assert drive(find_broken_text(raw, GENERATE)) == (None, 1 + MAX_FIELDS // 256)


# ---------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":[' + b"[]," * MEBI + b"[]]}",
        b'{"prompt":[' + b'"",' * MEBI + b'""]}',
        b'{"messages":[' + b"{}," * MEBI + b"{}]}",
        b"[" * MEBI,
        b'{"a":' * MEBI,
        b'""' * MEBI,
    ],
    ids=["lists", "strings", "objects", "deep", "deep objects", "no JSON"],
)
def test_bodies_of_many_parts_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"^body: has more than {MAX_JSON_PARTS} strings, lists and objects"):
        drive(count_json(raw, 1 << 30))


def test_bodies_of_many_numbers_are_refused() -> None:
    assert drive(count_json(b"[" + b"1," * 999 + b"1]", 999))[0] is None
    with pytest.raises(InvalidRequestError, match=r"^body: has more than 999 values"):
        drive(count_json(b"[" + b"1," * 1000 + b"1]", 999))


@pytest.mark.parametrize(
    "text",
    ["a,b[c]{d}" * 100_000, '\\"' * 300_000, "\\\\" * 300_000, "\u00e9" * 300_000, "x" * (3 << 16)],
    ids=["punctuation", "quotes", "backslashes", "two bytes", "whole pieces"],
)
def test_what_is_inside_a_string_is_not_counted(text: str) -> None:
    raw = msgspec.json.encode({"prompt": text})
    result, pieces = drive(count_json(raw, 1))
    assert result is None
    assert pieces == 1 + (len(raw) - len('{"prompt":""}') - (1 if len(raw) % (1 << 16) == 13 else 0)) // (1 << 16)


@pytest.mark.parametrize("raw", [b"", b'"', b'"\\', b'"\\"', b'{"a', b'{"a":"b', b"nonsense", b"\xff\xfe"])
def test_what_is_no_json_is_left_to_the_parser(raw: bytes) -> None:
    assert drive(count_json(raw, 0))[0] is None


def test_the_longest_conversation_fits() -> None:
    turns = [{"role": "user", "content": "a, b"}] * 4096
    raw = msgspec.json.encode({"model": "m", "messages": turns, "stop": ["a"] * 16})
    assert drive(count_json(raw, 20_000))[0] is None
