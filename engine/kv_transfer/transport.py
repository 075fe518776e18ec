"""How the bytes of a pair move, as an interface, and their checksum. `transports/factory.py` makes what carries it out.

    D  make_rendezvous(name, host, secret) ──> Rendezvous: its address goes to P in `PairWelcome`
    D  rendezvous.accept(pair_name) ──> PairTransport      both block until the other side is there; so not on an
    P  make_connector(name, host, secret)(pair_name, address) ──> PairTransport            event loop's thread
    P  send(buffer, n, done)   D  recv(buffer, n, done, posted)    any number under way; first in, first out
    both  close()                                                  everything under way is answered, not ok

There are no headers and no tags: the control stream announces which bytes come, in which order, and how many. A size
that differs between the two sides ends the pair, or with gloo the process, so sizes are checked before a receive is
posted.
Workers of several ranks have such a channel for each two ranks (`parallel/transport.py`).

The checksum of a payload (`Checksum`) has a key that only the cluster's processes have. It finds a wrong, torn or
reused buffer, and bytes that another process put into a KV connection: such a process has neither the key nor the
sender's checksum, which comes over the control stream. It is no MAC in the cryptographic sense; ADR 38 has the price of
one. Of host memory it is xxh3-64. Of a device's memory it is a digest that is computed there (`transports/digest.py`),
so that no payload goes through the host: both ends of a pair have their buffers in memory of one kind, or both use the
digest. Where both ends copy between their devices and buffers of the host, each computes the digest on its device, of
what it sends and of what arrived there; then no end of the transport computes a checksum (`skip_checksums`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, Self

import xxhash

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.plan import Buffer
from disagg.proto.handover import Side
from disagg.proto.splitmix import MASK, splitmix64

Done = Callable[[bool, str], None]
"""Called once with (ok, error text), from any thread, perhaps before the call that started the operation returns. The
buffer is the caller's again. Must not raise and must not block."""

Received = Callable[[bool, str, int], None]
"""`Done` of a receive, with the checksum of what came (0 where it is not ok)."""

Posted = Callable[[], None]
"""The receive is posted, so the peer may send. Called at most once, before the receive's `done`, from any thread and
perhaps before `recv` returns; not where the receive fails before. Must not raise and must not block."""


class Checksum:
    """One way of computing checksums; both ends of a pair need the same `seed`, of 64 bits."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @classmethod
    def of_secret(cls, secret: ClusterSecret) -> Self:
        """Checksum of a cluster's workers, keyed with its secret."""
        return cls(int.from_bytes(secret.sign("disagg kv checksum")[:8], "little"))

    def __call__(self, payload: Buffer) -> int:
        """Checksum of a flat uint8 numpy array or tensor in host memory."""
        host: Any = payload.numpy() if hasattr(payload, "numpy") else payload
        return xxhash.xxh3_64_intdigest(memoryview(host), seed=self.seed)

    def of_sums(self, sums: Sequence[int], nbytes: int) -> int:
        """Checksum of `nbytes` bytes with these two sums (`transports/digest.py`): a multilinear hash of all three
        modulo 2^61 - 1."""
        parts = [nbytes, *(part for total in sums for part in (total & _LOW, total >> 32 & _LOW))]
        state = splitmix64(self.seed ^ MASK, 0)  # other keys than those of the sums
        return sum(splitmix64(state, index) % _PRIME * part for index, part in enumerate(parts)) % _PRIME

    def combined(self, checksums: Sequence[int]) -> int:
        """One checksum of a payload in several parts, from those of its parts in order; of a single part its own."""
        if len(checksums) == 1:
            return checksums[0]
        return xxhash.xxh3_64_intdigest(b"".join(part.to_bytes(8, "little") for part in checksums), seed=self.seed)


_LOW = (1 << 32) - 1
_PRIME = (1 << 61) - 1

UNKEYED = Checksum()
"""Checksum without a secret, where there is no cluster."""


def with_checksum(done: Received, buffer: Buffer, nbytes: int, checksum: Callable[[Buffer], int]) -> Done:
    """Answers a receive of `nbytes` bytes into `buffer` with their checksum."""
    return lambda ok, error: done(ok, error, checksum(buffer[:nbytes]) if ok else 0)


def no_checksum(payload: Buffer) -> int:
    """In place of one that nobody looks at."""
    return 0


SET_UP_TIMEOUT_S = 20.0
"""How long `accept` and `connect` wait for the other side."""

CLOSED = "the channel is closed"
"""The error text of an operation on a channel that this side has closed."""
PEER_ENDED = "the peer ended the channel"
"""The error text of an operation on a channel whose other side has ended."""

RANK_OF: Mapping[Side, int] = MappingProxyType({"sender": 0, "receiver": 1})
"""Rank of each side in the group where the two members of a pair meet."""


class TransportError(RuntimeError):
    """The two sides could not be joined."""


def ignore_posted() -> None:
    """The `Posted` of a receive whose sender does not wait for it."""


class PairTransport(Protocol):
    """The byte channel of one pair. Thread-safe."""

    @property
    def name(self) -> str:
        """What moves the bytes, by its name in the configuration; what was chosen, where that is `auto`."""
        ...

    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        """Send the first `nbytes` bytes of `buffer`, which must not change until `done`. Never raises for the peer's
        sake."""
        ...

    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        """Receive `nbytes` bytes into `buffer`, which is the transport's until `done`. The peer may send once `posted`
        was called."""
        ...

    def of_group(self, group: int) -> PairTransport:
        """What moves the payloads of a cache group: between several ranks those of each group are cut in other
        places."""
        return self

    def skip_checksums(self) -> None:
        """Answer the receives that come with any number in place of a checksum: nobody looks at it."""
        return

    def close(self) -> None:
        """End the channel: what is under way is answered not ok, the peer's side fails soon. Returns when no thread
        and no operation is left. Idempotent; may block for a moment."""
        ...


class Rendezvous(Protocol):
    """D's end of the set-up of all its pairs. Thread-safe."""

    @property
    def address(self) -> str:
        """Address where P finds it, as text for `PairWelcome`."""
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
