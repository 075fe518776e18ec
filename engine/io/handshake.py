"""How two processes of a cluster recognise each other on a connection, before anything else goes over it.

    listener    Challenge(nonce) ─────────────────────────> joiner
    listener    <── Introduction(name, rank, nonce, proof) ── joiner
    listener    Welcome(proof) ───────────────────────────> joiner

A proof is an HMAC, keyed with the cluster's secret, over the purpose of the connection, who gives it, both nonces, the
name of what is joined and the rank in it. So each side knows that the other one has the secret and answers now, for
this rank of this worker or pair; the secret itself never travels. A wrong proof gets no answer.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from disagg.engine.io.connection import Connection, ConnectionFailedError
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.messages import Message, decoder

NONCE_BYTES: Final = 32
TIMEOUT_S: Final = 10.0
"""How long each side waits for the other, in all."""
MAX_HANDSHAKE_BYTES: Final = 4096

Purpose = Literal["rank connection", "rendezvous"]
"""What the connection is for: a follower's connection to rank 0 of its worker, or a member's connection to a
`RendezvousServer`."""
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
M = TypeVar("M", bound=Message)


class Challenge(Message, frozen=True, kw_only=True, tag=True):
    """The listener's first frame."""

    nonce: Nonce


class Introduction(Message, frozen=True, kw_only=True, tag=True):
    """The joiner's first frame."""

    name: Annotated[str, msgspec.Meta(max_length=512)]
    """Of the worker or the pair."""
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    nonce: Nonce
    proof: bytes


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """The listener takes the joiner."""

    proof: bytes


class HandshakeError(ConnectionFailedError):
    """The other side is not who it should be, or did not answer."""


def proof(
    secret: ClusterSecret,
    purpose: Purpose,
    giver: Literal["listener", "joiner"],
    nonces: bytes,
    name: str,
    rank: int,
) -> bytes:
    """What `giver` shows; `nonces` are the listener's and the joiner's, one behind the other."""
    return secret.sign(f"disagg {purpose}", giver, nonces, name, rank)


def challenge(
    connection: Connection, secret: ClusterSecret, purpose: Purpose, nonce: bytes, takes: Callable[[str, int], bool]
) -> tuple[str, int]:
    """The listener's part; returns the name and the rank that the other side proved to be, if the listener `takes` it.

    Raises:
        ConnectionFailedError: it proved nothing, is not wanted, or the connection broke.
    """
    with closed_after(connection, TIMEOUT_S):
        connection.send(Challenge(nonce=nonce))
        said = _receive(connection, Introduction)
    nonces, who = nonce + said.nonce, (said.name, said.rank)
    if not hmac.compare_digest(said.proof, proof(secret, purpose, "joiner", nonces, *who)):
        raise HandshakeError("it does not know the cluster's secret")
    if not takes(*who):
        raise HandshakeError(f"rank {said.rank} of {said.name!r} is here already, or is not expected")
    with suppress(
        ConnectionFailedError
    ):  # it is taken now: who gets the connection notices that it broke, and gives it back
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
