"""One HTTP connection: uvicorn's protocol, with the limits that it leaves to a proxy.

    accepted ──> idle ──> head ──> body, answer ──> idle ...      `HttpConnection` notes since when
       └─ too many: the one that has been silent longest is closed; without one, the new one

`Connections` looks at all of them once in a while and closes those that are silent before or between requests, send
their head too slowly, leave an answer unread, or do not take the end of a closed one. Bytes of one connection that wait
in this process are bounded: `WRITE_BUFFER_BYTES` and one write, in both directions.

Messages are those of RFC 9112, also where uvicorn leaves it: an answer without a length to a client of HTTP/1.0 ends
with the connection, a request has one `Host`, and one that asks for another protocol is answered in this one.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import httptools
import uvicorn
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from disagg.gateway.http.errors import error_json
from disagg.gateway.http.idle_connections import SilentConnections
from disagg.proto.errors import InvalidRequestError

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES: Final = 64 << 10
"""Unsent bytes of one connection above which writing waits. One write may come on top."""
MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum bytes of request line and headers together."""
MAX_HEADERS: Final = 256
"""Maximum number of headers of one request: each costs a few Python calls."""
MAX_PIPELINED: Final = 16
"""Maximum number of requests that wait behind the one that is being answered."""
_LINGER_S: Final = 5.0
"""Seconds that a closing connection may take to send its remaining bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of the number of connections and of the times of each."""

    max_connections: int
    """Maximum number of open connections. A further one replaces one without a request; if all have one, it is
    closed."""
    idle_timeout_s: float
    """Seconds without a request, before the first one and between two."""
    head_timeout_s: float
    """Seconds from the first byte of a request to the end of its head."""
    write_timeout_s: float
    """Seconds for which a client may leave its answer unread."""


