"""The in-process transport, and the door to all transports."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from disagg.engine.kv_transfer.transport import PairTransport, Rendezvous, TransportError
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from tests.support.secret import SECRET


def joined(rendezvous: Rendezvous, pair_name: str = "pair") -> tuple[PairTransport, PairTransport]:
    """(P's end, D's end)."""
    accepted: list[PairTransport] = []
    thread = threading.Thread(target=lambda: accepted.append(rendezvous.accept(pair_name)))
    thread.start()
    connected = make_connector("local", "127.0.0.1", SECRET)(pair_name, rendezvous.address)
    thread.join()
    return connected, accepted[0]


@pytest.mark.parametrize("receive_first", [True, False])
@pytest.mark.parametrize("from_p", [True, False])
def test_bytes_arrive_in_order(receive_first: bool, from_p: bool) -> None:
    p, d = joined(make_rendezvous("local", "127.0.0.1", SECRET))
    sender, receiver = (p, d) if from_p else (d, p)
    targets = [np.zeros(9, np.uint8) for _ in range(3)]
    answers: list[tuple[str, bool]] = []

    def send_all() -> None:
        for number in (1, 2, 3):
            sender.send(np.full(9, number, np.uint8), 7, lambda ok, _: answers.append(("sent", ok)))

    if not receive_first:
        send_all()
    for target in targets:
        receiver.recv(target, 7, lambda ok, *_: answers.append(("received", ok)))
    if receive_first:
        send_all()
    assert answers == [("sent", True), ("received", True)] * 3
    assert [target.tolist() for target in targets] == [[number] * 7 + [0, 0] for number in (1, 2, 3)]
    p.close()


def test_close_answers_everything_on_both_ends() -> None:
    p, d = joined(make_rendezvous("local", "127.0.0.1", SECRET))
    answers: list[bool] = []
    buffer = np.zeros(4, np.uint8)
    posted: list[str] = []
    d.recv(buffer, 4, lambda ok, *_: answers.append(ok), lambda: posted.append("open"))
    d.send(buffer, 4, lambda ok, _: answers.append(ok))
    p.close()
    assert answers == [False, False]
    d.close()
    d.recv(buffer, 4, lambda ok, *_: answers.append(ok), lambda: posted.append("closed"))
    p.send(buffer, 4, lambda ok, _: answers.append(ok))
    assert answers == [False] * 4
    assert posted == ["open"]


def test_sizes_must_agree() -> None:
    p, d = joined(make_rendezvous("local", "127.0.0.1", SECRET))
    answers: list[tuple[bool, str]] = []
    d.recv(np.zeros(4, np.uint8), 4, lambda ok, error, _: answers.append((ok, error)))
    p.send(np.zeros(4, np.uint8), 3, lambda ok, error: answers.append((ok, error)))
    assert answers == [(False, "3 bytes were sent where 4 were expected")] * 2
    p.close()


def test_pairs_of_one_rendezvous_are_apart() -> None:
    rendezvous = make_rendezvous("local", "127.0.0.1", SECRET)
    (p1, d1), (p2, d2) = joined(rendezvous, "one"), joined(rendezvous, "two")
    target = np.zeros(1, np.uint8)
    d2.recv(target, 1, lambda *_: None)
    p1.send(np.array([1], np.uint8), 1, lambda *_: None)
    p2.send(np.array([2], np.uint8), 1, lambda *_: None)
    assert target.tolist() == [2]
    d1.close()
    p2.close()


def test_a_closed_rendezvous_takes_nobody() -> None:
    rendezvous = make_rendezvous("local", "127.0.0.1", SECRET)
    errors: list[TransportError] = []

    def accept() -> None:
        try:
            rendezvous.accept("pair")
        except TransportError as error:
            errors.append(error)

    thread = threading.Thread(target=accept)
    thread.start()
    while not rendezvous._meetings:  # type: ignore[attr-defined]
        pass
    rendezvous.close()
    thread.join()
    assert "did not come" in str(errors[0])
    with pytest.raises(TransportError, match="no rendezvous"):
        make_connector("local", "127.0.0.1", SECRET)("pair", rendezvous.address)


def test_unknown_transports_are_named() -> None:
    with pytest.raises(ValueError, match="'carrier-pigeon'"):
        make_connector("carrier-pigeon", "127.0.0.1", SECRET)
    with pytest.raises(ValueError, match="'carrier-pigeon'"):
        make_rendezvous("carrier-pigeon", "127.0.0.1", SECRET)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nccl_says_what_it_lacks() -> None:
    with pytest.raises(RuntimeError, match="CUDA"):
        make_connector("nccl", "127.0.0.1", SECRET)
    with pytest.raises(RuntimeError, match="CUDA"):
        make_rendezvous("nccl", "127.0.0.1", SECRET)
