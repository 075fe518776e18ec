"""One connection's limits, with a transport that only takes notes and a clock that is set by hand."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.gateway.http.shell.protocol import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_PIPELINED,
    WRITE_BUFFER_BYTES,
    ConnectionLimits,
    Connections,
    HttpConnection,
    make_config,
)

HEAD = b"POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\n"
REQUEST = HEAD + b"body"
LIMITS = ConnectionLimits(max_connections=2, idle_timeout_s=60.0, head_timeout_s=10.0, write_timeout_s=30.0)


class FakeTransport(asyncio.Transport):
    """Takes notes. What is written stays in its buffer where `stuck`."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.state = "open"
        self.high = 0
        self.reading = True
        self.protocol: HttpConnection | None = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.state != "open"

    def close(self) -> None:
        self.state = "closed" if self.state == "open" else self.state

    def abort(self) -> None:
        self.state = "aborted"

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading


class Rig:
    """Connections to an application that answers when it is told to."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.now = 100.0
        self.answer = asyncio.Event()
        self.num_calls = 0
        self.owner = Connections(make_config(self._app, limits.idle_timeout_s), limits, lambda: self.now)

    def connect(self) -> tuple[HttpConnection, FakeTransport]:
        connection, transport = self.owner.make(), FakeTransport()
        connection.connection_made(transport)
        return connection, transport

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.owner.sweep()

    async def run(self) -> None:
        """Let the application's tasks do what they can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """All clients leave, and their calls end."""
        self.answer.set()
        for connection in list(self.owner.state.connections):
            connection.connection_lost(None)
        if self.owner.state.tasks:
            await asyncio.wait(self.owner.state.tasks)
        assert self.owner.none_left.is_set()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_calls += 1
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok", "more_body": False})


class LongRig(Rig):
    """Connections to an application that never answers, and waits for its clients to leave."""

    num_left = 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_calls += 1
        while (await receive())["type"] != "http.disconnect":
            pass
        self.num_left += 1


async def test_an_answer() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(REQUEST)
    rig.answer.set()
    await rig.run()
    assert transport.written == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert (transport.state, transport.high) == ("open", WRITE_BUFFER_BYTES)
    await rig.end()


async def test_a_new_connection_takes_the_place_of_the_one_that_is_silent_longest() -> None:
    rig = Rig()
    transports = [rig.connect()[1] for _ in range(4)]
    assert [transport.state for transport in transports] == ["aborted", "aborted", "open", "open"]
    assert len(rig.owner.state.connections) == 2


async def test_a_slow_head_does_not_keep_its_place() -> None:
    rig = Rig()
    slow, transport = rig.connect()
    slow.data_received(b"POST /x HTTP/1.1\r\nhost:")
    rig.connect()
    rig.connect()
    assert transport.state == "aborted"


async def test_a_known_connection_outlasts_strangers() -> None:
    rig = Rig()
    known, transport = rig.connect()
    known.is_known = True
    rig.answer.set()
    known.data_received(REQUEST)
    await rig.run()
    strangers = [rig.connect()[1] for _ in range(3)]
    assert transport.state == "open"
    assert [stranger.state for stranger in strangers] == ["aborted", "aborted", "open"]


async def test_where_every_connection_has_a_request_one_more_is_closed() -> None:
    rig = Rig()
    busy = [rig.connect() for _ in range(2)]
    for connection, _ in busy:
        connection.data_received(REQUEST)
    await rig.run()
    assert rig.connect()[1].state == "aborted"
    assert [transport.state for _, transport in busy] == ["open", "open"]
    rig.answer.set()
    await rig.run()
    assert rig.connect()[1].state == "open"
    assert [transport.state for _, transport in busy] == ["aborted", "open"]


async def test_silence_before_the_first_request() -> None:
    rig = Rig()
    _, transport = rig.connect()
    rig.after(60.0)
    assert transport.state == "open"
    rig.after(0.1)
    assert transport.state == "aborted"
    await rig.end()


async def test_silence_between_requests_but_not_while_one_is_answered() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    rig.after(59.0)
    connection.data_received(REQUEST)
    await rig.run()
    rig.after(1000.0)
    assert transport.state == "open"
    rig.answer.set()
    await rig.run()
    rig.after(60.0)
    assert transport.state == "open"
    rig.after(0.1)
    assert transport.state == "aborted"
    await rig.end()


