"""Where rank 0 waits for its followers: bound before any follower is started.

The first connection to prove that it is a rank has it; one that comes for that rank later is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from disagg.engine.io.connection import Connection
from disagg.engine.io.listener import AuthenticatedListener
from disagg.proto.cluster_secret import ClusterSecret


class RankRendezvous:
    """Takes one connection for each of the ranks 1 .. size - 1 and hands it to `on_connection`, on any thread.

    Raises:
        OSError: if it cannot listen on `host`.
    """

    def __init__(
        self,
        host: str,
        worker_id: str,
        size: int,
        secret: ClusterSecret,
        on_connection: Callable[[int, Connection], None],
    ) -> None:
        self._worker_id = worker_id
        self._lock = threading.Lock()
        self._wanted = set(range(1, size))
        """Ranks that have not come."""
        self._listener = AuthenticatedListener(
            host, secret, "rank connection", self._take, lambda _, rank, connection: on_connection(rank, connection)
        )
        self.address = self._listener.address

    def close(self) -> None:
        """Listen no more and take no rank that has not come. Idempotent."""
        with self._lock:
            self._wanted.clear()
        self._listener.close()

    def _take(self, worker_id: str, rank: int) -> bool:
        with self._lock:
            if worker_id != self._worker_id or rank not in self._wanted:
                return False
            self._wanted.remove(rank)
            return True