class Connections:
    """All connections of one server, and their limits. Owner of `state`, which uvicorn fills.

    Args:
        config: uvicorn's, loaded.
        limits: for each connection.
        clock: monotonic seconds.
    """

    def __init__(self, config: uvicorn.Config, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self.config = config
        self.limits = limits
        self.clock = clock
        self.state = ServerState()
        self.silent: SilentConnections[HttpConnection] = SilentConnections()
        self._num_evicted = 0
        self._num_refused = 0
        self.none_left = asyncio.Event()
        self.none_left.set()

    def make(self) -> HttpConnection:
        """The protocol for a new connection."""
        return HttpConnection(self)

    def make_room(self) -> bool:
        """Whether there is a place for one more connection. If there are too many, closes the one that has been silent
        longest."""
        if len(self.state.connections) < self.limits.max_connections:
            return True
        victim = self.silent.take()
        if victim is None:
            self._num_refused += 1
            return False
        self._num_evicted += 1
        self.state.connections.discard(victim)  # its end is noticed only in the loop's next round
        victim.transport.abort()
        return True

    def sweep(self) -> None:
        """Close connections that exceed a timeout, and log connections that were closed or refused at the limit since
        the last sweep."""
        if self._num_evicted or self._num_refused:
            logger.warning(
                "all %d HTTP connections (gateway.max_connections) in use, closed %d idle ones for new ones, refused %d"
                " new ones because every connection had a request",
                self.limits.max_connections,
                self._num_evicted,
                self._num_refused,
            )
            self._num_evicted = self._num_refused = 0
        now = self.clock()
        for connection in list(self.state.connections):
            assert isinstance(connection, HttpConnection)
            connection.check(now)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with the limits of the head and the times that `Connections` checks."""

    def __init__(self, owner: Connections) -> None:
        super().__init__(config=owner.config, server_state=owner.state, app_state={"connection": self})
        self.access_log = False
        self.was_stalled = False
        """Whether the connection was closed because the client did not read."""
        self.is_known = False
        """Whether a request on this connection has passed authentication."""
        self._owner = owner
        self._idle_since: float | None = None
        self._head_since: float | None = None
        self._stalled_since: float | None = None
        self._surplus_since: float | None = None
        """Time since which the body of an already answered, usually refused, request is still arriving."""
        self._closed_since: float | None = None
        self._num_head_bytes = 0
        self._num_headers = 0
        self._is_head_known = False
        """Whether the parser reads a head again whose request has begun."""
        self._answered: RequestResponseCycle | None = None
        """The request that is or was last being answered; uvicorn has only the one that arrived last."""

    # ------------------------------------------------------------ transport

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        if not self._owner.make_room():
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._owner.none_left.clear()
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._idle_since = self._owner.clock()
        self._owner.silent.add(self, is_known=False)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._owner.silent.remove(self)
        super().connection_lost(exc)
        if not self.connections:
            self._owner.none_left.set()

    @override
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        in_head = self._head_since is not None
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("is no HTTP/1.1")
        if in_head and self._head_since is not None:
            self._is_head_too_large(len(data))

    @override
    def pause_writing(self) -> None:
        self._stalled_since = self._owner.clock()
        super().pause_writing()

    @override
    def resume_writing(self) -> None:
        self._stalled_since = None
        super().resume_writing()

    # ------------------------------------------------------------ parser

    def _parse(self, data: bytes) -> None:
        """Have the parser read all of `data`. Raises `httptools.HttpParserError`."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self._decline_upgrade()

    def _decline_upgrade(self) -> None:
        """Go on in HTTP/1.1 behind a head that asks for another protocol, such as HTTP/2 of a client that can do both.
        The parser takes what follows for that protocol; another one, which never saw the request, reads its body."""
        framing = (b"content-length", b"transfer-encoding")
        head = b"".join(b"%b: %b\r\n" % each for each in self.headers if each[0] in framing)
        self.parser = httptools.HttpRequestParser(self)
        self._is_head_known = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)
        self._is_head_known = False

    def on_message_begin(self) -> None:
        """Start the timeout of a new request's head."""
        if self._is_head_known:
            return
        super().on_message_begin()
        self._idle_since, self._head_since = None, self._owner.clock()
        self._num_head_bytes = self._num_headers = 0

    def on_url(self, url: bytes) -> None:
        """Count the bytes of a part of the request line."""
        if self._is_head_known:
            return
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a complete header. Too many or too large ones are answered with 400."""
        if self._is_head_known:
            return
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self.send_400_response(f"the head has more than {MAX_HEADERS} headers")
            raise ValueError("too many headers")  # ends the parser's run
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the timeout of the head: the request is answered now, or waits for its turn."""
        if self._is_head_known:
            return
        self._head_since = None
        self._owner.silent.remove(self)
        if self.parser.get_http_version() == "0.9":
            self.send_400_response("there is no HTTP version in the request line")
            raise ValueError("HTTP/0.9")  # ends the parser's run
        self._check_head(self.parser.get_http_version())
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()
            raise ValueError("too many requests in one go")  # ends the parser's run
        if len(self.pipeline) == 1:
            self.flow.resume_reading()  # a connection that is not read from does not show that its client is gone

    def _check_head(self, version: str) -> None:
        """Answer a head that is no complete one with an error. Raises `ValueError`, which ends the parser's run."""
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (not num_hosts and version != "1.0"):
            self.send_400_response(f"must have one Host header, not {num_hosts}")
            raise ValueError("no host, or several")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and b", ".join(codings).lower() != b"chunked":
            self._refuse(b"501 Not Implemented", "has a transfer coding that is not supported: use chunked only")
            raise ValueError("a transfer coding")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # no client of it knows such an answer
            app = _ends_by_closing(cycle, app)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the idle timeout once no request is left."""
        super().on_response_complete()
        if self.cycle.response_complete and self in self.connections:
            self._owner.silent.add(self, is_known=self.is_known)
        if self._head_since is None and self.cycle.response_complete:
            self._idle_since = self._owner.clock()
            self._surplus_since = self._idle_since if self.cycle.more_body else None

    def on_message_complete(self) -> None:
        """End the timeout of an answered request's remaining body."""
        if self.parser.should_upgrade():
            return  # the body, which the parser did not look for, comes still
        super().on_message_complete()
        self._surplus_since = None

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error and close. While an answer is being sent, only close."""
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or self._gives_up_body():
            body = error_json(InvalidRequestError("request", message))
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n" % status
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()

    def _gives_up_body(self) -> bool:
        """End the request whose body is invalid, if its answer did not begin. False where there is no such request."""
        cycle = self.cycle
        if cycle is not self._answered or not cycle.more_body or cycle.response_started:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    # ------------------------------------------------------------ time

    def check(self, now: float) -> None:
        """Close the connection if it exceeds a timeout."""
        limits = self._owner.limits
        if self.transport.is_closing():
            self._closed_since = now if self._closed_since is None else self._closed_since
        if _is_over(self._stalled_since, limits.write_timeout_s, now):
            self.was_stalled = True
            self.transport.abort()
        elif (
            _is_over(self._idle_since, limits.idle_timeout_s, now)
            or _is_over(self._head_since, limits.head_timeout_s, now)
            or _is_over(self._surplus_since, limits.head_timeout_s, now)
            or _is_over(self._closed_since, _LINGER_S, now)
        ):
            self.transport.abort()

    def _count_head(self, num_bytes: int) -> None:
        if self._is_head_too_large(num_bytes):
            raise ValueError("the head is too large")  # ends the parser's run

    def _is_head_too_large(self, num_bytes: int) -> bool:
        """Whether the head is too large with these further bytes. If so, an error is sent and the connection closes."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.send_400_response(f"the head has more than {MAX_HEAD_BYTES} bytes")
        return self._num_head_bytes > MAX_HEAD_BYTES


def _ends_by_closing(cycle: RequestResponseCycle, app: Any) -> Any:
    """The application, whose answers without a length end with the connection: clients of HTTP/1.0 know no chunks."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_unchunked(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return run


def _is_over(since: float | None, timeout_s: float, now: float) -> bool:
    return since is not None and now - since > timeout_s


def make_config(app: Any, idle_timeout_s: float) -> uvicorn.Config:
    """uvicorn's settings, loaded: only HTTP/1.1, no logs of requests, no headers of its own."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=HttpConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=max(1, math.ceil(idle_timeout_s)),
    )
    config.load()
    return config
