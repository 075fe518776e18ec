"""How the bytes of a pair move, as an interface, and the door to what carries it out.

    D  make_rendezvous(name, host, secret) ──> Rendezvous: its address goes to P in `PairWelcome`
    D  rendezvous.accept(pair_name) ──> PairTransport      both block until the other side is there; so not on an
    P  make_connector(name, host, secret)(pair_name, address) ──> PairTransport            event loop's thread
    P  send(buffer, n, done)   D  recv(buffer, n, done, posted)    any number under way; first in, first out
    both  close()                                                  everything under way is answered, not ok

There are no headers and no tags: the control stream says which bytes come, in which order, and how many. A size that
differs between the two sides ends the pair, or with gloo the process, so sizes are checked before a receive is posted.
Workers of several ranks have such a channel for each two ranks (`parallel/transport.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from disagg.engine.kv_transfer.transports.checksum import Checksum
from disagg.engine.plan import Buffer

Done = Callable[[bool, str], None]
"""Called once with (ok, error text), from any thread, perhaps before the call that started the operation returns. The
buffer is the caller's again. Must not raise and must not block."""

Received = Callable[[bool, str, int], None]
"""`Done` of a receive, with the checksum of what came (0 where it is not ok)."""

Posted = Callable[[], None]
"""The receive is posted, so the peer may send. Called at most once, before the receive's `done`, from any thread and
perhaps before `recv` returns; not where the receive fails before. Must not raise and must not block."""


def with_checksum(done: Received, buffer: Buffer, nbytes: int, checksum: Checksum) -> Done:
    """Answers a receive of `nbytes` bytes into `buffer` with their checksum."""
    return lambda ok, error: done(ok, error, checksum(buffer[:nbytes]) if ok else 0)


SET_UP_TIMEOUT_S = 20.0
"""How long `accept` and `connect` wait for the other side."""

CLOSED = "the channel is closed"
"""The error text of an operation on a channel that this side has closed."""


class TransportError(RuntimeError):
    """The two sides could not be joined."""


def nobody_waits() -> None:
    """The `Posted` of a receive whose sender needs no leave."""


class PairTransport(Protocol):
    """The byte channel of one pair. Thread-safe."""

    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        """Send the first `nbytes` bytes of `buffer`, which must not change until `done`. Never raises for the peer's
        sake."""
        ...

    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = nobody_waits) -> None:
        """Receive `nbytes` bytes into `buffer`, which is the transport's until `done`. The peer may send once `posted`
        was called."""
        ...

    def close(self) -> None:
        """End the channel: what is under way is answered not ok, the peer's side fails soon. Returns when no thread
        and no operation is left. Idempotent; may block for a moment."""
        ...


class Rendezvous(Protocol):
    """D's meeting point of all its pairs. Thread-safe."""

    @property
    def address(self) -> str:
        """What P needs to know."""
        ...

    def accept(self, pair_name: str) -> PairTransport:
        """Wait for P under this name, which is used once.

        Raises:
            TransportError: if P does not come in time, or the channel cannot be made.
        """
        ...

    def close(self) -> None:
        """Take no more pairs. Pairs that were made live on. Idempotent."""
        ...


Connector = Callable[[str, str], PairTransport]
"""(pair_name, address of D's rendezvous) -> the pair's channel. Raises `TransportError` like `Rendezvous.accept`."""
