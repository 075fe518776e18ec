"""Where rank 0 waits for its followers: one listening socket, bound before any follower is started.

Every connection goes through the handshake on a thread of its own, so that one that says nothing holds up nobody. The
first one to prove that it is a rank has it; whoever comes for that rank later is refused.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable

from disagg.engine.parallel.handshake import NONCE_BYTES, challenge_follower
from disagg.engine.parallel.line import Line, LineError, SocketLine
from disagg.proto.addresses import join_address
from disagg.proto.cluster_secret import ClusterSecret

logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""Connections that may be in their handshake at once; more are closed unheard."""


class Muster:
    """Takes one line for each of the ranks 1 .. size - 1 and hands it to `on_line`, on any thread.

    Raises:
        OSError: if it cannot listen on `host`.
    """

    def __init__(
        self, host: str, worker_id: str, size: int, secret: ClusterSecret, on_line: Callable[[int, Line], None]
    ) -> None:
        self._worker_id = worker_id
        self._secret = secret
        self._on_line = on_line
        self._lock = threading.Lock()
        self._wanted = set(range(1, size))
        """Ranks that have not come."""
        self._lines: set[Line] = set()
        """Of handshakes under way."""
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_HANDSHAKES)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="ranks-join", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more and take nobody who has not come. Idempotent."""
        with self._lock:
            self._closed = True
            self._wanted.clear()
            lines, self._lines = self._lines, set()
        with contextlib.suppress(OSError):  # it was never connected; this wakes `accept` all the same
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for line in lines:
            line.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    logger.error("%s takes no more ranks: %s", self._worker_id, error)
                return
            line = SocketLine(connection)
            if self._begin(line):
                threading.Thread(target=self._greet, args=(line, peer[0]), name="rank-joins", daemon=True).start()
            else:
                line.close()

    def _begin(self, line: Line) -> bool:
        with self._lock:
            if self._closed or len(self._lines) >= MAX_HANDSHAKES:
                return False
            self._lines.add(line)
            return True

    def _greet(self, line: Line, host: str) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            rank = challenge_follower(line, self._secret, self._worker_id, nonce, self._take)
        except LineError as error:
            logger.warning("%s refused a connection from %s: %s", self._worker_id, host, error)
            self._end(line)
            line.close()
            return
        self._end(line)
        self._on_line(rank, line)

    def _take(self, rank: int) -> bool:
        with self._lock:
            if rank not in self._wanted:
                return False
            self._wanted.remove(rank)
            return True

    def _end(self, line: Line) -> None:
        with self._lock:
            self._lines.discard(line)
