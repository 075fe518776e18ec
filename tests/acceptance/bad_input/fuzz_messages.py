"""Messages of both protocols that cost a gateway as much as their size allows. Pure: the same shape, the same bytes.

    Family, Shape ──make──> Message     Shape ──mutated──> Shape, for a search
         └─ what the message is made of: many turns, deep lists, one long text ...

A family is a way to be large, a shape says how many parts, how large each, how deep, and of which text. No message is
larger than the gateway takes; some are just above the limit of their kind, and some are accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
_SERVICE: Final = "/disagg.v1.InferenceService/"
_ADMIN: Final = "/disagg.v1.AdminService/"

MANY: Final = 1 << 21
"""As many parts as the message has room for."""
MAX_DEPTH: Final = 1 << 18
_MAX_PART: Final = 1 << 20


class Served(NamedTuple):
    """What a message has to fit."""

    model: str
    max_bytes: int
    """Of a whole message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a search changes."""

    count: int = 1
    """Parts; fewer where there is no more room."""
    part: int = 1
    """Bytes or digits of a part."""
    depth: int = 1
    """Lists in lists, prompts of a call, or answers to each."""
    text: str = "ascii"
    """One of `TEXTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One call."""

    protocol: Literal["http", "grpc"]
    path: str
    """Of HTTP, or the method of gRPC."""
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    piece_bytes: int = 0
    """It is sent in pieces of this size, with a pause after each; 0 sends it whole."""


class Family(NamedTuple):
    """One way to be large."""

    make: Callable[[Shape, Served], Message]
    shapes: tuple[Shape, ...]
    """To begin with; the first is the worst that was expected."""


TEXTS: Final[dict[str, tuple[str, bytes]]] = {
    "ascii": ("x", b"x"),
    "words": ("a ", b"a "),
    "spaces": (" ", b" "),
    "two_bytes": ("\u00e9", "\u00e9".encode()),
    "emoji": ("\U0001f600", "\U0001f600".encode()),
    "special": ("<|im_end|>", b"<|im_end|>"),
    "escapes": ("A", b"\\u0041"),
    "pairs": ("\U0001f600", b"\\ud83d\\ude00"),
    "quotes": ('"', b'\\"'),
    "lines": ("\n", b"\\n"),
    "lone": ("\ufffd", b"\\ud800"),
}
"""By name: as it is, and as a JSON string may write it. `lone` is half of a surrogate pair, which no text has."""


def make(family: str, shape: Shape, served: Served) -> Message:
    """The message. Raises `KeyError` for a family that there is not, `ValueError` for one that is too large."""
    message = FAMILIES[family].make(shape, served)
    if len(message.body) > served.max_bytes:
        raise ValueError(f"{family} {shape}: {len(message.body)} bytes, and the gateway takes {served.max_bytes}")
    return message


def mutated(shape: Shape, dice: random.Random) -> Shape:
    """A shape beside `shape`."""
    what = dice.choice(("count", "count", "part", "depth", "text"))
    if what == "text":
        return replace(shape, text=dice.choice(list(TEXTS)))
    if what == "count":
        return replace(shape, count=_beside(shape.count, MANY, dice))
    if what == "part":
        return replace(shape, part=_beside(shape.part, _MAX_PART, dice))
    return replace(shape, depth=_beside(shape.depth, MAX_DEPTH, dice))


def _beside(value: int, most: int, dice: random.Random) -> int:
    changed = dice.choice((value * 2, value * 8, value // 2, value + 1, value - 1, round(value * dice.uniform(0.5, 2))))
    return min(most, max(1, changed))


# ---------------------------------------------------------------- JSON


def _room(served: Served) -> int:
    """For parts, beside everything else."""
    return served.max_bytes - 1024


def _string(shape: Shape, num_bytes: int) -> bytes:
    unit = TEXTS[shape.text][1]
    return b'"' + unit * max(1, num_bytes // len(unit)) + b'"'


def _again(item: bytes, count: int, room: int) -> bytes:
    """A list's content: `item`, `count` times or as often as there is room."""
    return b",".join([item] * max(1, min(count, room // (len(item) + 1))))


def _numbered(begin: bytes, end: bytes, count: int, room: int) -> bytes:
    """At most `count` items, separated by commas, each with a number between `begin` and `end`; at most `room`
    bytes."""
    count = max(1, min(count, room // (len(begin) + len(end) + len(str(count)) + 1)))
    return b",".join([b"%b%d%b" % (begin, i, end) for i in range(count)])


def _body(served: Served, content: bytes, path: str, **more: object) -> Message:
    """A call whose body has `content` beside its least fields."""
    least = b'{"model":"%b",' % served.model.encode()
    if path in (CHAT, TEXT):
        least += b'"max_tokens":1,'
    return Message(protocol="http", path=path, body=least + content + b"}", **more)  # type: ignore[arg-type]


_MESSAGES: Final = b'"messages":[{"role":"user","content":"x"}],'


def _chat_field(name: bytes, value: Callable[[Shape, Served], bytes]) -> Callable[[Shape, Served], Message]:
    """A short chat with one large field."""
    return lambda shape, served: _body(served, _MESSAGES + b'"%b":' % name + value(shape, served), CHAT)


def _turns(shape: Shape, served: Served) -> bytes:
    return _again(b'{"role":"user","content":%b}' % _string(shape, shape.part), shape.count, _room(served))


def _chat_turns(shape: Shape, served: Served) -> Message:
    return _body(served, b'"messages":[%b]' % _turns(shape, served), CHAT)


def _slow_turns(shape: Shape, served: Served) -> Message:
    """At most 256 pieces."""
    message = _chat_turns(shape, served)
    return replace(message, piece_bytes=max(shape.depth, len(message.body) // 256))


def _tokenize_chat(shape: Shape, served: Served) -> Message:
    return _body(served, b'"messages":[%b]' % _turns(shape, served), TOKENIZE)


def _content_parts(shape: Shape, served: Served) -> Message:
    """In `depth` turns."""
    depth = min(shape.depth, 4096)
    part = b'{"type":"text","text":%b}' % _string(shape, shape.part)
    parts = _again(part, -(-shape.count // depth), _room(served) // depth - 32)
    return _body(served, b'"messages":[%b]' % _again(b'{"role":"user","content":[%b]}' % parts, depth, MANY), CHAT)


def _tool_calls(shape: Shape, served: Served) -> Message:
    value = _lists(shape, served)
    return _body(served, b'"messages":[{"role":"user","content":"x","tool_calls":%b}]' % value, CHAT)


def _lists(shape: Shape, served: Served) -> bytes:
    """`count` lists, each `depth` deep."""
    depth = min(shape.depth, _room(served) // 2)
    return b"[%b]" % _again(b"[" * depth + b"]" * depth, shape.count, _room(served))


def _objects(shape: Shape, served: Served) -> bytes:
    depth = min(shape.depth, _room(served) // 6)
    return b"[%b]" % _again(b'{"a":' * depth + b"1" + b"}" * depth, shape.count, _room(served))


def _strings(shape: Shape, served: Served) -> bytes:
    return b"[%b]" % _again(_string(shape, shape.part), shape.count, _room(served))


def _integers(shape: Shape, served: Served) -> bytes:
    return b"[%b]" % _again(b"1" * min(shape.part, 19), shape.count, _room(served))


def _floats(shape: Shape, served: Served) -> bytes:
    part = b"0." + b"12345678901234567" * (1 + min(shape.part, _room(served) // 2) // 17)
    return b"[%b]" % _again(part, shape.count, _room(served))


def _biases(shape: Shape, served: Served) -> bytes:
    value = b'":1' + (b"." + b"7" * min(shape.part, _room(served) // 2) if shape.part > 1 else b"")
    return b"{%b}" % _numbered(b'"', value, shape.count, _room(served))


def _digits(shape: Shape, served: Served) -> bytes:
    return b"9" * min(shape.count, _room(served))


def _small_number(shape: Shape, served: Served) -> bytes:
    return b"0." + b"0" * min(shape.count, _room(served)) + b"1"


def _unknown_fields(shape: Shape, served: Served) -> Message:
    return _body(served, _MESSAGES + _numbered(b'"unknown', b'":1', shape.count, _room(served)), CHAT)


def _prompt(value: Callable[[Shape, Served], bytes], path: str = TEXT, more: bytes = b"") -> Callable[..., Message]:
    """A completion with a large prompt."""
    return lambda shape, served: _body(served, b'"prompt":%b%b' % (value(shape, served), more), path)


def _long_string(shape: Shape, served: Served) -> bytes:
    return _string(shape, min(shape.part, _room(served)))


def _prompts(shape: Shape, served: Served) -> Message:
    """`depth` answers to each of `count` prompts, with settings that each prompt's check looks at."""
    prompts = _again(_string(shape, shape.part), shape.count, _room(served) // 2)
    biases = _numbered(b'"', b'":1', 1024, MANY)
    stop = _numbered(b'"', b'"', 16, MANY)
    n = min(shape.depth, 128)
    return _body(served, b'"prompt":[%b],"logit_bias":{%b},"stop":[%b],"n":%d' % (prompts, biases, stop, n), TEXT)


def _lists_of_ids(shape: Shape, served: Served) -> bytes:
    """`depth` prompts of `count` ids together."""
    depth = min(shape.depth, 4096)
    ids = _again(b"1", -(-shape.count // depth), _room(served) // depth - 3)
    return b"[%b]" % _again(b"[%b]" % ids, depth, MANY)


def _detokenize(shape: Shape, served: Served) -> Message:
    return _body(served, b'"tokens":' + _integers(shape, served), DETOKENIZE)


def _headers(shape: Shape, served: Served) -> Message:
    """`count` headers of `part` bytes; together more than a head may have."""
    count, part = min(shape.count, 4096), min(shape.part, 1 << 16)
    headers = tuple((f"x-header-{i}", "x" * part) for i in range(min(count, 1 + (1 << 17) // part)))
    return replace(_body(served, _MESSAGES + b'"n":1', CHAT), headers=headers)


# ---------------------------------------------------------------- protobuf


def varint(value: int) -> bytes:
    """A non-negative integer in protobuf's base-128 encoding."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def delimited(number: int, content: bytes) -> bytes:
    """A text, bytes, a message or packed numbers."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def _often(item: bytes, count: int, room: int) -> bytes:
    return item * max(1, min(count, room // len(item)))


def _plain(shape: Shape, num_bytes: int) -> bytes:
    unit = TEXTS[shape.text][0].encode()
    return unit * max(1, num_bytes // len(unit))


_SHORT: Final = delimited(2, b"x")
"""The text of a prompt."""
_ONE_TOKEN: Final = delimited(6, b"\x08\x01")


def _call(served: Served, content: bytes, method: str = f"{_SERVICE}Generate") -> Message:
    model = delimited(1, served.model.encode())
    more = _ONE_TOKEN if method.endswith("Generate") else b""
    return Message(protocol="grpc", path=method, body=model + more + content)


def _grpc(
    content: Callable[[Shape, Served], bytes], method: str = f"{_SERVICE}Generate"
) -> Callable[[Shape, Served], Message]:
    return lambda shape, served: _call(served, content(shape, served), method)


def _chat_messages(number: int) -> Callable[[Shape, Served], bytes]:
    def content(shape: Shape, served: Served) -> bytes:
        turn = delimited(1, b"user") + delimited(2, _plain(shape, shape.part))
        return delimited(number, _often(delimited(1, turn), shape.count, _room(served)))

    return content


def _empty_turns(shape: Shape, served: Served) -> bytes:
    return delimited(4, _often(b"\x0a\x00", shape.count, _room(served)))


def _broken_turn(shape: Shape, served: Served) -> bytes:
    """The last of many turns is not UTF-8: all are looked through to name it."""
    turn = delimited(1, b"user") + delimited(2, _plain(shape, shape.part))
    turns = _often(delimited(1, turn), shape.count, _room(served))
    return delimited(4, turns + delimited(1, delimited(2, b"\xff")))


def _broken_text(shape: Shape, served: Served) -> bytes:
    return delimited(2, _plain(shape, min(shape.part, _room(served))) + b"\xff")


def _unknown_numbers(shape: Shape, served: Served) -> bytes:
    return _SHORT + _often(b"\xf8\x07\x01", shape.count, _room(served))


def _unknown_messages(shape: Shape, served: Served) -> bytes:
    return _SHORT + _often(delimited(127, b"x" * min(shape.part, _room(served) // 2)), shape.count, _room(served))


def _same_field(shape: Shape, served: Served) -> bytes:
    return _often(delimited(2, _plain(shape, min(shape.part, _room(served) // 2))), shape.count, _room(served))


def _same_message(shape: Shape, served: Served) -> bytes:
    """The parts of a field that comes several times are merged."""
    turn = delimited(1, b"user") + delimited(2, _plain(shape, shape.part))
    return _often(delimited(4, delimited(1, turn)), shape.count, _room(served))


def _groups(shape: Shape, served: Served) -> bytes:
    depth = min(shape.count, _room(served) // 2)
    return b"\x7b" * depth + b"\x7c" * depth


def _stops(shape: Shape, served: Served) -> bytes:
    return _SHORT + delimited(6, _often(delimited(5, _plain(shape, shape.part)), shape.count, _room(served)))


def _stop_ids(shape: Shape, served: Served) -> bytes:
    return _SHORT + delimited(6, delimited(4, _often(varint(min(shape.part, 31_999)), shape.count, _room(served))))


def _bias(shape: Shape, served: Served) -> bytes:
    """`depth` answers."""
    count = min(shape.count, _room(served) // 12)
    entries = [delimited(9, b"\x08" + varint(i) + b"\x15\x00\x00\x80?") for i in range(count)]
    return _SHORT + delimited(5, b"".join(entries)) + b"\x38" + varint(min(shape.depth, 16))


def _ids(shape: Shape, served: Served) -> bytes:
    return delimited(3, delimited(1, _often(varint(min(shape.part, 31_999)), shape.count, _room(served))))


def _unpacked_ids(shape: Shape, served: Served) -> bytes:
    return delimited(3, _often(b"\x08\x01", shape.count, _room(served)))


def _text_field(number: int) -> Callable[[Shape, Served], bytes]:
    return lambda shape, served: delimited(number, _plain(shape, min(shape.part, _room(served))))


def _once(shape: Shape, served: Served) -> Message:
    inner = _call(served, _chat_messages(4)(shape, served)).body
    return Message(protocol="grpc", path=f"{_SERVICE}GenerateOnce", body=delimited(1, inner))


def _detokenize_ids(shape: Shape, served: Served) -> bytes:
    return delimited(2, _often(varint(min(shape.part, 31_999)), shape.count, _room(served)))


def _metadata(shape: Shape, served: Served) -> Message:
    headers = tuple((f"x-header-{i}", "x" * min(shape.part, 4096)) for i in range(min(shape.count, 64)))
    return replace(_call(served, _SHORT), headers=headers)


# ---------------------------------------------------------------- all of them

_TURNS: Final = (
    Shape(count=4096, part=1),
    Shape(count=4096, part=200),
    Shape(count=4097, part=1),
    Shape(count=MANY, part=1),
    Shape(count=1000, part=1000, text="emoji"),
)
_PARTS: Final = (Shape(count=MANY), Shape(count=16), Shape(count=MANY, part=200), Shape(count=10_000, part=20))
_NUMBERS: Final = (Shape(count=MANY), Shape(count=65_000), Shape(count=8191), Shape(count=65_000, part=15))
_DEEP: Final = (Shape(depth=MAX_DEPTH), Shape(depth=1000), Shape(count=MANY, depth=2), Shape(count=30, depth=900))
_LONG: Final = tuple(Shape(part=_MAX_PART, text=text) for text in TEXTS)
_LONG_FEW: Final = tuple(Shape(part=_MAX_PART, text=text) for text in ("ascii", "emoji", "two_bytes", "escapes"))
_DIGITS: Final = (Shape(count=MANY), Shape(count=4300), Shape(count=400))

FAMILIES: Final[dict[str, Family]] = {
    "chat_turns": Family(_chat_turns, _TURNS),
    "slow_turns": Family(_slow_turns, (Shape(count=4096), Shape(count=30))),
    "content_parts": Family(_content_parts, (Shape(count=8000), Shape(count=8000, depth=1000), Shape(count=MANY))),
    "tool_calls": Family(_tool_calls, _DEEP),
    "stop_strings": Family(_chat_field(b"stop", _strings), _PARTS),
    "stop_ids": Family(_chat_field(b"stop_token_ids", _integers), _NUMBERS),
    "logit_bias": Family(
        _chat_field(b"logit_bias", _biases), (Shape(count=30_000), Shape(count=1024), Shape(count=1025, part=900))
    ),
    "tools": Family(_chat_field(b"tools", _objects), _DEEP),
    "response_format": Family(_chat_field(b"response_format", _objects), _DEEP),
    "guided_regex": Family(_chat_field(b"guided_regex", _long_string), _LONG_FEW),
    "guided_choice": Family(_chat_field(b"guided_choice", _strings), _PARTS),
    "unknown_fields": Family(_unknown_fields, (Shape(count=32_000), Shape(count=MANY))),
    "unknown_lists": Family(_chat_field(b"unknown", _lists), _DEEP),
    "unknown_objects": Family(_chat_field(b"unknown", _objects), _DEEP),
    "unknown_strings": Family(_chat_field(b"unknown", _strings), (Shape(count=32_000), *_PARTS)),
    "unknown_floats": Family(_chat_field(b"unknown", _floats), (Shape(count=60_000), Shape(count=2, part=500_000))),
    "huge_integer": Family(_chat_field(b"max_tokens", _digits), _DIGITS),
    "huge_seed": Family(_chat_field(b"seed", _digits), _DIGITS),
    "huge_float": Family(_chat_field(b"temperature", _digits), _DIGITS),
    "small_float": Family(_chat_field(b"temperature", _small_number), _DIGITS),
    "unknown_number": Family(_chat_field(b"unknown", _digits), _DIGITS),
    "prompt_ids": Family(_prompt(_integers), _NUMBERS),
    "prompt_floats": Family(_prompt(_floats), (Shape(count=60_000), Shape(count=2, part=500_000))),
    "prompt_deep": Family(_prompt(_lists), _DEEP),
    "lists_of_ids": Family(_prompt(_lists_of_ids), (Shape(count=65_000, depth=64), Shape(count=65_000, depth=8))),
    "prompts": Family(_prompts, (Shape(count=64, depth=2), Shape(count=128), Shape(count=1, depth=16))),
    "prompt_strings": Family(_prompt(_strings), _PARTS),
    "long_prompt": Family(_prompt(_long_string), _LONG),
    "echoed_prompt": Family(_prompt(_long_string, more=b',"echo":true'), _LONG_FEW),
    "tokenize_text": Family(_prompt(_long_string, TOKENIZE), _LONG_FEW),
    "tokenize_strings": Family(_prompt(_long_string, TOKENIZE, b',"return_token_strs":true'), _LONG_FEW),
    "tokenize_chat": Family(_tokenize_chat, _TURNS),
    "detokenize": Family(_detokenize, _NUMBERS),
    "headers": Family(_headers, (Shape(part=65_000), Shape(count=4096, part=8))),
    "grpc_turns": Family(_grpc(_chat_messages(4)), _TURNS),
    "grpc_empty_turns": Family(_grpc(_empty_turns), (Shape(count=MANY), Shape(count=16_000), Shape(count=4096))),
    "grpc_broken_turn": Family(
        _grpc(_broken_turn), (Shape(count=5000, part=180), Shape(count=4096), Shape(count=MANY))
    ),
    "grpc_broken_text": Family(_grpc(_broken_text), _LONG_FEW),
    "grpc_unknown_numbers": Family(_grpc(_unknown_numbers), (Shape(count=16_000), Shape(count=MANY))),
    "grpc_unknown_messages": Family(_grpc(_unknown_messages), (Shape(count=16_000, part=60), Shape(count=MANY))),
    "grpc_same_field": Family(_grpc(_same_field), (Shape(count=16_000, part=60), Shape(count=MANY))),
    "grpc_same_message": Family(_grpc(_same_message), (Shape(count=4000, part=200), Shape(count=MANY))),
    "grpc_groups": Family(_grpc(_groups), (Shape(count=MANY), Shape(count=90))),
    "grpc_stops": Family(_grpc(_stops), _PARTS),
    "grpc_stop_ids": Family(_grpc(_stop_ids), _NUMBERS),
    "grpc_bias": Family(_grpc(_bias), (Shape(count=1024, depth=16), Shape(count=5000), Shape(count=MANY))),
    "grpc_ids": Family(_grpc(_ids), (*_NUMBERS, Shape(count=8190, part=300))),
    "grpc_unpacked_ids": Family(_grpc(_unpacked_ids), (Shape(count=8190), Shape(count=16_000), Shape(count=MANY))),
    "grpc_text": Family(_grpc(_text_field(2)), _LONG_FEW),
    "grpc_salt": Family(_grpc(_text_field(8)), _LONG_FEW),
    "grpc_once": Family(_once, _TURNS[:2]),
    "grpc_metadata": Family(_metadata, (Shape(count=64, part=100), Shape(count=1, part=4096))),
    "grpc_tokenize_text": Family(_grpc(_text_field(2), f"{_SERVICE}Tokenize"), _LONG_FEW),
    "grpc_tokenize_chat": Family(_grpc(_chat_messages(3), f"{_SERVICE}Tokenize"), _TURNS),
    "grpc_detokenize": Family(_grpc(_detokenize_ids, f"{_SERVICE}Detokenize"), _NUMBERS),
    "grpc_admin": Family(_grpc(_unknown_messages, f"{_ADMIN}ExplainRequest"), (Shape(count=16_000, part=60),)),
}
"""By name; those of HTTP first."""
