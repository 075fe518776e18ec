"""GB/s of the byte transports between two processes, and of the copy that is their limit.

    this process is D ──> receives of one size, so many at a time ──> GB/s, by D's clock
    a child is P      ──> sends as many

The clock runs from the word to P until the last receive is answered, so one round on the pipe is in it. Each side goes
round as many buffers as operations are under way, which the receives fill anew; every checksum is compared. `memcpy` is
one thread of this process copying between as many buffers, without a checksum: no transport can be faster. `local`
has both ends in this process.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from disagg.engine.kv_transfer.transport import PairTransport
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.plan import Buffer
from tests.support.secret import SECRET, checksum

HOST = "127.0.0.1"
PAIR = "benchmark"
READY, GO = "ready", "go"
ANSWER_S = 60.0
MOVED_BYTES = 128 << 20
"""Bytes of one measurement, within the limits on its operations."""
FEWEST, MOST = 8, 512
"""Operations of one measurement."""
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The operations that are measured at once."""

    transport: str
    size: int
    """Bytes of one operation."""
    in_flight: int

    @property
    def count(self) -> int:
        """Operations."""
        return min(MOST, max(FEWEST, self.in_flight, MOVED_BYTES // self.size))


Measure = Callable[[Case], float]
"""GB/s of a case."""


def content(number: int, size: int) -> Bytes:
    """The bytes of P's buffer of this number."""
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def placed(case: Case, array: Bytes) -> Buffer:
    """The bytes where the transport moves them: in this process's current GPU with nccl."""
    if case.transport != "nccl":
        return array
    import torch

    return torch.from_numpy(array).cuda()


# ---------------------------------------------------------------- the copy


def copy_rate(case: Case) -> float:
    """GB/s of plain copies."""
    sources = [content(number, case.size) for number in range(case.in_flight)]
    targets = [np.zeros_like(source) for source in sources]
    began = time.perf_counter()
    for number in range(case.count):
        targets[number % case.in_flight][:] = sources[number % case.in_flight]
    return rate_of(case, time.perf_counter() - began)


def rate_of(case: Case, elapsed_s: float) -> float:
    return case.count * case.size / elapsed_s / 1e9


# ---------------------------------------------------------------- the two ends


class TransferError(RuntimeError):
    """Bytes did not arrive, or not as they were sent."""


class Window:
    """Starts `count` operations, at most `in_flight` at a time, from one thread, as the roles of a worker do."""

    def __init__(self, case: Case, start: Callable[[int, Callable[[str], None]], None]) -> None:
        self._case = case
        self._start = start
        self._free = threading.Semaphore(case.in_flight)
        self._num_started = 0
        self._error = ""

    def fill(self) -> None:
        """Start the first ones."""
        for _ in range(self._case.in_flight):
            self._next()

    def run(self) -> None:
        """Start the others; until all are done. Raises `TransferError`."""
        for _ in range(self._case.count - self._num_started):
            self._next()
        for _ in range(self._case.in_flight):
            self._wait()

    def _next(self) -> None:
        self._wait()
        self._start(self._num_started, self._done)
        self._num_started += 1

    def _wait(self) -> None:
        if not self._free.acquire(timeout=ANSWER_S):
            raise TransferError(f"{self._case}: no answer in {ANSWER_S:g} s")
        if self._error:
            raise TransferError(f"{self._case}: {self._error}")

    def _done(self, error: str) -> None:
        self._error = self._error or error
        self._free.release()


def sending(transport: PairTransport, case: Case) -> Callable[[], None]:
    """P's part of a measurement, made ready. What it gives raises `TransferError`."""
    buffers = [placed(case, content(number, case.size)) for number in range(case.in_flight)]

    def start(number: int, done: Callable[[str], None]) -> None:
        def sent(ok: bool, error: str) -> None:
            done("" if ok else error or "not sent")

        transport.send(buffers[number % case.in_flight], case.size, sent)

    return Window(case, start).run


def receive_all(transport: PairTransport, case: Case, go: Callable[[], None]) -> float:
    """D's part; GB/s. Raises `TransferError`.

    Args:
        go: the start signal for P, which is ready.
    """
    buffers = [placed(case, np.full(case.size, 0xEE, np.uint8)) for _ in range(case.in_flight)]
    expected = [checksum(content(number, case.size)) for number in range(case.in_flight)]

    def start(number: int, done: Callable[[str], None]) -> None:
        def received(ok: bool, error: str, digest: int) -> None:
            wrong = ok and digest != expected[number % case.in_flight]
            done("another checksum than that of what was sent" if wrong else "" if ok else error or "not received")

        transport.recv(buffers[number % case.in_flight], case.size, received)

    window = Window(case, start)
    window.fill()
    began = time.perf_counter()
    go()
    window.run()
    return rate_of(case, time.perf_counter() - began)


# ---------------------------------------------------------------- pairs


def play_sender(transport: str, address: str, link: Connection) -> None:
    """P's process: a measurement for each case that comes, until None does. With nccl it takes the second GPU, if there
    is one; two ranks on one GPU need `NCCL_MULTI_RANK_GPU_ENABLE=1`."""
    if transport == "nccl":
        import torch

        torch.cuda.set_device(torch.cuda.device_count() - 1)
    pair = make_connector(transport, HOST, SECRET)(PAIR, address)
    while (case := link.recv()) is not None:
        send = sending(pair, case)
        link.send(READY)
        assert link.recv() == GO
        send()
    pair.close()


@contextmanager
def two_processes(transport: str) -> Iterator[Measure]:
    """A pair of this process and a child."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    rendezvous = make_rendezvous(transport, HOST, SECRET)  # type: ignore[arg-type]  # raises for a name that is none
    child = context.Process(target=play_sender, args=(transport, rendezvous.address, theirs), daemon=True)
    child.start()
    theirs.close()

    def measure(case: Case) -> float:
        link.send(case)
        if not link.poll(ANSWER_S) or link.recv() != READY:
            raise TransferError(f"{case}: the sender is not ready")
        return receive_all(pair, case, lambda: link.send(GO))

    try:
        pair = rendezvous.accept(PAIR)
        try:
            yield measure
            link.send(None)
            child.join(ANSWER_S)
        finally:
            pair.close()
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        rendezvous.close()
        link.close()


@contextmanager
def one_process(transport: str) -> Iterator[Measure]:
    """A pair with both ends here, P's on a thread."""
    rendezvous = make_rendezvous(transport, HOST, SECRET)  # type: ignore[arg-type]
    ends: list[PairTransport] = []
    joining = threading.Thread(
        target=lambda: ends.append(make_connector(transport, HOST, SECRET)(PAIR, rendezvous.address))
    )
    joining.start()
    pair = rendezvous.accept(PAIR)
    joining.join()

    def measure(case: Case) -> float:
        send, errors = sending(ends[0], case), list[TransferError]()

        def run() -> None:
            try:
                send()
            except TransferError as error:
                errors.append(error)

        sender = threading.Thread(target=run)
        rate = receive_all(pair, case, sender.start)
        sender.join()
        if errors:
            raise errors[0]
        return rate

    try:
        yield measure
    finally:
        pair.close()
        ends[0].close()
        rendezvous.close()


@contextmanager
def _copies() -> Iterator[Measure]:
    yield copy_rate


def opened(transport: str) -> AbstractContextManager[Measure]:
    """The context in which a transport's cases can be measured."""
    if transport == "memcpy":
        return _copies()
    return one_process(transport) if transport == "local" else two_processes(transport)


# ---------------------------------------------------------------- all of them


def in_turn(items: Sequence[T], repeat: int) -> list[T]:
    """The items, every other time from the end: what changes on the machine meanwhile falls on all alike."""
    return list(items) if repeat % 2 == 0 else list(reversed(items))


def measure_rates(
    transports: Sequence[str], sizes: Sequence[int], in_flight: Sequence[int], repeats: int
) -> dict[Case, list[float]]:
    """GB/s of every case, once for each repeat, each time after a warm-up. Raises `TransferError`."""
    rates: dict[Case, list[float]] = {
        Case(transport=transport, size=size, in_flight=k): []
        for transport in transports
        for size in sizes
        for k in in_flight
    }
    for repeat in range(repeats):
        for transport in in_turn(transports, repeat):
            own = [case for case in rates if case.transport == transport]
            with opened(transport) as measure:
                measure(own[-1])  # the first operations fault the memory in
                for case in in_turn(own, repeat):
                    rates[case].append(measure(case))
    return rates
