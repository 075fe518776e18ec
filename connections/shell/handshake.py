"""How two processes of a cluster authenticate each other on a connection, before anything else is sent on it.

    listener    Challenge(nonce) ─────────────────────────> joiner
    listener    <── Introduction(name, rank, nonce, proof) ── joiner
    listener    Welcome(proof) ───────────────────────────> joiner

A proof is an HMAC, keyed with the cluster's secret, over the purpose of the connection, which side gives it, both
nonces, the name of what is joined and the rank in it. So each side verifies that the other one has the secret and
answers now, for this rank of this worker or pair; the secret itself is never sent. A wrong proof gets no answer.

`AuthenticatedListener` accepts connections and runs the listener's part, each on a thread of its own, so that a
connection that sends nothing delays no other.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from disagg.connections.addresses import join_address
from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell.connection import Connection, ConnectionFailedError, SocketConnection
from disagg.proto.messages import Message, decoder

NONCE_BYTES: Final = 32
TIMEOUT_S: Final = 10.0
"""Seconds that each side waits for the other, over the whole handshake."""
MAX_HANDSHAKE_BYTES: Final = 4096

Purpose = Literal["rank connection", "rendezvous", "kv link"]
"""Purpose of a connection: a follower's connection to rank 0 of its worker, a member's connection to a
`RendezvousServer`, or the control messages of a pair whose KV travels by NIXL."""
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
M = TypeVar("M", bound=Message)


class Challenge(Message, frozen=True, kw_only=True, tag=True):
    """The listener's first frame."""

    nonce: Nonce


class Introduction(Message, frozen=True, kw_only=True, tag=True):
    """The joiner's first frame."""

    name: Annotated[str, msgspec.Meta(max_length=512)]
    """Name of the worker or the pair that is joined."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    nonce: Nonce
    proof: bytes


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The listener accepts the joiner."""

    proof: bytes


class HandshakeError(ConnectionFailedError):
    """The other side did not authenticate itself, or did not answer."""


def proof(
    secret: ClusterSecret,
    purpose: Purpose,
    giver: Literal["listener", "joiner"],
    nonces: bytes,
    name: str,
    rank: int,
) -> bytes:
    """The proof that `giver` sends; `nonces` are the listener's and the joiner's, concatenated."""
    return secret.sign(f"disagg {purpose}", giver, nonces, name, rank)


def challenge(
    connection: Connection, secret: ClusterSecret, purpose: Purpose, nonce: bytes, accepts: Callable[[str, int], bool]
) -> tuple[str, int]:
    """The listener's part; returns the name and the rank that the other side proved to be, if the listener `accepts`
    it.

    Raises:
        ConnectionFailedError: the other side proved nothing, is not expected, or the connection broke.
    """
    with closed_after(connection, TIMEOUT_S):
        connection.send(Challenge(nonce=nonce))
        introduction = _receive(connection, Introduction)
    nonces, who = nonce + introduction.nonce, (introduction.name, introduction.rank)
    if not hmac.compare_digest(introduction.proof, proof(secret, purpose, "joiner", nonces, *who)):
        raise HandshakeError("it does not know the cluster's secret")
    if not accepts(*who):
        raise HandshakeError(f"rank {introduction.rank} of {introduction.name!r} is here already, or is not expected")
    with suppress(ConnectionFailedError):  # it is accepted now: the owner of the connection will notice that it broke
        connection.send(Welcome(proof=proof(secret, purpose, "listener", nonces, *who)))
    return who


def answer(connection: Connection, secret: ClusterSecret, purpose: Purpose, name: str, rank: int, nonce: bytes) -> None:
    """The joiner's part.

    Raises:
        ConnectionFailedError: the listener refused, or does not know the secret itself, or the connection broke.
    """
    with closed_after(connection, TIMEOUT_S):
        nonces = _receive(connection, Challenge).nonce + nonce
        shown = proof(secret, purpose, "joiner", nonces, name, rank)
        connection.send(Introduction(name=name, rank=rank, nonce=nonce, proof=shown))
        welcome = _receive(connection, Welcome)
    if not hmac.compare_digest(welcome.proof, proof(secret, purpose, "listener", nonces, name, rank)):
        raise HandshakeError("the listener does not know the cluster's secret")


@contextmanager
def closed_after(connection: Connection, timeout_s: float) -> Iterator[None]:
    """Closes the connection if the body takes longer: its reader then ends with a `ConnectionFailedError`."""
    timer = threading.Timer(timeout_s, connection.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _receive(connection: Connection, kind: type[M]) -> M:
    frame = connection.receive(MAX_HANDSHAKE_BYTES)
    if frame is None:
        raise HandshakeError("the other side refused: it ended the connection")
    try:
        return decoder(kind).decode(frame)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"the other side does not know this handshake: {error}") from error


# ---------------------------------------------------------------- listener


logger = logging.getLogger(__name__)

MAX_HANDSHAKES = 32
"""Connections that may be in their handshake at once. The oldest is closed for a new one: a legitimate one takes
milliseconds."""
RETRY_S = 0.1


class AuthenticatedListener:
    """Accepts connections at `address`.

    Args:
        host: the address to listen on; nothing else is listened on.
        accepts: (name, rank) -> whether a joiner that proved to be this may come in. Any thread.
        on_connection: called with (name, rank, connection) on the connection's own thread, which may stay there.

    Raises:
        OSError: if it cannot listen on `host`.
    """

    def __init__(
        self,
        host: str,
        secret: ClusterSecret,
        purpose: Purpose,
        accepts: Callable[[str, int], bool],
        on_connection: Callable[[str, int, Connection], None],
    ) -> None:
        self._secret = secret
        self._purpose: Purpose = purpose
        self._accepts = accepts
        self._on_connection = on_connection
        self._lock = threading.Lock()
        self._connections: dict[Connection, None] = {}
        """Connections whose handshake is under way, the oldest first."""
        self._threads: list[threading.Thread] = []
        """Threads of connections, some of which may have ended."""
        self._is_over = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name=f"{purpose} listener", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the listener still accepts connections."""
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
        """Wait after `close` until `on_connection` has returned for every connection."""
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
                logger.error("%s cannot accept a connection, retrying in %g s: %s", self.address, RETRY_S, error)
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
                connection, self._secret, self._purpose, secrets.token_bytes(NONCE_BYTES), self._accepts
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
