"""Generated bad input for gRPC: messages with wrong values, bytes that are no message, frames that are no HTTP/2.

What must come back is INVALID_ARGUMENT (or the status that the kind names); for broken frames the end of the stream or
of the connection; never an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc
import grpc.aio

from disagg.gateway.text.tokenizer import ModelInfo
from disagg.v1 import inference_pb2 as pb
from tests.support.raw_clients import GENERATE, frame, grpc_message, request_headers

Dice = random.Random
Change = Callable[[Dice, pb.GenerateRequest], None]

_INVALID = (grpc.StatusCode.INVALID_ARGUMENT,)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = frame(4, 0, 0, b"")
_QUIET_S = 0.05
"""After broken frames: how long an answer is waited for."""


class BadMessage(NamedTuple):
    """One call."""

    kind: str
    raw: bytes
    allowed: tuple[grpc.StatusCode, ...] = _INVALID
    metadata: tuple[tuple[str, str], ...] = ()
    method: str = GENERATE


class BadFrames(NamedTuple):
    """One connection's worth of bytes."""

    kind: str
    raw: bytes


# ---------------------------------------------------------------- messages


def bad_messages(dice: Dice, model: ModelInfo) -> Iterator[BadMessage]:
    """Without end; the same for the same dice."""
    good = pb.GenerateRequest(model=model.name, text="hello", stopping=pb.StopConditions(max_tokens=1))
    changes = _changes(model)
    while True:
        what = dice.random()
        if what < 0.7:
            request = pb.GenerateRequest()
            request.CopyFrom(good)
            names = dice.sample(list(changes), dice.choice((1, 1, 2)))
            for name in names:
                changes[name](dice, request)
            yield BadMessage(f"value of {'+'.join(names)}", request.SerializeToString())
        elif what < 0.9:
            yield _no_message(dice, good.SerializeToString())
        else:
            yield _wrong_call(dice, good.SerializeToString())


def _changes(model: ModelInfo) -> dict[str, Change]:
    """What makes a valid request certainly wrong."""
    numbers: dict[str, tuple[float, float]] = {
        "temperature": (0, 100),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
        "repetition_penalty": (0, 100),
    }
    changes: dict[str, Change] = {name: _outside(name, *bounds) for name, bounds in numbers.items()}
    return changes | _wrong_prompts(model) | _wrong_counts(model) | _wrong_lists(model)


def _wrong_prompts(model: ModelInfo) -> dict[str, Change]:
    vocab, longest = model.vocab_size, model.max_model_len

    def prompt_ids(dice: Dice, request: pb.GenerateRequest) -> None:
        request.token_ids.ids.extend(dice.choice(([vocab], [0, 2**32 - 1], [0] * longest)))

    def no_ids(dice: Dice, request: pb.GenerateRequest) -> None:
        request.token_ids.SetInParent()

    def chat(dice: Dice, request: pb.GenerateRequest) -> None:
        request.chat.SetInParent()
        if dice.random() < 0.7:
            request.chat.messages.add(role=dice.choice(("", "robot", "USER", "tool")), content="x")

    def cache_salt(dice: Dice, request: pb.GenerateRequest) -> None:
        request.cache_salt = "x" * dice.randrange(257, 900)

    def speculation(dice: Dice, request: pb.GenerateRequest) -> None:
        request.speculation = dice.choice(("on", "OFF", "x" * 900))

    changes = {"token_ids": prompt_ids, "empty token_ids": no_ids, "chat": chat}
    return {**changes, "cache_salt": cache_salt, "speculation": speculation}


def _wrong_counts(model: ModelInfo) -> dict[str, Change]:
    longest = model.max_model_len

    def top_k(dice: Dice, request: pb.GenerateRequest) -> None:
        request.sampling.top_k = dice.choice((-2, -(2**31), dice.randrange(-(2**31), -1)))

    def max_tokens(dice: Dice, request: pb.GenerateRequest) -> None:
        request.stopping.max_tokens = dice.choice((0, longest + 1, 2**32 - 1))

    def min_tokens(dice: Dice, request: pb.GenerateRequest) -> None:
        request.stopping.min_tokens = dice.randrange(2, 2**32)

    def answers(dice: Dice, request: pb.GenerateRequest) -> None:
        request.n = dice.choice((0, 129, 2**32 - 1))

    def logprobs(dice: Dice, request: pb.GenerateRequest) -> None:
        request.sampling.logprobs = dice.randrange(21, 2**32)

    return {"top_k": top_k, "max_tokens": max_tokens, "min_tokens": min_tokens, "n": answers, "logprobs": logprobs}


