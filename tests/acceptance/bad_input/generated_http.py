"""Generated bad input for HTTP: bodies with wrong values, texts that are no JSON, bytes that are no HTTP.

`bad_requests(dice, model)` gives requests without end, each certainly wrong. What must come back is a 4xx, or, for what
is no HTTP, the connection's end; never a 5xx, never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from disagg.gateway.text.tokenizer import ModelInfo

Dice = random.Random
Value = Callable[[Dice], object]

_HUGE = 10**30
_UNKNOWN_CODING = "unknown transfer coding"
"""The one kind that is answered with 501, as RFC 9112 asks for."""
_MAX_REPLY_BYTES = 1 << 20
_PATIENCE_S = 0.1
MODEL_ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"
)  # fmt: skip
_ERROR_FIELDS = ({"message", "type", "param", "code"}, {"message", "type"})
"""Of OpenAI's form, and of Anthropic's."""


class BadHttp(NamedTuple):
    """One connection's worth of bytes."""

    kind: str
    raw: bytes
    may_close: bool
    """Whether the end of the connection without a status is an answer too."""


class Reply(NamedTuple):
    """What came back."""

    status: int | None
    """`None` where the connection ended without one."""
    body: bytes


# ---------------------------------------------------------------- wrong values of fields


def _one_of(*values: object) -> Value:
    return lambda dice: dice.choice(values)


def _text(dice: Dice, most: int = 12) -> str:
    return "".join(chr(dice.choice((dice.randrange(32, 127), dice.randrange(160, 0xD800)))) for _ in range(most))


def _nested(dice: Dice) -> object:
    value: object = dice.randrange(10)
    for _ in range(dice.randrange(1, 6)):
        value = [value] if dice.random() < 0.5 else {_text(dice, 3): value}
    return value


def _not_number(dice: Dice) -> object:
    return dice.choice((_text(dice), "1", "NaN", True, False, [], {}, [1], _nested(dice)))


def _not_int(dice: Dice) -> object:
    return dice.choice((_not_number(dice), dice.uniform(0.1, 0.9), dice.randrange(1, 99) + 0.5))


def _not_text(dice: Dice) -> object:
    return dice.choice((dice.randrange(-99, 99), dice.random(), True, [], {}, _nested(dice)))


def _not_bool(dice: Dice) -> object:
    return dice.choice((0, 1, "true", "false", _text(dice), [], {}, dice.random(), _nested(dice)))


def _outside(low: float, high: float) -> Value:
    def value(dice: Dice) -> object:
        above = (high + dice.uniform(1e-3, 5.0), high * 1e6 + 1, 1e300, _HUGE)
        below = (low - dice.uniform(1e-3, 5.0), low - 1e9, -1e300, -_HUGE)
        return dice.choice((*above, *below))

    return value


def _either(*values: Value) -> Value:
    return lambda dice: dice.choice(values)(dice)


def _generation_fields(model: ModelInfo) -> dict[str, Value]:
    """Wrong values of the fields that both ways to generate take."""
    vocab = model.vocab_size
    return {
        "model": _either(_not_text, _text),
        "temperature": _either(_not_number, _outside(0, 100)),
        "top_p": _either(_not_number, _outside(0, 1)),
        "min_p": _either(_not_number, _outside(0, 1)),
        "top_k": _either(_not_int, _one_of(-2, -3, -(2**31), -(2**63), -_HUGE)),
        "seed": _either(_not_int, _one_of(2**64, -(2**64), _HUGE, -_HUGE)),
        "n": _either(_not_int, _one_of(0, -1, 129, 1000, 2**31, 2**63, _HUGE)),
        "max_tokens": _either(_not_int, _one_of(0, -1, model.max_model_len + 1, 2**31, 2**32, 2**63, 2**64, _HUGE)),
        "min_tokens": _either(_not_int, _one_of(-1, model.max_model_len + 1, 2**31, 2**32, 2**64, _HUGE)),
        "stop": _one_of(1, 1.5, True, {}, [1], [[]], ["x", None], [""], [str(i) for i in range(17)], "x" * 257),
        "stop_token_ids": _one_of("1", 5, {}, [-1], [vocab], [2**40], [_HUGE], ["1"], [1.5], list(range(65)), [[1]]),
        "presence_penalty": _either(_not_number, _outside(-2, 2)),
        "frequency_penalty": _either(_not_number, _outside(-2, 2)),
        "repetition_penalty": _either(_not_number, _outside(0, 100), _one_of(0)),
        "logit_bias": _one_of(5, "x", [1], *_wrong_biases(vocab)),
        "stream": _not_bool,
        "stream_options": _one_of("x", 5, [1], True, {"include_usage": "yes"}, {"include_usage": 1}),
        "ignore_eos": _not_bool,
        "cache_salt": _either(_not_text, _one_of("x" * 257, "ü" * 129)),
        "speculation": _either(_not_text, _one_of("", "on", "Off", "x" * 1000)),
        "prompt_logprobs": _either(_not_int, _one_of(-1, 21, 2**31, _HUGE)),
        "truncate_prompt_tokens": _either(_not_int, _one_of(0, -2, model.max_model_len, 2**63, _HUGE)),
        "service_tier": _either(_not_text, _one_of("", "scale", "x" * 1000)),
        "priority": _either(_not_int, _one_of(1001, -1001, 2**63, -_HUGE)),
    }


