"""Clients of the input fuzzer: those that send large messages, and another tenant that reads streams meanwhile.

Both send bytes that are ready, instead of going through `disagg.client`: a message need not be one that a client would
make, and what it costs to make or to read one must not be in the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import grpc
import grpc.aio

from disagg.v1 import inference_pb2 as pb
from tests.acceptance.bad_input.fuzz_messages import Message
from tests.support.gateway_rig.rig import FAKE_TOKENS
from tests.support.raw_clients import GENERATE, http_post

TIMEOUT_S: Final = 30.0
_PAUSE_S: Final = 0.001
"""Between two pieces of a message that is sent slowly."""
_KEPT_BYTES: Final = 64 << 10
"""Of an answer."""
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 1 << 20),
)
_GRPC_ALLOWED: Final = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "NOT_FOUND", "PERMISSION_DENIED")


class Answer(NamedTuple):
    """What a message got."""

    code: str
    """Of HTTP or gRPC."""
    problem: str
    """Why this must not be; empty where nothing is wrong."""
    seconds: float


class Sender:
    """Connections of one tenant to one gateway; an asynchronous context manager.

    Args:
        grpc_address, http_address: of the gateway.
        key: of the tenant; empty where none is required.
    """

    def __init__(self, grpc_address: str, http_address: str, key: str = "") -> None:
        self._http_address = http_address
        self._headers = (("authorization", f"Bearer {key}"),) if key else ()
        self._channel = grpc.aio.insecure_channel(grpc_address, options=_OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def send(self, message: Message) -> Answer:
        """One call, to its end."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                code, problem = await (self._http(message) if message.protocol == "http" else self._grpc(message))
        except TimeoutError:
            code, problem = "none", f"no answer within {TIMEOUT_S:g} s"
        except OSError as error:
            code, problem = "none", f"the connection broke: {error}"
        return Answer(code, problem, time.monotonic() - began)

    async def _grpc(self, message: Message) -> tuple[str, str]:
        metadata = (*self._headers, *message.headers)
        try:
            if message.path == GENERATE:
                async for _ in self._channel.unary_stream(message.path, None, None)(message.body, metadata=metadata):
                    pass
            else:
                await self._channel.unary_unary(message.path, None, None)(message.body, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            name = error.code().name
            return name, "" if name in _GRPC_ALLOWED and error.details() else f"{name}: {error.details()}"
        return "OK", ""

    async def _http(self, message: Message) -> tuple[str, str]:
        host, _, port = self._http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            with contextlib.suppress(ConnectionError):  # it may answer, and close, before it has read all
                await _write(writer, http_bytes(message, self._headers), message.piece_bytes)
            reply = await _read(reader)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        return _judge(reply)


def http_bytes(message: Message, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """The whole request."""
    return http_post(message.path, message.body, (("connection", "close"), *headers, *message.headers))


async def _write(writer: asyncio.StreamWriter, data: bytes, piece_bytes: int) -> None:
    for begin in range(0, len(data), piece_bytes or len(data)):
        writer.write(data[begin : begin + (piece_bytes or len(data))])
        await writer.drain()
        if piece_bytes:
            await asyncio.sleep(_PAUSE_S)


async def _read(reader: asyncio.StreamReader) -> bytes:
    """To the end; what is kept of it."""
    kept = bytearray()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            kept += data[: max(0, _KEPT_BYTES - len(kept))]
    return bytes(kept)


def _judge(reply: bytes) -> tuple[str, str]:
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return "closed", f"closed without a status: {reply[:80]!r}"
    status = int(head[9:12])
    if status == 200:
        return "200", ""
    if not 400 <= status < 499:
        return str(status), f"{status}: {body[:200]!r}"
    try:
        named = bool(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        named = False
    return str(status), "" if named else f"{status} without an error object: {body[:200]!r}"


# ---------------------------------------------------------------- the other tenant


@dataclass(slots=True)
class Heard:
    """One stream of the other tenant."""

    times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    error: str = ""


class Neighbour:
    """Reads a few streams all the time; an asynchronous context manager.

    Args:
        address: of gRPC.
        key: of this tenant; empty where none is required.
        model: what is served.
        num_streams: at a time.
        max_tokens: of each; the next one begins where one ends.
    """

    def __init__(self, address: str, model: str, key: str = "", num_streams: int = 4, max_tokens: int = 4000) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        stopping = pb.StopConditions(max_tokens=max_tokens, ignore_eos=True)
        self._request = pb.GenerateRequest(model=model, text="a", stopping=stopping).SerializeToString()
        self.heard: list[Heard] = []
        self._num_streams = num_streams
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        begun = [asyncio.Event() for _ in range(self._num_streams)]
        self._tasks = [asyncio.create_task(self._listen(event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    async def _listen(self, begun: asyncio.Event) -> None:
        while True:
            heard = Heard()
            self.heard.append(heard)
            call: Any = self._channel.unary_stream(GENERATE, None, None)(self._request, metadata=self._metadata)
            try:
                async for raw in call:
                    response = pb.GenerateResponse.FromString(raw)
                    if response.delta.token_ids:
                        heard.times.append(time.monotonic())
                        heard.token_ids += response.delta.token_ids
                        begun.set()
            except grpc.aio.AioRpcError as error:
                heard.error = f"{error.code().name}: {error.details()}"
                begun.set()
                await asyncio.sleep(1.0)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between two messages of a stream, of those that ended between two times."""
        return [
            later - earlier for heard in self.heard for earlier, later in pairwise(heard.times) if begin <= later <= end
        ]

    def problems(self) -> list[str]:
        """Streams that broke, or had another token than comes next."""
        found = [heard.error for heard in self.heard if heard.error]
        return found + [f"stream {i} has wrong tokens" for i, heard in enumerate(self.heard) if not _is_exact(heard)]


def _is_exact(heard: Heard) -> bool:
    first, count = heard.token_ids[0] if heard.token_ids else FAKE_TOKENS[0], len(FAKE_TOKENS)
    start = first - FAKE_TOKENS[0]
    return heard.token_ids == [FAKE_TOKENS[(start + i) % count] for i in range(len(heard.token_ids))]
