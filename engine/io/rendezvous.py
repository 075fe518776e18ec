"""Process groups of torch without a global world: the members of a group find each other through a small store.

    one process   server = RendezvousServer(host, secret)              gives `server.address` to the others
    each member   with member_store(name, address, secret, rank, size, timeout_s) as store:     blocks for the others
                      group = gloo_group(store, ...)                   or NCCL's, made by the caller

Torch's own TCPStore has no password: any process that reaches its port reads and writes the entries of every group.
Here each member first proves that it has the cluster's secret (`handshake.py`), and sees the entries of its own group
only. The server forwards each entry to the other members; they keep them, and wait for those that are missing.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import torch
import torch.distributed

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import Connection, ConnectionFailedError, connect
from disagg.connections.shell.handshake import NONCE_BYTES, AuthenticatedListener, answer, closed_after
from disagg.proto.messages import Message, decoder

# ---------------------------------------------------------------- store


logger = logging.getLogger(__name__)

MAX_KEY_CHARS: Final = 256
MAX_VALUE_BYTES: Final = 64 << 10
MAX_ENTRIES: Final = 1024
"""Maximum number of entries of a group. Gloo makes one for each member, of 170 bytes for two members."""
_MAX_FRAME_BYTES: Final = MAX_VALUE_BYTES + 4096


class Entry(Message, frozen=True, kw_only=True, tag=True):
    """One entry of a group's store: from the member that sets it, then to the others."""

    key: Annotated[str, msgspec.Meta(max_length=MAX_KEY_CHARS)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES)]


class _Group:
    """The members of one group that are connected, and their entries."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connections: dict[int, Connection] = {}
        self.entries: list[Entry] = []


class RendezvousServer:
    """The listening side. A group's entries are forgotten when its last member has left.

    Args:
        host: the address to listen on; nothing else is listened on.

    Raises:
        OSError: if it cannot listen there.
    """

    def __init__(self, host: str, secret: ClusterSecret) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._taken: set[tuple[str, int]] = set()
        self._listener = AuthenticatedListener(host, secret, "rendezvous", self._take, self._serve)
        self.address = self._listener.address

    @property
    def is_open(self) -> bool:
        """Whether it still listens."""
        return self._listener.is_open

    def close(self) -> None:
        """Listen no more, and end the connections of all members. Idempotent."""
        self._listener.close()
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            with group.lock:
                connections = list(group.connections.values())
            for connection in connections:
                connection.close()
        self._listener.join()

    def _take(self, name: str, rank: int) -> bool:
        with self._lock:
            if (name, rank) in self._taken or not self._listener.is_open:
                return False
            self._taken.add((name, rank))
            return True

    def _serve(self, name: str, rank: int, connection: Connection) -> None:
        with self._lock:
            group = self._groups.setdefault(name, _Group())
            with group.lock:
                group.connections[rank] = connection
        try:
            with group.lock:
                for entry in group.entries:
                    connection.send(entry)
            if self._listener.is_open:  # else `close` may not have seen this connection
                _forward_all(group, rank, connection)
        except (ConnectionFailedError, msgspec.MsgspecError) as error:
            logger.warning("%s: rank %d of group %r left: %s", self.address, rank, name, error)
        finally:
            with self._lock, group.lock:
                del group.connections[rank]
                self._taken.discard((name, rank))
                if not group.connections:
                    del self._groups[name]
            connection.close()


def _forward_all(group: _Group, rank: int, connection: Connection) -> None:
    """Until the member leaves. ConnectionFailedError or MsgspecError where it breaks the rules."""
    while (frame := connection.receive(_MAX_FRAME_BYTES)) is not None:
        entry = decoder(Entry).decode(frame)
        with group.lock:
            if len(group.entries) >= MAX_ENTRIES:
                raise ConnectionFailedError(f"a group has at most {MAX_ENTRIES} entries")
            group.entries.append(entry)
            for other, other_connection in group.connections.items():
                if other != rank:
                    _send_or_drop(other_connection, entry)


def _send_or_drop(connection: Connection, entry: Entry) -> None:
    try:
        connection.send(entry)
    except ConnectionFailedError:
        connection.close()  # its own thread notices


_dist: Any = torch.distributed
"""Untyped: torch's stubs lack it."""