def _wrong_biases(vocab: int) -> list[dict[str, object]]:
    ids = ("a", "-1", "1.5", "", str(vocab), str(_HUGE))
    values: tuple[object, ...] = (101, -100.5, 1e300, "x", [], None)
    too_many: dict[str, object] = {str(i): 1 for i in range(1025)}
    wrong_ids: list[dict[str, object]] = [{name: 1} for name in ids]
    return [*wrong_ids, *({"1": value} for value in values), too_many]


def _chat_fields(model: ModelInfo) -> dict[str, Value]:
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
    parts: tuple[object, ...] = (image, {"type": "text"}, {"type": "text", "text": 5}, {"text": "x"}, 5, [], None)
    contents: list[object] = [*([part] for part in parts), 5, True, {"text": "x"}]
    messages = [[{"role": "user", "content": content}] for content in contents]
    roles = ["robot", "", 5, None, "User", "tool", "function"]
    messages += [[{"role": role, "content": "x"}] for role in roles]
    functions: tuple[object, ...] = ({}, {"name": "f g"}, {"name": 5}, {"name": "f", "parameters": 5}, 5, None)
    tools = [*([{"type": "function", "function": function}] for function in functions), [{"type": "x"}], [5]]
    return {
        **_generation_fields(model),
        "messages": _one_of("x", 5, {}, [], [5], ["x"], [{}], [[]], None, [{"content": "x"}], *messages),
        "max_completion_tokens": _either(_not_int, _one_of(0, -1, model.max_model_len + 1, 2**64, _HUGE)),
        "logprobs": _not_bool,
        "top_logprobs": _either(_not_int, _one_of(-1, 21, 2**31, _HUGE)),
        "tools": _one_of(5, "x", {"a": 1}, *tools),
        "response_format": _one_of({"type": "json_schema"}, {"type": "x"}, 5, "x"),
        **_template_fields(),
        "include_reasoning": _not_bool,
        "reasoning_effort": _either(_not_text, _one_of("", "most")),
    }


def _template_fields() -> dict[str, Value]:
    """Of a chat that ends with a user's turn."""
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    variables: tuple[object, ...] = ({"messages": []}, {"a b": 1}, {"": 1}, {"a": deep}, {"a": "x" * 20_000})
    return {
        "chat_template_kwargs": _one_of("x", 5, [1], {f"a{i}": i for i in range(33)}, *variables),
        "add_generation_prompt": _not_bool,
        "continue_final_message": _either(_not_bool, _one_of(True)),
    }


def _completion_fields(model: ModelInfo) -> dict[str, Value]:
    ids = ([-1], [model.vocab_size], [2**40], [_HUGE], [1.5], [True], [None])
    lists: list[object] = [*ids, *([wrong] for wrong in ids), [], [[]], [1, "x"], ["x", 1], [[1], "x"]]
    lists += [["x"] * 65, [[1], []], [[[1]]], [0] * model.max_model_len]
    return {
        **_generation_fields(model),
        "prompt": _one_of(5, 1.5, True, {}, None, *lists),
        "logprobs": _either(_not_int, _one_of(-1, 21, 2**31, _HUGE)),
        "echo": _not_bool,
        "best_of": _either(_not_int, _one_of(129, 200, 0, -1, _HUGE)),
    }


def _other_fields(model: ModelInfo) -> dict[str, Value]:
    """Of the fields that all ways to generate take, those that OpenAI's responses and Anthropic's messages have too."""
    shared = (
        "model",
        "temperature",
        "top_p",
        "min_p",
        "top_k",
        "seed",
        "min_tokens",
        "stream",
        "ignore_eos",
        "cache_salt",
        "speculation",
    )
    fields = _generation_fields(model)
    return {
        **{name: fields[name] for name in shared},
        "seed": _either(_not_int, _one_of(-1, 2**64, _HUGE)),
        "tools": _one_of(5, "x", {"a": 1}, [5], [{}], [{"type": "x", "name": "f"}], [{"type": "function"}], [[]]),
        "tool_choice": _one_of(5, [], {}, "any", {"type": "x"}, {"type": "function", "name": 5}, {"type": "tool"}),
    }