def _wrong_lists(model: ModelInfo) -> dict[str, Change]:
    vocab = model.vocab_size

    def stop_ids(dice: Dice, request: pb.GenerateRequest) -> None:
        request.stopping.stop_token_ids.extend(dice.choice(([vocab], [2**32 - 1], [1] * 65)))

    def stop(dice: Dice, request: pb.GenerateRequest) -> None:
        request.stopping.stop.extend(dice.choice(([""], ["x" * 257], [str(i) for i in range(17)])))

    def logit_bias(dice: Dice, request: pb.GenerateRequest) -> None:
        if dice.random() < 0.5:
            request.sampling.logit_bias[dice.choice((vocab, 2**32 - 1))] = 1.0
        else:
            request.sampling.logit_bias[0] = dice.choice((100.5, -101.0, float("nan"), float("-inf")))

    return {"stop_token_ids": stop_ids, "stop": stop, "logit_bias": logit_bias}


def _outside(name: str, low: float, high: float) -> Change:
    special = (float("nan"), float("inf"), float("-inf"), 1e30, -1e30)

    def change(dice: Dice, request: pb.GenerateRequest) -> None:
        value = dice.choice((*special, high + dice.uniform(0.01, 9), low - dice.uniform(0.01, 9)))
        setattr(request.sampling, name, value)

    return change


def _no_message(dice: Dice, good: bytes) -> BadMessage:
    broken = {
        "truncated": good[: -dice.randrange(1, 3)],
        "random bytes": b"\xff\xff\xff" + dice.randbytes(dice.randrange(1, 200)),
        "text that is no UTF-8": good + b"\x12" + _delimited(dice.choice((b"\xff", b"a\xc3\x28", b"\xed\xa0\x80"))),
        "a length beyond the end": good + b"\x12\xff\xff\xff\xff\x07abc",
        "a field with number 0": good + b"\x02\x00",
        "wire type 7": good + b"\x0f\x00",
        "an endless number": good + b"\x08" + b"\xff" * 11,
        "an unfinished group": good + b"\x7b\x08\x01",
    }
    name = dice.choice(list(broken))
    return BadMessage(f"protobuf: {name}", broken[name])


def _delimited(data: bytes) -> bytes:
    return bytes((len(data),)) + data


def _wrong_call(dice: Dice, good: bytes) -> BadMessage:
    if dice.random() < 0.5:
        name = dice.choice(("x-slo-ttft-ms", "x-slo-tpot-ms"))
        value = dice.choice(("x", "-1", "0", "nan", "inf", "1e99", ""))
        return BadMessage(f"metadata {name}", good, metadata=((name, value),))
    if dice.random() < 0.5:
        service = "/disagg.v1.InferenceService/"
        path = dice.choice((f"{service}Nothing", "/x/y", f"{service}generate", "/disagg.internal.Worker/Session"))
        return BadMessage("unknown method", good, (grpc.StatusCode.UNIMPLEMENTED,), method=path)
    unknown = pb.GenerateRequest(model=dice.choice(("", "nobody", "x" * 500)), text="hello").SerializeToString()
    return BadMessage("unknown model", unknown, (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT))


async def call(channel: grpc.aio.Channel, bad: BadMessage, timeout_s: float) -> str | None:
    """Make the call; what is wrong with what came back, `None` where nothing is."""
    try:
        async for _ in channel.unary_stream(bad.method, None, None)(bad.raw, metadata=bad.metadata, timeout=timeout_s):
            return "a message came back"
    except grpc.aio.AioRpcError as error:
        return None if error.code() in bad.allowed else f"{error.code().name}: {error.details()}"
    return "the call ended well"


