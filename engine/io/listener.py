"""A listening socket that takes processes of the cluster only: each connection goes through the handshake first.

Handshakes run on threads of their own, so that a connection that sends nothing delays no other.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable

from disagg.engine.io.connection import Connection, ConnectionFailedError, SocketConnection
from disagg.engine.io.handshake import NONCE_BYTES, Purpose, challenge
from disagg.proto.addresses import join_address
from disagg.proto.cluster_secret import ClusterSecret

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""Connections that may be in their handshake at once. The oldest is closed for a new one: an honest one is done within
milliseconds."""
RETRY_S = 0.1


class AuthenticatedListener:
    """Accepts connections at `address`.

    Args:
        host: the address to listen on; nothing else is listened on.
        takes: (name, rank) -> whether a joiner that proved to be this may come in. Any thread.
        on_connection: called with (name, rank, connection) on the connection's own thread, which may stay there.

    Raises:
        OSError: if it cannot listen on `host`.
    """

    def __init__(
        self,
        host: str,
        secret: ClusterSecret,
        purpose: Purpose,
        takes: Callable[[str, int], bool],
        on_connection: Callable[[str, int, Connection], None],
    ) -> None:
        self._secret = secret
        self._purpose: Purpose = purpose
        self._takes = takes
        self._on_connection = on_connection
        self._lock = threading.Lock()
        self._connections: dict[Connection, None] = {}
        """Of handshakes under way, the oldest first."""
        self._threads: list[threading.Thread] = []
        """Of connections; also some that have ended."""
        self._is_over = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"{purpose} listener", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it still listens."""
        return not self._is_over.is_set()

    def close(self) -> None:
        """Listen no more, and end the handshakes under way. Idempotent."""
        with self._lock:
            self._is_over.set()
            connections, self._connections = self._connections, {}
        with contextlib.suppress(OSError):  # it was never connected; this wakes `accept` all the same
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.close()
        self._thread.join()

    def join(self) -> None:
        """After `close`: wait until `on_connection` has returned for every connection."""
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError as error:
                if self._is_over.is_set():
                    return
                # Such as no free descriptor: soon there may be one.
                logger.error("%s cannot take a connection, tries again in %g s: %s", self.address, RETRY_S, error)
                self._is_over.wait(RETRY_S)
                continue
            connection = SocketConnection(sock)
            if not self._begin(connection):
                connection.close()
                continue
            name = f"{self._purpose} joins"
            thread = threading.Thread(target=self._greet, args=(connection, peer[0]), name=name, daemon=True)
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]
            thread.start()

    def _begin(self, connection: Connection) -> bool:
        with self._lock:
            if self._is_over.is_set():
                return False
            oldest = next(iter(self._connections)) if len(self._connections) >= MAX_HANDSHAKES else None
            if oldest is not None:
                del self._connections[oldest]
            self._connections[connection] = None
        if oldest is not None:
            oldest.close()
        return True

    def _greet(self, connection: Connection, host: str) -> None:
        try:
            name, rank = challenge(
                connection, self._secret, self._purpose, secrets.token_bytes(NONCE_BYTES), self._takes
            )
        except ConnectionFailedError as error:
            logger.warning("%s refused a connection from %s: %s", self.address, host, error)
            self._end(connection)
            connection.close()
            return
        self._end(connection)
        self._on_connection(name, rank, connection)

    def _end(self, connection: Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)