def _response_fields(model: ModelInfo) -> dict[str, Value]:
    image = {"type": "input_image", "image_url": "http://127.0.0.1/x.png"}
    parts: tuple[object, ...] = (
        image,
        {"type": "input_text"},
        {"type": "input_text", "text": 5},
        {"text": "x"},
        5,
        None,
    )
    items: list[object] = [{"role": "user", "content": [part]} for part in parts]
    items += [{"role": role, "content": "x"} for role in ("robot", "", 5, None, "tool")]
    items += [{"type": kind, "call_id": "c"} for kind in ("function_call", "function_call_output", "reasoning", "x", 5)]
    return {
        **_other_fields(model),
        "input": _one_of(5, {}, [], [5], ["x"], [{}], [[]], None, *([item] for item in items)),
        "instructions": _not_text,
        "max_output_tokens": _either(_not_int, _one_of(0, -1, model.max_model_len + 1, 2**64, _HUGE)),
        "parallel_tool_calls": _not_bool,
        "text": _one_of(5, "x", [], {"format": 5}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}),
        "metadata": _one_of(5, "x", [], {"a": 5}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}),
        "previous_response_id": _one_of("resp_1", 5, {}),
        "background": _one_of(True, 5, "x"),
    }


def _message_fields(model: ModelInfo) -> dict[str, Value]:
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    blocks: tuple[object, ...] = (
        image, {"type": "text"}, {"type": "text", "text": 5}, {"text": "x"}, {"type": "tool_use", "id": "a"},
        {"type": "tool_result"}, {"type": "tool_result", "tool_use_id": "a", "content": [image]}, 5, [], None,
    )  # fmt: skip
    contents: list[object] = [*([one] for one in blocks), 5, None, {}]
    turns: list[object] = [{"role": "user", "content": content} for content in contents]
    turns += [{"role": role, "content": "x"} for role in ("robot", "", 5, None, "system", "assistant")]
    return {
        **_other_fields(model),
        "messages": _one_of("x", 5, {}, [], [5], ["x"], [{}], [[]], None, *([turn] for turn in turns)),
        "max_tokens": _either(_not_int, _one_of(0, -1, None, model.max_model_len + 1, 2**64, _HUGE)),
        "system": _one_of(5, {}, [5], [{}], [{"type": "text"}], [image]),
        "stop_sequences": _one_of(5, "x", {}, [5], [""], ["x" * 257], [str(i) for i in range(17)]),
        "thinking": _one_of(5, "x", {}, {"type": "enabled"}, {"type": "adaptive", "display": "x"}),
        "output_config": _one_of(5, "x", {"format": 5}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}}),
    }


def _tokenize_fields(model: ModelInfo) -> dict[str, Value]:
    return {
        "model": _either(_not_text, _text),
        "prompt": _either(_not_text, _one_of(None)),
        "add_special_tokens": _not_bool,
    }


def _detokenize_fields(model: ModelInfo) -> dict[str, Value]:
    vocab = model.vocab_size
    tokens: tuple[object, ...] = (
        "x",
        5,
        {},
        ["x"],
        [-1],
        [vocab],
        [1.5],
        [2**70],
        [True],
        [[1]],
        None,
        [0, 1, vocab + 7],
    )
    return {"model": _either(_not_text, _text), "tokens": _one_of(*tokens)}


class Bodies:
    """Valid bodies of one model, and wrong values of their fields."""

    def __init__(self, model: ModelInfo) -> None:
        self.valid: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {
                "model": model.name,
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 1,
            },
            "/v1/completions": {"model": model.name, "prompt": "hello", "max_tokens": 1},
            "/v1/responses": {"model": model.name, "input": "hello", "max_output_tokens": 1},
            "/v1/messages": {
                "model": model.name,
                "messages": [{"role": "user", "content": "hello"}],
                "max_tokens": 1,
            },
            "/tokenize": {"model": model.name, "prompt": "hello"},
            "/detokenize": {"model": model.name, "tokens": [1, 2]},
        }
        self.wrong: dict[str, dict[str, Value]] = {
            "/v1/chat/completions": _chat_fields(model),
            "/v1/completions": _completion_fields(model),
            "/v1/responses": _response_fields(model),
            "/v1/messages": _message_fields(model),
            "/tokenize": _tokenize_fields(model),
            "/detokenize": _detokenize_fields(model),
        }


