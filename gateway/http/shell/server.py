"""The HTTP server on the gateway's own event loop.

start: bind, listen ──> stop: no new connections, idle ones close ── at most grace_s ──> running answers are cancelled
──> connections closed

It installs no signal handlers and starts no thread; when `stop` returns no task and no connection is left.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, Protocol

from disagg.gateway.http.shell.exchange import Receive, Scope, Send
from disagg.gateway.http.shell.protocol import ConnectionLimits, Connections, make_config

_BACKLOG: Final = 2048
_ACCEPTS_A_TURN: Final = 32
"""Number of connections that are accepted in one turn of the event loop, which takes about a millisecond."""
_SEND_BUFFER_BYTES: Final = 64 << 10
"""Size of the kernel's send buffer of a connection, which the kernel doubles. Tokens need no more, and it limits what
an unread stream holds."""
_HANDSHAKE_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 0.5
"""Seconds that closing connections may take to send their last bytes."""
_SWEEPS_A_TIMEOUT: Final = 4


class App(Protocol):
    """An ASGI application that is told when its server stops."""

    stopping: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI call, which is one request."""


class HttpServer:
    """Owner of the listening socket and of all connections.

    Args:
        app: what answers.
        limits: of connections.
        clock: monotonic seconds.
        tls: serves HTTPS.
    """

    def __init__(
        self,
        app: App,
        limits: ConnectionLimits,
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._app = app
        self._tls = tls
        self._connections = Connections(make_config(app, limits.idle_timeout_s), limits, clock)
        self._sweep_s = min(limits.idle_timeout_s, limits.head_timeout_s, limits.write_timeout_s) / _SWEEPS_A_TIMEOUT
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int, *, shares_port: bool = False) -> int:
        """Bind and listen. Returns the port, also where `port` is 0. With `shares_port` other processes may listen
        there, too. Raises `OSError` if the address cannot be bound."""
        listener = _bind(host, port, shares_port)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connections.make,
                sock=listener,
                ssl=self._tls,
                backlog=_ACCEPTS_A_TURN,  # asyncio accepts as many in a row as may wait
                ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S if self._tls else None,
                ssl_shutdown_timeout=_CLOSE_TIMEOUT_S if self._tls else None,
            )
        except BaseException:
            listener.close()
            raise
        listener.listen(_BACKLOG)
        self._sweep()
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, give running requests `grace_s` seconds, cancel the rest. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        state = self._connections.state
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks and grace_s > 0:
            await asyncio.wait(state.tasks, timeout=grace_s)
        self._app.stopping = True
        while state.tasks:
            for task in state.tasks:
                task.cancel()
            await asyncio.wait(state.tasks)
        await self._close_connections()
        if self._sweeper is not None:
            self._sweeper.cancel()
        await server.wait_closed()

    async def _close_connections(self) -> None:
        for connection in list(self._connections.state.connections):
            connection.transport.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._connections.none_left.wait()
        except TimeoutError:
            for connection in list(self._connections.state.connections):
                connection.transport.abort()
            await self._connections.none_left.wait()

    def _sweep(self) -> None:
        self._connections.sweep()
        self._sweeper = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)


def _bind(host: str, port: int, shares_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port),
        family=family,
        backlog=_BACKLOG,
        reuse_port=shares_port,
        dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
    )
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
    listener.setblocking(False)
    return listener
