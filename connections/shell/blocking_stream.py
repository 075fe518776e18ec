"""A stream to another process of the cluster with blocking calls, on a thread of its own, which any thread may end.

    start ──> [ resolve ──> open a channel ──> one call at a time ──break──> pause ] again and again ──stop──> joined

For streams that must work while the event loop of the process is busy, or without one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import grpc

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.channels import open_blocking_channel

Resolve = Callable[[], str]
"""Returns the present host:port of the controller; may block. An exception counts as a controller that cannot be
reached."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
"""The longest pause between two tries, in seconds, and before it the first one."""
JOIN_TIMEOUT_S = 5.0


class BlockingStream:
    """Owner of its thread, its channel and its call. A subclass has the loop of tries, which the thread runs.

    Args:
        method: full name of the gRPC method, both sides of which are streams.
        resolve: called before every try, because the other process may have moved.
        secret: the cluster's secret.
    """

    def __init__(self, method: str, resolve: Resolve, secret: ClusterSecret) -> None:
        self._method = method
        self._resolve = resolve
        self._secret = secret
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        """The call under way. `stop` cancels it. Guarded by the lock, which also orders it against `stop`."""
        self._thread: threading.Thread | None = None

    def stop(self) -> None:
        """End the call and the thread. Idempotent; must not be called on the thread."""
        with self._lock:
            self._stopped.set()
            if self._call is not None:
                self._call.cancel()  # type: ignore[no-untyped-call]
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)  # longer only where `resolve` hangs

    def _start(self, name: str, run: Callable[[], None]) -> None:
        """Run `run` on a thread of that name; it ends soon after `_stopped` is set."""
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def _replies(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Make one call: sends `messages`, which gRPC reads one ahead on a thread of its own, and yields the replies
        until either side ends it. Raises `grpc.RpcError`, and what `resolve` raises."""
        with open_blocking_channel(self._resolve(), self._secret) as channel:
            with self._lock:
                if self._stopped.is_set():
                    return
                method = channel.stream_stream(self._method, None, None)
                self._call = call = method(messages, metadata=self._secret.metadata)
            try:
                yield from call
            finally:
                with self._lock:
                    self._call = None
