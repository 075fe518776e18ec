"""A transport between two real processes. The test's process is D; the child is P, and does what a script of
(operation, argument) pairs says, so that each test reads in one place.

    send SIZES       sends so many buffers of known content, reports the answers
    recv SIZES       receives so many, reports the answers
    send_into SIZE   begins to send, and does not wait for it; recv_into: the same for a receive
    die              of SIGKILL
    wait             for a word of D
    tell WORD        to D
    close            closes the channel, reports which threads are left
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from disagg.engine.kv_transfer.transport import PairTransport, Rendezvous
from disagg.engine.kv_transfer.transports.factory import make_connector
from tests.support.secret import SECRET
from tests.support.waiting import LONG_WAIT_S

HOST = "127.0.0.1"
ANSWER_S = 60.0
Bytes = npt.NDArray[np.uint8]
Script = list[tuple[str, Any]]
Answer = tuple[bool, str, int]
"""ok, error, checksum; 0 where there is none."""


def content(seed: int, size: int) -> Bytes:
    """Bytes that are known by their seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Answers:
    """Collects the arguments of `done`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def __call__(self, ok: bool, error: str, checksum: int = 0) -> None:
        self._queue.put((ok, error, checksum))

    def next(self, timeout_s: float = ANSWER_S) -> Answer:
        """Raises `queue.Empty` if none comes in time."""
        return self._queue.get(timeout=timeout_s)

    def all(self, count: int) -> list[Answer]:
        """That many."""
        return [self.next() for _ in range(count)]

    def errors(self, count: int) -> list[str]:
        """Of that many answers, none of which is ok."""
        answers = self.all(count)
        assert [(ok, digest) for ok, _, digest in answers] == [(False, 0)] * count
        return [error for _, error, _ in answers]


def _play(transport_name: str, address: str, pair_name: str, script: Script, link: Connection) -> None:
    """P's process."""
    transport = make_connector(transport_name, HOST, SECRET)(pair_name, address)
    answers = Answers()
    steps: dict[str, Callable[[Any], None]] = {
        "send": functools.partial(_send, transport, answers, link),
        "recv": functools.partial(_recv, transport, answers, link),
        "send_into": lambda size: transport.send(content(0, size), size, answers),
        "recv_into": lambda size: transport.recv(np.zeros(size, np.uint8), size, answers),
        "die": lambda _: os.kill(os.getpid(), signal.SIGKILL),
        "wait": lambda _: link.recv(),
        "tell": link.send,
        "close": lambda _: _close(transport, link),
    }
    for operation, argument in script:
        steps[operation](argument)


def _send(transport: PairTransport, answers: Answers, link: Connection, sizes: list[int]) -> None:
    buffers = [content(seed, size) for seed, size in enumerate(sizes)]
    for buffer in buffers:
        transport.send(buffer, len(buffer), answers)
    link.send(answers.all(len(buffers)))


def _recv(transport: PairTransport, answers: Answers, link: Connection, sizes: list[int]) -> None:
    buffers = [np.zeros(size, np.uint8) for size in sizes]
    for buffer in buffers:
        transport.recv(buffer, len(buffer), answers)
    link.send(answers.all(len(buffers)))


def _close(transport: PairTransport, link: Connection) -> None:
    transport.close()
    deadline = time.monotonic() + LONG_WAIT_S
    while threading.active_count() > 1 and time.monotonic() < deadline:  # they end by themselves
        time.sleep(0.005)
    link.send([thread.name for thread in threading.enumerate()])


class LinkedProcess:
    """A process that plays P, with a pipe to it. `play` is called in it with the other end, and `arguments` before."""

    def __init__(self, play: Callable[..., None], *arguments: Any) -> None:
        # Forked from a process that has loaded what is heavy, and has no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch"])
        self.link, other = context.Pipe()
        self.process = context.Process(target=play, args=(*arguments, other), daemon=True)
        self.process.start()
        other.close()

    def hears(self) -> Any:
        """The next message of P."""
        assert self.link.poll(ANSWER_S)
        return self.link.recv()

    def end(self) -> None:
        """End P in whatever state it is."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.link.close()


class Peer(LinkedProcess):
    """A running P, and D's end of the pair in `transport`."""

    def __init__(self, name: str, rendezvous: Rendezvous, script: Script, pair_name: str = "pair-1") -> None:
        super().__init__(_play, name, rendezvous.address, pair_name, script)
        self.transport = rendezvous.accept(pair_name)

    @override
    def end(self) -> None:
        """Close D's end, too."""
        self.transport.close()
        super().end()
