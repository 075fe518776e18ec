"""Rank 0 and a follower recognise each other over a connection in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.shell import handshake
from disagg.connections.shell.connection import ConnectionFailedError
from disagg.connections.shell.handshake import (
    Challenge,
    HandshakeError,
    Introduction,
    Purpose,
    Welcome,
    answer,
    challenge,
    proof,
)
from disagg.proto.messages import decoder
from tests.support.rank_connections import WAIT_S, memory_connections
from tests.support.secret import OTHER_SECRET, SECRET

LEADER_NONCE, FOLLOWER_NONCE = bytes(range(32)), bytes(range(32, 64))
NO_REFUSAL = "refused: it ended the connection"


def shake_hands(
    *,
    leader_secret: ClusterSecret = SECRET,
    follower_secret: ClusterSecret = SECRET,
    purpose: Purpose = "rank connection",
    takes: Callable[[str, int], bool] = lambda name, rank: True,
) -> tuple[int | ConnectionFailedError, ConnectionFailedError | None]:
    """What both sides make of it. Whoever is not content ends the connection."""
    ours, theirs = memory_connections()

    def lead() -> int:
        try:
            return challenge(ours, leader_secret, "rank connection", LEADER_NONCE, takes)[1]
        except ConnectionFailedError:
            ours.close()
            raise

    def follow() -> None:
        answer(theirs, follower_secret, purpose, "decode-0", 2, FOLLOWER_NONCE)

    with ThreadPoolExecutor(2) as pool:
        leading, following = pool.submit(lead), pool.submit(follow)
        return error_of(leading) or leading.result(), error_of(following)


def error_of(future: Future[Any]) -> ConnectionFailedError | None:
    error = future.exception(WAIT_S)
    assert error is None or isinstance(error, ConnectionFailedError)
    return error


def test_both_know_the_secret() -> None:
    assert shake_hands() == (2, None)


@pytest.mark.parametrize("changes", [{"follower_secret": OTHER_SECRET}, {"purpose": "rendezvous"}])
def test_a_stranger_is_refused_without_an_answer(changes: dict[str, Any]) -> None:
    leader, follower = shake_hands(**changes)
    assert str(leader) == "it does not know the cluster's secret"
    assert NO_REFUSAL in str(follower)


def test_a_joiner_that_is_gone_before_its_welcome_is_handed_on_so_that_its_rank_is_given_back() -> None:
    ours, theirs = memory_connections()

    def takes(name: str, rank: int) -> bool:
        theirs.close()
        return True

    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(challenge, ours, SECRET, "rank connection", LEADER_NONCE, takes)
        with pytest.raises(ConnectionFailedError):
            answer(theirs, SECRET, "rank connection", "decode-0", 2, FOLLOWER_NONCE)
        assert leading.result(WAIT_S) == ("decode-0", 2)
    with pytest.raises(ConnectionFailedError):
        ours.send(Challenge(nonce=LEADER_NONCE))


def test_a_rank_that_is_not_wanted_is_refused() -> None:
    asked: list[tuple[str, int]] = []

    def takes(name: str, rank: int) -> bool:
        asked.append((name, rank))
        return False

    leader, follower = shake_hands(takes=takes)
    assert (asked, str(leader)) == ([("decode-0", 2)], "rank 2 of 'decode-0' is here already, or is not expected")
    assert NO_REFUSAL in str(follower)


def test_a_follower_does_not_believe_a_rank_0_without_the_secret() -> None:
    """It takes whoever comes, and answers with what it has seen."""
    ours, theirs = memory_connections()
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(answer, theirs, SECRET, "rank connection", "decode-0", 2, FOLLOWER_NONCE)
        ours.send(Challenge(nonce=LEADER_NONCE))
        said = decoder(Introduction).decode(ours.receive() or b"")
        ours.send(Welcome(proof=said.proof))
        error = following.exception(WAIT_S)
    assert isinstance(error, HandshakeError)
    assert "the listener does not know the cluster's secret" in str(error)


def test_what_was_overheard_proves_nothing_another_time() -> None:
    ours, theirs = memory_connections()
    heard = Introduction(
        name="decode-0",
        rank=2,
        nonce=FOLLOWER_NONCE,
        proof=proof(SECRET, "rank connection", "joiner", LEADER_NONCE + FOLLOWER_NONCE, "decode-0", 2),
    )
    theirs.send(heard)
    with pytest.raises(HandshakeError, match="does not know the cluster's secret"):
        challenge(ours, SECRET, "rank connection", bytes(32), lambda *_: True)


def test_nothing_on_the_line_holds_the_secret() -> None:
    ours, theirs = memory_connections()
    frames = []
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(challenge, ours, SECRET, "rank connection", LEADER_NONCE, lambda *_: True)
        frames.append(theirs.receive() or b"")
        nonces = decoder(Challenge).decode(frames[0]).nonce + FOLLOWER_NONCE
        theirs.send(
            Introduction(
                name="decode-0",
                rank=1,
                nonce=FOLLOWER_NONCE,
                proof=proof(SECRET, "rank connection", "joiner", nonces, "decode-0", 1),
            )
        )
        frames.append(theirs.receive() or b"")
        assert leading.result(WAIT_S) == ("decode-0", 1)
    assert not any(SECRET.value[:8] in frame.replace(LEADER_NONCE, b"") for frame in frames)


def test_proofs_differ_in_everything_that_they_are_about() -> None:
    nonces = LEADER_NONCE + FOLLOWER_NONCE
    proofs = {
        proof(SECRET, "rank connection", "listener", nonces, "decode-0", 1),
        proof(SECRET, "rank connection", "joiner", nonces, "decode-0", 1),
        proof(SECRET, "rank connection", "joiner", nonces, "decode-0", 11),
        proof(SECRET, "rank connection", "joiner", nonces, "decode-01", 1),
        proof(SECRET, "rank connection", "joiner", FOLLOWER_NONCE + LEADER_NONCE, "decode-0", 1),
        proof(OTHER_SECRET, "rank connection", "joiner", nonces, "decode-0", 1),
        proof(SECRET, "rendezvous", "joiner", nonces, "decode-0", 1),
    }
    assert len(proofs) == 7
    assert {len(each) for each in proofs} == {32}


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        b"\x00" * 5000,
        msgspec.msgpack.encode(
            {"type": "Introduction", "name": "decode-0", "rank": -1, "nonce": bytes(32), "proof": b""}
        ),
        msgspec.msgpack.encode(
            {"type": "Introduction", "name": "decode-0", "rank": 1, "nonce": bytes(31), "proof": b""}
        ),
    ],
)
def test_anything_else_ends_the_handshake(frame: bytes) -> None:
    ours, theirs = memory_connections()
    theirs.send_frame(frame)
    with pytest.raises(ConnectionFailedError):
        challenge(ours, SECRET, "rank connection", LEADER_NONCE, lambda *_: True)


def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT_S", 0.0)
    with pytest.raises(ConnectionFailedError, match="closed"):
        challenge(memory_connections()[0], SECRET, "rank connection", LEADER_NONCE, lambda *_: True)
    with pytest.raises(ConnectionFailedError, match="closed"):
        answer(memory_connections()[0], SECRET, "rank connection", "decode-0", 1, FOLLOWER_NONCE)