# ---------------------------------------------------------------- frames


def bad_frames(dice: Dice, model: ModelInfo) -> Iterator[BadFrames]:
    """Without end; the same for the same dice."""
    good = grpc_message(pb.GenerateRequest(model=model.name, text="hello").SerializeToString())
    while True:
        broken = _frames(dice, good)
        name = dice.choice(list(broken))
        yield BadFrames(f"HTTP/2: {name}", broken[name])


def _frames(dice: Dice, good: bytes) -> dict[str, bytes]:
    begin = _PREFACE + _SETTINGS
    headers = frame(1, 0x4, 1, request_headers(GENERATE))
    body = frame(0, 0x1, 1, good)
    return {
        "random bytes": dice.randbytes(dice.randrange(24, 300)),
        "HTTP/1.1": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
        "random frames": begin + b"".join(_random_frame(dice) for _ in range(dice.randrange(1, 9))),
        "a frame too large": begin + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + dice.randbytes(100),
        "data before headers": begin + frame(0, 0x1, dice.choice((1, 3, 2**31 - 1)), good),
        "data on stream 0": begin + headers + frame(0, 0x1, 0, good),
        "an even stream": begin + frame(1, 0x4, 2, request_headers(GENERATE)) + frame(0, 0x1, 2, good),
        "headers that are none": begin + frame(1, 0x4, 1, dice.randbytes(dice.randrange(1, 60))) + body,
        "an index beyond the table": begin + frame(1, 0x5, 1, b"\xff\xff\xff\x7f"),
        "no path": begin + frame(1, 0x4, 1, bytes((0x83, 0x86))) + body,
        "headers without an end": begin + frame(1, 0x0, 1, request_headers(GENERATE)) + body,
        "a message longer than it says": begin + headers + frame(0, 0x1, 1, struct.pack(">BI", 0, 3) + good[5:]),
        "a message shorter than it says": begin + headers + frame(0, 0x1, 1, struct.pack(">BI", 0, 1 << 20) + good[5:]),
        "a message of 4 GiB": begin + headers + frame(0, 0x1, 1, b"\x00\xff\xff\xff\xff"),
        "compressed without an encoding": begin + headers + frame(0, 0x1, 1, b"\x01" + good[1:]),
        "an unknown flag byte": begin + headers + frame(0, 0x1, 1, b"\x09" + good[1:]),
        "settings of a wrong size": begin + frame(4, 0, 0, b"\x00" * 7),
        "settings out of range": begin + frame(4, 0, 0, struct.pack(">HI", 4, 2**32 - 1)),
        "a window of 0": begin + headers + frame(8, 0, 1, struct.pack(">I", 0)),
        "windows that overflow": begin + headers + frame(8, 0, 0, struct.pack(">I", 2**31 - 1)) * 2,
        "a stream reset before it is": begin + frame(3, 0, 5, struct.pack(">I", 8)),
        "nothing but pings": begin + frame(6, 0, 0, b"12345678") * 200,
        "a push": begin + headers + frame(5, 0x4, 1, struct.pack(">I", 2) + request_headers(GENERATE)),
    }  # fmt: skip


def _random_frame(dice: Dice) -> bytes:
    stream_id = dice.choice((0, 1, 3, 2**31 - 1))
    return frame(dice.randrange(12), dice.randrange(256), stream_id, dice.randbytes(dice.randrange(40)))


async def send_frames(address: str, bad: BadFrames, timeout_s: float) -> str | None:
    """Send the bytes, wait a little for what comes, leave; what is wrong with it, `None` where nothing is."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, int(port))
        received = bytearray()
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(bad.raw)
                await writer.drain()
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_QUIET_S):
                    while data := await reader.read(1 << 16):
                        received += data
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    return "an answer came back" if has_message(bytes(received)) else None


def has_message(received: bytes) -> bool:
    """Whether a DATA frame with content is in what a server of HTTP/2 sent."""
    start = 0
    while len(received) - start >= 9:
        length = int.from_bytes(received[start : start + 3], "big")
        if received[start + 3] == 0 and length:
            return True
        start += 9 + length
    return False
