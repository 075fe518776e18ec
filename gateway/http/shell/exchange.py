"""One HTTP request and its response, on bare ASGI: the body within its limits, the answer at once or as a stream.

    read_body ─> respond                                       at once
    read_body ─> start_stream ─> write* ─> end                 a stream
                 └─ until_disconnect: the client leaves ─> the work inside is cancelled

`write` waits while the connection's buffer is above its mark: a slow reader slows down what is generated for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Final, TypeVar

import msgspec
from starlette.datastructures import Headers as RequestHeaders

from disagg.connections.addresses import join_address
from disagg.gateway.auth.auth import CALLER
from disagg.gateway.auth.shell.tls import name_in
from disagg.gateway.event_loop.shell.turns import LoopTurns, run_cooperatively
from disagg.gateway.http.errors import Headers, SlowBodyError, error_event, error_json
from disagg.gateway.http.shell.unfinished import UnfinishedBodies
from disagg.gateway.http.sites import check_content_type
from disagg.gateway.requests.part_counts import SMALL_BYTES, Cooperative, count_json
from disagg.proto.errors import DisaggError, InvalidRequestError, RequestCancelledError, UnavailableError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON: Final = b"application/json"
_MAX_LENGTH_DIGITS: Final = 18
_SLICE_BYTES: Final = 64 << 10
"""Bytes of a slice of a complete answer. Because it is written in slices, a slow reader holds no more in the connection
than with a stream."""


class Exchange:
    """Owner of one ASGI call.

    Args:
        scope, receive, send: of the call.
        headers: for every response to it.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        self.scope = scope
        self.headers = RequestHeaders(scope=scope)
        self.started = False
        """Whether the response's status has been sent."""
        self.is_stream = False
        """Whether the response is a stream of events, so that an error can be one of them."""
        self.ended = False
        self._receive = receive
        self._send = send
        self._shared = headers
        self.trace_parent = ""
        """The W3C `traceparent` of our span; empty where the client sent none."""
        self.late_headers: Callable[[], Headers] = list
        """Called when the response begins; returns headers whose values are known only then."""
        self.parent_span = ""
        """Id of the client's span; empty where it sent none."""
        self.error_body: Callable[[DisaggError], bytes] = error_json
        """Writes an error before the response began, in the form of the API that is called."""
        self.error_event: Callable[[DisaggError], bytes] = error_event
        """Writes an error as the last event of a stream."""

    @property
    def path_params(self) -> dict[str, str]:
        """Values of the route's path parameters, by name."""
        params: dict[str, str] = self.scope.get("path_params", {})
        return params

    @property
    def peer(self) -> str:
        """Address of the client, as host:port."""
        host, port = self.scope.get("client") or ("", 0)
        return join_address(host, port)

    @property
    def certificate(self) -> str:
        """Common name of the client's certificate, which TLS has verified; empty without one."""
        connection = self.scope.get("state", {}).get("connection")
        return name_in((connection.transport.get_extra_info("peercert") or {}) if connection is not None else {})

    def mark_known(self) -> None:
        """Note that the caller passed authentication: connections without such a caller are closed before this one when
        a new one needs a place."""
        connection = self.scope.get("state", {}).get("connection")
        if connection is not None:
            connection.is_known = True

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the response, whether it is an answer or an error."""
        self._shared.append((name, value))

    async def read_body(self, max_bytes: int, timeout_s: float, unfinished: UnfinishedBodies) -> bytes:
        """The complete body. Until it is complete its bytes count in `unfinished`.

        Raises:
            InvalidRequestError: if it is larger than `max_bytes`; no more than that is kept.
            SlowBodyError: if it does not arrive within `timeout_s`.
            OverloadedError: if the unfinished bodies hold too many bytes, and it is this one that is given up.
            RequestCancelledError: if the client leaves before.
        """
        length = self.headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > _MAX_LENGTH_DIGITS or int(length) > max_bytes):
            raise _too_large(max_bytes)
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            async with unfinished.reading(CALLER.get().tenant, timeout_s) as received:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise RequestCancelledError("the client is gone")
                    pieces.append(message.get("body", b""))
                    num_bytes += len(pieces[-1])
                    if num_bytes > max_bytes:
                        raise _too_large(max_bytes)
                    received(len(pieces[-1]))
                    if not message.get("more_body", False):
                        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except TimeoutError:
            raise SlowBodyError(f"the body did not arrive within {timeout_s:g} s") from None

    async def body_parts(self, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """Yield the parts of a body that is not kept in memory; the reader must limit its size.

        Raises:
            SlowBodyError: if nothing more of it arrives for `timeout_s`.
            RequestCancelledError: if the client leaves before its end.
        """
        more = True
        while more:
            try:
                async with asyncio.timeout(timeout_s):
                    message = await self._receive()
            except TimeoutError:
                raise SlowBodyError(f"nothing more of the body arrived within {timeout_s:g} s") from None
            if message["type"] == "http.disconnect":
                raise RequestCancelledError("the client is gone")
            more = message.get("more_body", False)
            yield message.get("body", b"")

    @asynccontextmanager
    async def until_disconnect(self) -> AsyncGenerator[None, None]:
        """Cancel the work inside when the client disconnects.

        Raises:
            RequestCancelledError: then.
            UnavailableError: `stream_lost`, if it was the server that closed, because the client did not read.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._disconnected(), name="http-disconnect")
        inside, gone = True, False

        def cancel(_: object) -> None:
            nonlocal gone
            if inside and not self.ended:
                gone = True
                task.cancel()

        watcher.add_done_callback(cancel)
        try:
            yield
        except asyncio.CancelledError:
            if not gone or task.uncancel() > 0:
                raise
            raise self._loss() from None
        finally:
            inside = False
            watcher.cancel()
            await asyncio.wait([watcher])

    async def respond_json(self, body: Any) -> None:
        """Send a complete response with `body` as JSON."""
        await self.respond(200, msgspec.json.encode(body))

    async def respond(
        self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers | None = None
    ) -> None:
        """Send a complete response."""
        await self._start(
            status,
            [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or [])],
        )
        for begin in range(0, max(1, len(body)), _SLICE_BYTES):
            end = begin + _SLICE_BYTES
            self.ended = end >= len(body)
            await self._write(body[begin:end], more=end < len(body))

    async def respond_empty(self, headers: Headers) -> None:
        """Send a response without a body."""
        self.ended = True
        await self._start(204, headers)
        await self._write(b"", more=False)

    async def start_download(self, num_bytes: int, content_type: bytes) -> None:
        """Begin a response of this size; then `write` its parts and `end` it. An error can only cut it off."""
        await self._start(200, [(b"content-type", content_type), (b"content-length", b"%d" % num_bytes)])

    async def start_stream(self) -> None:
        """Begin a stream of server-sent events."""
        self.is_stream = True
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        )

    async def write(self, events: bytes) -> None:
        """Send the next part of a stream or download."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes) -> None:
        """Send the last part of a stream or download."""
        self.ended = True
        await self._write(events, more=False)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        date = formatdate(usegmt=True).encode()
        sent = [(b"date", date), *self._shared, *self.late_headers(), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})

    async def _write(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _loss(self) -> RequestCancelledError | UnavailableError:
        connection = self.scope.get("state", {}).get("connection")
        if connection is not None and connection.was_stalled:
            return UnavailableError("the client did not read its stream", "stream_lost")
        return RequestCancelledError("the client is gone")


def _too_large(max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError("body", f"must have at most {max_bytes} bytes")


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Limits of every request body that is read."""

    max_bytes: int
    timeout_s: float
    """Seconds from the end of the head to the end of the body."""
    max_values: int
    """Maximum number of values of a body, in all its lists and objects together."""
    turns: LoopTurns
    """The order in which large bodies are decoded."""
    unfinished: UnfinishedBodies
    """Incomplete bodies of all connections."""

    async def read(self, exchange: Exchange, decode: Callable[[bytes], Cooperative[T]]) -> T:
        """Read the body of `exchange` and decode it with `decode`. A large body waits for its turn, and is counted and
        decoded in pieces, so that many that arrive together are not decoded in one turn of the event loop.

        Raises:
            ContentTypeError: if it is not announced as JSON, or is compressed.
            InvalidRequestError: for too many parts.
            OverloadedError: if too many bytes wait, or unfinished bodies hold too many.
            DisaggError: whatever `Exchange.read_body` and `decode` raise.
        """
        check_content_type(exchange.headers.get("content-type"), exchange.headers.get("content-encoding"))
        return await self.decode(await exchange.read_body(self.max_bytes, self.timeout_s, self.unfinished), decode)

    async def decode(self, body: bytes, decode: Callable[[bytes], Cooperative[T]]) -> T:
        """Decode a complete body as `read` does, with the same errors."""
        if len(body) <= SMALL_BYTES:
            return await run_cooperatively(decode(body))
        async with self.turns.of(CALLER.get().tenant, len(body)):
            await run_cooperatively(count_json(body, self.max_values))
            return await run_cooperatively(decode(body))
