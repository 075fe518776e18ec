"""Clients of the gateway's benchmark that cost next to nothing: they speak just enough of HTTP/1.1 and of HTTP/2 to ask
for one stream and to count what comes back, so that the two cores are left to what is measured.

    open_http(address, body)         one connection and one stream
    open_grpc(address, messages)     one connection, one stream for each message

A stream that does not read (`paused`) leaves everything to the sockets' buffers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disagg.v1 import inference_pb2 as pb

Clock = Callable[[], float]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 0x1, 0x4, 0x1
_INITIAL_WINDOW_SIZE = 4
_MAX_WINDOW = (1 << 31) - 1
_DEFAULT_WINDOW = (1 << 16) - 1
_FRAME_HEADER = 9
_GRPC_PREFIX = 5
_EVENT = b"data: {"
_DONE = b"data: [DONE]"
GENERATE = "/disagg.v1.InferenceService/Generate"
COMPLETIONS = "/v1/completions"
_SLOW_RECEIVE_BYTES = 4096


@dataclass(slots=True)
class Stream:
    """What one stream has brought so far."""

    num_messages: int = 0
    num_bytes: int = 0
    """Of messages, without framing of the protocol below."""
    ended: bool = False
    """Its end came, good or bad."""
    completed: bool = False
    """It ended as it should."""
    last: bytes = b""
    """The latest bytes (HTTP), or the latest message (gRPC)."""
    times: list[float] = field(default_factory=list)
    """When messages came, where they are noted."""


# ---------------------------------------------------------------- HTTP/1.1


class HttpStream(asyncio.Protocol):
    """One POST and its events."""

    def __init__(self, request: bytes, clock: Clock | None = None) -> None:
        self.stream = Stream()
        self._request = request
        self._clock = clock
        self._tail = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the events; the beginning of one may be in the data before."""
        stream = self.stream
        joined = self._tail + data
        num_new = joined.count(_EVENT) - self._tail.count(_EVENT)
        self._tail = joined[1 - len(_DONE) :]
        stream.num_messages += num_new
        stream.num_bytes += len(data)
        stream.last = data
        if num_new and self._clock is not None:
            stream.times.append(self._clock())
        if _DONE in joined:
            stream.completed = stream.ended = True

    def connection_lost(self, error: Exception | None) -> None:
        """The other side closed, or we did."""
        self.stream.ended = True

    def resume(self) -> None:
        """Read from now on."""
        assert self.transport is not None
        self.transport.resume_reading()

    def close(self) -> None:
        """Leave."""
        if self.transport is not None:
            self.transport.abort()


