"""How two ranks of a worker recognise each other, before anything else goes over their line.

    rank 0    Challenge(nonce) ──────────────────────────────> follower
    rank 0    <── Introduction(worker, rank, nonce, proof) ─── follower
    rank 0    Welcome(proof) ────────────────────────────────> follower

A proof is an HMAC, keyed with the cluster's secret, over who gives it, both nonces, the worker and the rank. So each
side knows that the other one has the secret and answers now, for this rank of this worker; the secret itself never
travels. Who brings a wrong proof gets no answer.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from disagg.engine.parallel.line import Line, LineError
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.messages import Message, decoder

NONCE_BYTES: Final = 32
TIMEOUT_S: Final = 10.0
"""How long each side waits for the other, in all."""
MAX_HANDSHAKE_BYTES: Final = 4096

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
M = TypeVar("M", bound=Message)


class Challenge(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0's first frame."""

    nonce: Nonce


class Introduction(Message, frozen=True, kw_only=True, tag=True):
    """The follower's first frame."""

    worker_id: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    nonce: Nonce
    proof: bytes


class Welcome(Message, frozen=True, kw_only=True, tag=True):
    """Rank 0 takes the follower."""

    proof: bytes


class HandshakeError(LineError):
    """The other side is not who it should be, or did not answer."""


def proof(
    secret: ClusterSecret, giver: Literal["leader", "follower"], nonces: bytes, worker_id: str, rank: int
) -> bytes:
    """What `giver` shows; `nonces` are rank 0's and the follower's, one behind the other."""
    told = msgspec.msgpack.encode(("disagg rank line", giver, nonces, worker_id, rank))
    return hmac.digest(secret.value, told, "sha256")


def challenge_follower(
    line: Line, secret: ClusterSecret, worker_id: str, nonce: bytes, takes: Callable[[int], bool]
) -> int:
    """Rank 0's part; returns the rank that the other side proved to be, if rank 0 `takes` it.

    Raises:
        LineError: it proved nothing, is not wanted, or the line broke.
    """
    with closed_after(line, TIMEOUT_S):
        line.send(Challenge(nonce=nonce))
        said = _receive(line, Introduction)
    expected = proof(secret, "follower", nonce + said.nonce, worker_id, said.rank)
    if not hmac.compare_digest(said.proof, expected):
        raise HandshakeError(f"it does not know the cluster's secret, or is no rank of {worker_id}")
    if not takes(said.rank):
        raise HandshakeError(f"rank {said.rank} is here already, or there is no such rank")
    line.send(Welcome(proof=proof(secret, "leader", nonce + said.nonce, worker_id, said.rank)))
    return said.rank


def answer_leader(line: Line, secret: ClusterSecret, worker_id: str, rank: int, nonce: bytes) -> None:
    """The follower's part.

    Raises:
        LineError: rank 0 refused, or does not know the secret itself, or the line broke.
    """
    with closed_after(line, TIMEOUT_S):
        nonces = _receive(line, Challenge).nonce + nonce
        shown = proof(secret, "follower", nonces, worker_id, rank)
        line.send(Introduction(worker_id=worker_id, rank=rank, nonce=nonce, proof=shown))
        welcome = _receive(line, Welcome)
    if not hmac.compare_digest(welcome.proof, proof(secret, "leader", nonces, worker_id, rank)):
        raise HandshakeError("rank 0 does not know the cluster's secret")


@contextmanager
def closed_after(line: Line, timeout_s: float) -> Iterator[None]:
    """Closes the line if the body takes longer: its reader then ends with a `LineError`."""
    timer = threading.Timer(timeout_s, line.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _receive(line: Line, kind: type[M]) -> M:
    frame = line.receive(MAX_HANDSHAKE_BYTES)
    if frame is None:
        raise HandshakeError("the other side refused: it ended the line")
    try:
        return decoder(kind).decode(frame)
    except msgspec.MsgspecError as error:
        raise HandshakeError(f"the other side does not know this handshake: {error}") from error