class MemberStore(_dist.Store):  # type: ignore[misc]  # see above
    """One member's store, as torch's process groups use it: `set`, `get`, `wait` and `check` of entries that are never
    changed. Thread-safe, but a member that waits holds up the others of this store."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._entries: dict[str, bytes] = {}
        self._closed = False

    def set(self, key: str, value: str | bytes) -> None:
        """Give an entry to all members; after `close`, to no other one. RuntimeError if they cannot be reached."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._lock:
            self._entries[key] = data
            if not self._closed:
                self._connection.send(Entry(key=key, value=data))

    def get(self, key: str) -> bytes:
        """An entry; waits for it as `wait` does."""
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them have come; does not read what is on its way."""
        return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all of them have come.

        Raises:
            RuntimeError: they do not come in time, or the rendezvous server is gone.
        """
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        with self._lock:
            missing = {key for key in keys if key not in self._entries}
            if not missing:
                return
            since = time.monotonic()
            try:
                with closed_after(self._connection, seconds):
                    while missing:
                        missing.discard(self._receive())
            except ConnectionFailedError as error:
                waited_s = time.monotonic() - since
                why = f": {error}" if waited_s < seconds else ""
                raise RuntimeError(f"{sorted(missing)} did not come in {waited_s:.1f} s{why}") from error

    def _receive(self) -> str:
        frame = self._connection.receive(_MAX_FRAME_BYTES)
        if frame is None:
            raise ConnectionFailedError("the rendezvous server was closed")
        try:
            entry = decoder(Entry).decode(frame)
        except msgspec.MsgspecError as error:
            raise ConnectionFailedError(f"not an entry: {error}") from error
        self._entries[entry.key] = entry.value
        return entry.key

    def close(self) -> None:
        """Leave the rendezvous server. What came can still be read. Idempotent."""
        self._closed = True
        self._connection.close()


def join_rendezvous(address: str, secret: ClusterSecret, name: str, rank: int, timeout_s: float) -> MemberStore:
    """Become member `rank` of the group `name`, whose members meet at `address`.

    Raises:
        RuntimeError: there is no rendezvous server, or it does not have the secret, or refuses.
    """
    connection = connect(address, timeout_s)
    try:
        answer(connection, secret, "rendezvous", name, rank, secrets.token_bytes(NONCE_BYTES))
    except BaseException:
        connection.close()
        raise
    return MemberStore(connection, timeout_s)


# ---------------------------------------------------------------- groups


_PROOF_TAG: Final = 0
_PROOF_BYTES: Final = 32


@contextlib.contextmanager
def member_store(
    name: str, address: str, secret: ClusterSecret, rank: int, size: int, timeout_s: float
) -> Iterator[MemberStore]:
    """Wait at the `RendezvousServer` at `address` until all `size` ranks of the group `name` are there; their store,
    until the group is made.

    Raises:
        OSError, RuntimeError, ValueError: if they do not all come in time, or there is no rendezvous server.
    """
    store = join_rendezvous(address, secret, name, rank, timeout_s)
    try:
        store.set(f"here/{rank}", b"1")
        store.wait([f"here/{other}" for other in range(size)], datetime.timedelta(seconds=timeout_s))
        yield store
    finally:
        store.close()


def gloo_group(
    store: MemberStore, secret: ClusterSecret, name: str, rank: int, size: int, host: str, timeout_s: float
) -> Any:
    """A group over TCP that is bound to `host` only, whose members have proved to each other over its own connections
    that they know the cluster's secret. `timeout_s` is for its set-up and, by default, each operation.

    Raises:
        RuntimeError: if it cannot be formed, or a member proves nothing.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = datetime.timedelta(seconds=timeout_s)
    group = _dist.ProcessGroupGloo(store, rank, size, options)
    prove_members(group, secret, name, rank, size)
    return group


def prove_members(group: Any, secret: ClusterSecret, name: str, rank: int, size: int) -> None:
    """Challenge each other member over the group's own connections: gloo takes whoever comes first to a port of its.
    Each sends 32 random bytes, and gets them back in an HMAC with the cluster's secret.

    Raises:
        RuntimeError: a member does not know the secret, or the connection broke.
    """
    others = [other for other in range(size) if other != rank]
    sent = {other: secrets.token_bytes(_PROOF_BYTES) for other in others}
    received = _exchange(group, sent)
    proofs = _exchange(
        group, {other: _proof(secret, name, rank, other, received[other] + sent[other]) for other in others}
    )
    for other in others:
        expected = _proof(secret, name, other, rank, sent[other] + received[other])
        if not hmac.compare_digest(proofs[other], expected):
            raise RuntimeError(f"rank {other} of {name!r} does not know the cluster's secret")


def _proof(secret: ClusterSecret, name: str, giver: int, taker: int, nonces: bytes) -> bytes:
    return secret.sign("disagg group connection", name, giver, taker, nonces)


def _exchange(group: Any, outgoing: dict[int, bytes]) -> dict[int, bytes]:
    """Send each other member its `_PROOF_BYTES` bytes; theirs for this one."""
    sending = {other: torch.frombuffer(bytearray(data), dtype=torch.uint8) for other, data in outgoing.items()}
    incoming = {other: torch.empty(_PROOF_BYTES, dtype=torch.uint8) for other in outgoing}
    works = [group.recv([tensor], other, _PROOF_TAG) for other, tensor in incoming.items()]
    works += [group.send([tensor], other, _PROOF_TAG) for other, tensor in sending.items()]
    for work in works:
        work.wait()
    return {other: tensor.numpy().tobytes() for other, tensor in incoming.items()}