# ---------------------------------------------------------------- requests


def bad_requests(dice: Dice, model: ModelInfo) -> Iterator[BadHttp]:
    """Without end; the same for the same dice."""
    bodies = Bodies(model)
    makers: list[tuple[int, Callable[[Dice, Bodies], BadHttp]]] = [
        (55, _wrong_values), (15, _broken_json), (5, _wrong_targets), (5, _wrong_routes), (20, _no_http),
    ]  # fmt: skip
    weights = [weight for weight, _ in makers]
    while True:
        [(_, make)] = dice.choices(makers, weights)
        yield make(dice, bodies)


def _wrong_values(dice: Dice, bodies: Bodies) -> BadHttp:
    """One to three wrong fields in a valid body."""
    route = dice.choices(MODEL_ROUTES, (4, 4, 2, 2, 1, 1))[0]
    wrong = bodies.wrong[route]
    body = dict(bodies.valid[route])
    names = dice.sample(list(wrong), dice.choice((1, 1, 2, 3)) if len(wrong) > 3 else 1)
    for name in names:
        body[name] = wrong[name](dice)
    return BadHttp(f"value of {'+'.join(names)}"[:60], post(route, json.dumps(body).encode()), may_close=False)


def _broken_json(dice: Dice, bodies: Bodies) -> BadHttp:
    route = dice.choice(MODEL_ROUTES)
    good = json.dumps(bodies.valid[route]).encode()
    depth = dice.choice((200, 1100, 5000, 100_000))
    first = next(name for name in ("prompt", "messages", "input", "tokens") if name in bodies.valid[route])
    field = f'{{"model": "{bodies.valid[route]["model"]}", "{first}": '.encode()
    broken = {
        "nothing": b"",
        "truncated": good[: dice.randrange(1, len(good))],
        "more behind it": good + dice.choice((b"x", b"{}", b"]", b"\0")),
        "no object": dice.choice((b"5", b"null", b'"x"', b"[]", b"[{}]", b"true")),
        "no number": field + dice.choice((b"NaN", b"Infinity", b"-Infinity", b"0x1", b"1e", b"01", b"+1")) + b"}",
        "lone surrogate": field + dice.choice((rb'"\ud800"', rb'"a\udfffb"', rb'"\ud83d\ud83d"')) + b"}",
        "no UTF-8": field + b'"' + dice.choice((b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80\x80")) + b'"}',
        "control character": field + b'"' + bytes((dice.randrange(32),)) + b'"}',
        "deep arrays": field + b"[" * depth + b"]" * depth + b"}",
        "deep objects": field + b'{"a":' * depth + b"1" + b"}" * (depth + 1),
        "single quotes": good.replace(b'"', b"'"),
        "random bytes": b"\xfe" + dice.randbytes(dice.randrange(1, 200)),
        "huge number": field + b"9" * dice.choice((400, 5000, 100_000)) + b"}",
        "unfinished escape": field + dice.choice((rb'"\u12"', rb'"\x41"', b'"\\"')) + b"}",
    }
    name = dice.choice(list(broken))
    return BadHttp(f"JSON: {name}", post(route, broken[name]), may_close=False)


def _wrong_targets(dice: Dice, bodies: Bodies) -> BadHttp:
    """A header of ours with a value that means nothing."""
    name = dice.choice(("x-slo-ttft-ms", "x-slo-tpot-ms", "x-request-timeout-ms"))
    value = dice.choice(("x", "-1", "nan", "inf", "1e99", "", "1,2", "0x10", "-0.001"))
    route = "/v1/completions"
    raw = post(route, json.dumps(bodies.valid[route]).encode(), f"{name}: {value}")
    return BadHttp(f"header {name}", raw, may_close=False)


def _wrong_routes(dice: Dice, bodies: Bodies) -> BadHttp:
    good = json.dumps(bodies.valid["/v1/completions"]).encode()
    path = dice.choice(("/", "/v1", "/v1/", "/v1/complete", "/v2/completions", "/v1/models/none", "/%00", "/.."))
    if dice.random() < 0.5:
        return BadHttp("unknown path", post(path + dice.choice(("", "x", "?a=b", "/../x")), good), may_close=False)
    method = dice.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"))
    request = post("/v1/completions", good).replace(b"POST ", method.encode() + b" ", 1)
    return BadHttp("wrong method", request, may_close=method == "BREW")


def _no_http(dice: Dice, bodies: Bodies) -> BadHttp:
    """Requests that break HTTP/1.1 itself (RFC 9112), or are something else."""
    good = json.dumps(bodies.valid["/v1/completions"]).encode()
    host = b"host: localhost\r\ncontent-type: application/json\r\n"
    start = b"POST /v1/completions HTTP/1.1\r\n" + host
    end = b"content-length: %d\r\n\r\n" % len(good) + good
    chunks = b"transfer-encoding: chunked\r\n"
    no_length = dice.choice((b"x", b"-5", b"1e3", b"0x10", b""))
    no_size = dice.choice((b"zz", b"-1", b"0x4", b"", b"5 5"))
    no_version = dice.choice((b"HTTP/9.9", b"HTTP/1", b"HTTX/1.1"))
    many = b"".join(b"a%d: %s\r\n" % (i, b"x" * 90) for i in range(1500))
    broken = {
        "random bytes": dice.randbytes(dice.randrange(8, 400)) + b"\r\n\r\n",
        "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + dice.randbytes(200) + b"\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + dice.randbytes(20),
        "a length that is none": start + b"content-length: " + no_length + b"\r\n\r\n" + good,
        "two lengths": start + b"content-length: 3\r\n" + end,
        "length and chunks": start + chunks + end,
        "a length beyond all bounds": start + b"content-length: " + b"9" * dice.choice((10, 18, 30)) + b"\r\n\r\n",
        "a chunk size that is none": start + chunks + b"\r\n" + no_size + b"\r\nhello\r\n0\r\n\r\n",
        "a chunk size beyond all bounds": start
        + chunks
        + b"\r\n"
        + b"f" * dice.choice((15, 17, 40))
        + b"\r\nhello\r\n",
        "a chunk without its end": start + chunks + b"\r\n5\r\nhelloXX\r\n0\r\n\r\n",
        _UNKNOWN_CODING: start + b"transfer-encoding: sideways\r\n\r\n" + good,
        "no version": b"POST /v1/completions\r\n" + host + end,
        "unknown version": b"POST /v1/completions " + no_version + b"\r\n" + host + end,
        "a header without a name": start + b": x\r\n" + end,
        "a header with a space": start + b"a b: x\r\n" + end,
        "a header with a zero byte": start + b"a: \0x\r\n" + end,
        "a header without a colon": start + b"colonless\r\n" + end,
        "too many headers": start + many + end,
        "a header too large": start + b"a: " + b"x" * 200_000 + b"\r\n" + end,
        "a path too long": b"POST /" + b"a" * 200_000 + b" HTTP/1.1\r\n" + host + end,
    }
    name = dice.choice(list(broken))
    return BadHttp(f"HTTP: {name}", broken[name], may_close=True)


def post(route: str, body: bytes, *headers: str) -> bytes:
    """A well-formed request, whatever its body is."""
    lines = [f"POST {route} HTTP/1.1", "host: localhost", "content-type: application/json", "connection: close"]
    return "\r\n".join([*lines, *headers, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


# ---------------------------------------------------------------- what comes back


async def exchange(address: str, raw: bytes, timeout_s: float, *, ends: bool = False) -> Reply:
    """Send `raw` and read to the end. With `ends`, shut down the sending side after `_PATIENCE_S`: it may be
    waiting for the rest. Raises `TimeoutError` if the server does neither answer nor close."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, int(port))
        received = bytearray()
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(raw)
                await writer.drain()
            if ends:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PATIENCE_S):
                        await _read_all(reader, received)
                with contextlib.suppress(OSError):
                    writer.write_eof()
            await _read_all(reader, received)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    return parse(bytes(received))


async def _read_all(reader: asyncio.StreamReader, received: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while len(received) < _MAX_REPLY_BYTES and (data := await reader.read(1 << 16)):
            received += data


def parse(received: bytes) -> Reply:
    """The first reply in what was received. Raises `ValueError` for what is neither empty nor a reply."""
    if not received:
        return Reply(None, b"")
    head, _, body = received.partition(b"\r\n\r\n")
    version, _, rest = head.split(b"\r\n", 1)[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(f"not a reply: {received[:80]!r}")
    return Reply(int(rest[:3]), body)


def problem(bad: BadHttp, reply: Reply) -> str | None:
    """What is wrong with a reply to bad input; `None` where nothing is."""
    if reply.status is None:
        return None if bad.may_close else "the connection was closed without a status"
    if not (400 <= reply.status < 500 or (reply.status == 501 and bad.kind == f"HTTP: {_UNKNOWN_CODING}")):
        return f"status {reply.status}: {reply.body[:200]!r}"
    if bad.may_close:
        return None
    try:
        error = json.loads(reply.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status} without an error object: {reply.body[:200]!r}"
    if set(error) not in _ERROR_FIELDS or not error["message"]:
        return f"an error object of another form: {error}"
    return None