async def test_a_head_that_comes_too_slowly() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    rig.after(50.0)
    for byte in HEAD[:10]:
        connection.data_received(bytes([byte]))
        rig.after(1.0)
    assert transport.state == "open"
    rig.after(0.1)
    assert transport.state == "aborted"
    await rig.end()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
    ],
    ids=["line", "value", "many"],
)
@pytest.mark.parametrize("piece_bytes", [1000, 1 << 20])
async def test_a_head_that_is_too_large(head: bytes, piece_bytes: int) -> None:
    rig = Rig()
    connection, transport = rig.connect()
    for begin in range(0, len(head), piece_bytes):
        if transport.is_closing():
            break
        connection.data_received(head[begin : begin + piece_bytes])
    assert transport.state == "closed"
    assert transport.written.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert rig.num_calls == 0
    await rig.end()


async def test_a_head_that_never_ends_is_bounded() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(b"GET / HTTP/1.1\r\nx: ")
    num_pieces = 0
    while not transport.is_closing():
        connection.data_received(b"a" * 1000)
        num_pieces += 1
    assert num_pieces == MAX_HEAD_BYTES // 1000 + 1
    await rig.end()


async def test_a_head_of_too_many_headers() -> None:
    rig = Rig()
    head = b"GET / HTTP/1.1\r\nhost: h\r\n"
    most, _ = rig.connect()
    most.data_received(head + b"a: b\r\n" * (MAX_HEADERS - 1) + b"\r\n")
    connection, transport = rig.connect()
    connection.data_received(head + b"a: b\r\n" * MAX_HEADERS + b"\r\n")
    assert transport.state == "closed"
    assert b"the head has more than 256 headers" in transport.written
    await rig.end()
    assert rig.num_calls == 1


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x00" * 99,
    ],
)
async def test_what_is_no_http_is_told_in_the_form_of_errors(garbage: bytes) -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(garbage)
    head, body = transport.written.split(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert json.loads(body)["error"]["code"] == "invalid_value"
    assert transport.state == "closed"
    await rig.end()


async def test_garbage_behind_a_request_does_not_break_into_its_answer() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(REQUEST)
    await rig.run()
    connection.data_received(b"\x00\x01\x02")
    assert (transport.written, transport.state) == (b"", "closed")
    await rig.end()


async def test_requests_in_one_go_are_answered_in_turn_up_to_a_number() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(REQUEST * (MAX_PIPELINED + 1))
    rig.answer.set()
    await rig.run()
    await rig.run()
    assert transport.written.count(b"200 OK") == rig.num_calls == MAX_PIPELINED + 1
    rig.answer.clear()
    connection.data_received(REQUEST * (MAX_PIPELINED + 2))
    assert transport.state == "aborted"
    await rig.end()


@pytest.mark.parametrize("num_behind", [0, 1, 2])
async def test_a_client_that_leaves_ends_what_is_answered(num_behind: int) -> None:
    """Also where other requests came behind: uvicorn tells only the last."""
    rig = LongRig()
    connection, _ = rig.connect()
    connection.data_received(REQUEST * (1 + num_behind))
    await rig.run()
    connection.connection_lost(None)
    await rig.run()
    assert (rig.num_calls, rig.num_left) == (1, 1)
    await rig.end()


async def test_the_end_of_a_connection_is_noticed_behind_a_request_that_waits() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(REQUEST)
    assert transport.is_reading()
    connection.data_received(REQUEST)
    assert transport.is_reading()
    connection.data_received(REQUEST)
    assert not transport.is_reading()
    rig.answer.set()
    await rig.run()
    assert transport.is_reading()
    await rig.end()


async def test_an_answer_that_is_not_read() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    connection.data_received(REQUEST)
    await rig.run()
    connection.pause_writing()
    rig.after(20.0)
    connection.resume_writing()
    rig.after(20.0)
    connection.pause_writing()
    rig.after(30.0)
    assert (transport.state, connection.was_stalled) == ("open", False)
    rig.after(0.1)
    assert (transport.state, connection.was_stalled) == ("aborted", True)
    await rig.end()


async def test_the_end_of_a_closed_connection_that_is_not_taken() -> None:
    rig = Rig()
    _, transport = rig.connect()
    transport.close()
    rig.after(1.0)
    rig.after(5.0)
    assert transport.state == "closed"
    rig.after(0.1)
    assert transport.state == "aborted"
    await rig.end()


async def test_a_body_that_goes_on_after_its_request_was_refused() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    rig.answer.set()
    connection.data_received(HEAD + b"b")
    await rig.run()
    rig.after(10.0)
    assert (transport.written.count(b"200 OK"), transport.state) == (1, "open")
    rig.after(0.1)
    assert transport.state == "aborted"
    await rig.end()


async def test_the_rest_of_a_refused_body_makes_room_for_the_next_request() -> None:
    rig = Rig()
    connection, transport = rig.connect()
    rig.answer.set()
    connection.data_received(HEAD + b"b")
    await rig.run()
    connection.data_received(b"ody" + REQUEST)
    await rig.run()
    rig.after(50.0)
    assert (transport.written.count(b"200 OK"), transport.state) == (2, "open")
    await rig.end()


class StreamRig(Rig):
    """Connections to an application that sends the body back, in an answer without a length."""

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_calls += 1
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<" + body, "more_body": True})
        await send({"type": "http.response.body", "body": b">", "more_body": False})


POST = b"POST /x HTTP/1.1\r\nhost: h\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


def chunks(body: bytes) -> bytes:
    return b"%x\r\n<%b\r\n1\r\n>\r\n0\r\n\r\n" % (len(body) + 1, body)


@pytest.mark.parametrize("num_pieces", [1, 2, 1000])
@pytest.mark.parametrize(
    ("request_bytes", "written", "state"),
    [
        (b"POST /x HTTP/1.0\r\ncontent-length: 2\r\n\r\nab", CLOSING + b"<ab>", "closed"),
        (b"POST /x HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nab", CLOSING + b"<ab>", "closed"),
        (b"POST /x HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nab", CLOSING + b"<ab>", "closed"),
        (b"HEAD /x HTTP/1.0\r\n\r\n", CLOSING, "closed"),
        (POST + b"transfer-encoding: Chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", CHUNKED + chunks(b"ab"), "open"),
        (POST + H2C + b"content-length: 2\r\n\r\nab", CHUNKED + chunks(b"ab"), "open"),
        (POST + H2C + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", CHUNKED + chunks(b"ab"), "open"),
        (
            POST + H2C + b"content-length: 2\r\n\r\nab" + POST + H2C + b"content-length: 2\r\n\r\ncd",
            CHUNKED + chunks(b"ab") + CHUNKED + chunks(b"cd"),
            "open",
        ),
        (
            b"GET /x HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
            CHUNKED + chunks(b""),
            "open",
        ),
    ],
)
async def test_answers_without_a_length_and_requests_of_other_versions(
    request_bytes: bytes, written: bytes, state: str, num_pieces: int
) -> None:
    rig = StreamRig()
    connection, transport = rig.connect()
    size = -(-len(request_bytes) // num_pieces)
    for begin in range(0, len(request_bytes), size):
        connection.data_received(request_bytes[begin : begin + size])
        await rig.run()
    assert (transport.written, transport.state) == (written, state)
    await rig.end()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /x HTTP/1.1\r\ncontent-length: 2\r\n\r\nab", b"400 Bad Request"),
        (POST + b"host: h\r\ncontent-length: 2\r\n\r\nab", b"400 Bad Request"),
        (b"POST /x HTTP/1.0\r\nhost: h\r\nhost: g\r\n\r\n", b"400 Bad Request"),
        (POST + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n", b"501 Not Implemented"),
        (POST + b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", b"501 Not Implemented"),
        (POST + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\nab\r\n0\r\n\r\n", b"400 Bad Request"),
        (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\nabc", b"400 Bad Request"),
        (POST + b"content-length: +2\r\n\r\nab", b"400 Bad Request"),
        (POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n", b"400 Bad Request"),
    ],
)
async def test_a_message_that_has_no_certain_form_is_refused(request_bytes: bytes, status: bytes) -> None:
    rig = StreamRig()
    connection, transport = rig.connect()
    connection.data_received(request_bytes)
    await rig.run()
    assert transport.written.startswith(b"HTTP/1.1 %b\r\n" % status)
    assert (transport.written.count(b"HTTP/1.1 "), transport.state) == (1, "closed")
    await rig.end()