def http_request(path: str, body: object, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """One POST of a JSON body as bytes."""
    return http_post(path, json.dumps(body).encode(), headers)


def http_post(path: str, content: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """One POST of bytes that are, or should be, JSON."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    lines += [f"content-length: {len(content)}", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def open_http(address: str, request: bytes, *, paused: bool = False, clock: Clock | None = None) -> HttpStream:
    """Connect and send the request. With `paused`, nothing is ever read, and the socket's buffer is small."""
    protocol = HttpStream(request, clock)
    await _connect(address, lambda: protocol, paused)
    return protocol


# ---------------------------------------------------------------- HTTP/2


class GrpcStreams(asyncio.Protocol):
    """One connection with one call for each message."""

    def __init__(self, method: str, messages: Sequence[bytes], window: int, clock: Clock | None = None) -> None:
        self.streams = [Stream() for _ in messages]
        self._method = method
        self._messages = messages
        self._window = window
        self._clock = clock
        self._buffer = bytearray()
        self._partial = [bytearray() for _ in messages]
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send all requests."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        out = bytearray(_PREFACE)
        out += frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, self._window))
        if self._window > _DEFAULT_WINDOW:
            out += frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._window - _DEFAULT_WINDOW))
        headers = request_headers(self._method)
        for i, message in enumerate(self._messages):
            stream_id = 2 * i + 1
            out += frame(_HEADERS, _END_HEADERS, stream_id, headers)
            out += frame(_DATA, _END_STREAM, stream_id, grpc_message(message))
        transport.write(bytes(out))

    def data_received(self, data: bytes) -> None:
        """Take the whole frames out of what came."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _FRAME_HEADER:
            length = int.from_bytes(buffer[start : start + 3], "big")
            end = start + _FRAME_HEADER + length
            if len(buffer) < end:
                break
            kind, flags = buffer[start + 3], buffer[start + 4]
            stream_id = int.from_bytes(buffer[start + 5 : start + 9], "big")
            self._take(kind, flags, stream_id, bytes(buffer[start + _FRAME_HEADER : end]))
            start = end
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        """The other side closed, or we did."""
        for stream in self.streams:
            stream.ended = True

    def resume(self) -> None:
        """Read from now on, with windows that never close."""
        assert self.transport is not None
        more = struct.pack(">I", _MAX_WINDOW - self._window)
        ids = (0, *(2 * i + 1 for i in range(len(self.streams))))
        self.transport.write(b"".join(frame(_WINDOW_UPDATE, 0, stream_id, more) for stream_id in ids))
        self.transport.resume_reading()

    def close(self) -> None:
        """Leave."""
        if self.transport is not None:
            self.transport.abort()

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        assert self.transport is not None
        if kind == _DATA:
            self._take_data(stream_id // 2, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self.transport.write(frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self.transport.write(frame(_PING, _ACK, 0, payload))
        if kind == _GOAWAY:
            for stream in self.streams:
                stream.ended = True
        elif kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._end(self.streams[stream_id // 2])

    def _take_data(self, index: int, payload: bytes) -> None:
        stream, partial = self.streams[index], self._partial[index]
        partial += payload
        start = 0
        while len(partial) - start >= _GRPC_PREFIX:
            end = start + _GRPC_PREFIX + int.from_bytes(partial[start + 1 : start + _GRPC_PREFIX], "big")
            if len(partial) < end:
                break
            stream.num_messages += 1
            stream.num_bytes += end - start
            stream.last = bytes(partial[start + _GRPC_PREFIX : end])
            if self._clock is not None:
                stream.times.append(self._clock())
            start = end
        del partial[:start]

    def _end(self, stream: Stream) -> None:
        if not stream.ended:
            stream.ended = True
            stream.completed = bool(stream.last) and pb.GenerateResponse.FromString(stream.last).HasField("finished")


async def open_grpc(
    address: str, messages: Sequence[bytes], *, method: str = GENERATE, paused: bool = False, clock: Clock | None = None
) -> GrpcStreams:
    """Connect and call `method` once for each message. With `paused`, nothing is ever read, and the windows are those
    that HTTP/2 begins with."""
    protocol = GrpcStreams(method, messages, _DEFAULT_WINDOW if paused else _MAX_WINDOW, clock)
    await _connect(address, lambda: protocol, paused)
    return protocol


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def grpc_message(message: bytes) -> bytes:
    """A message as gRPC frames it: not compressed, its length, itself."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def request_headers(method: str, extra: Sequence[tuple[str, str]] = ()) -> bytes:
    """The headers of a call, without Huffman coding or the dynamic table (RFC 7541)."""
    block = bytes((0x83, 0x86))  # :method POST, :scheme http
    block += b"\x04" + _hpack_text(method)  # :path
    block += b"\x01" + _hpack_text("gateway")  # :authority
    for name, value in (("content-type", "application/grpc"), ("te", "trailers"), *extra):
        block += b"\x00" + _hpack_text(name) + _hpack_text(value)
    return block


def _hpack_text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "longer texts need a length of several bytes"
    return bytes((len(data),)) + data


# ---------------------------------------------------------------- sockets


async def _connect(address: str, factory: Callable[[], asyncio.Protocol], paused: bool) -> None:
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        if paused:  # before the connection stands: the window that TCP offers follows from it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_RECEIVE_BYTES)
        await loop.sock_connect(sock, (host, int(port)))
    except BaseException:
        sock.close()
        raise
    transport, _ = await loop.create_connection(factory, sock=sock)
    if paused:
        transport.pause_reading()
