"""GB/s between workers of several ranks: every rank a process, with the channels that a worker's rank has, and nothing
else of a worker. A chunk is in several parts, one on each rank, and over when all parts are.

    this process ──"ready?"──> all ranks ──"go"──> P's ranks send their slices, D's receive them ──> all are done

There are as many processes as ranks: with fewer cores they take turns, and what more ranks could gain does not show.
The parts are those of a model with 8 KV heads and 32 KiB of KV a token.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np

from benchmarks.transfer.rates import (
    ANSWER_S,
    GO,
    HOST,
    PAIR,
    READY,
    Case,
    Measure,
    TransferError,
    Window,
    in_turn,
    rate_of,
)
from disagg.engine.kv_transfer.transport import Connector, PairTransport, Rendezvous, ignore_posted
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.parallel.channels import RankChannels
from disagg.engine.parallel.transport import OpenChannel
from disagg.engine.sharding.kv_routes import PairPlan, plan_pair
from disagg.proto.handover import Side
from disagg.proto.messages import KvLayout, ParallelShape
from tests.support.secret import SECRET

LAYOUT = KvLayout.dense(num_layers=16, num_kv_heads=8, head_dim=64, dtype="bfloat16", bytes_per_token=32 << 10)
CHUNK_BYTES = 4 << 20
IN_FLIGHT = 2
Tp = tuple[int, int]
"""Ranks of the prefill and of the decode worker."""


def chunks_of(transport: str) -> Case:
    """What is moved between the ranks: chunks of the default size, two under way."""
    return Case(transport=transport, size=CHUNK_BYTES, in_flight=IN_FLIGHT)


def _plan(tp: Tp) -> PairPlan:
    sender, receiver = tp
    return plan_pair(LAYOUT, ParallelShape(tp=sender), ParallelShape(tp=receiver))


def play_rank(transport: str, tp: Tp, side: Side, rank: int, link: Connection) -> NoReturn:
    """A rank's process: forms its channels, then takes part in measurements until it is killed."""
    plan = _plan(tp)
    if (side, rank) == ("receiver", 0):
        hosted: Rendezvous = make_rendezvous(transport, HOST, SECRET)  # type: ignore[arg-type]  # raises for a name that is none
        link.send(hosted.address)
        open_channel: OpenChannel = hosted.accept
    else:
        open_channel = partial(_dial, make_connector(transport, HOST, SECRET, side), link.recv())
    channels = RankChannels(plan, side, rank, PAIR, open_channel)
    channels.open()
    run = _work(channels, plan, side, rank, chunks_of(transport))
    while True:
        assert link.recv() == READY
        link.send(READY)
        assert link.recv() == GO
        run()
        link.send(GO)


def _dial(connect: Connector, address: str, name: str) -> PairTransport:
    return connect(name, address)


def _work(channels: RankChannels, plan: PairPlan, side: Side, rank: int, case: Case) -> Callable[[], None]:
    """This rank's part of all chunks."""
    (moved,) = plan.groups
    element_bytes = moved.element_bytes(CHUNK_BYTES // moved.token_bytes * moved.token_bytes)
    part_bytes = element_bytes * sum(route.num_elements for route in moved.routes(side, rank))
    buffers = [np.ones(part_bytes, np.uint8) for _ in range(case.in_flight)]

    def start(number: int, done: Callable[[str], None]) -> None:
        def over(ok: bool, error: str, _: object) -> None:
            done("" if ok else error or "not moved")

        buffer = buffers[number % case.in_flight]
        if side == "sender":
            channels.send(buffer, 0, element_bytes, over)
        else:
            channels.receive(buffer, 0, element_bytes, over, ignore_posted)

    return lambda: Window(case, start).run()


@contextmanager
def all_ranks(transport: str, tp: Tp) -> Iterator[Measure]:
    """The ranks of a pair, ready to be measured."""
    context = multiprocessing.get_context("spawn")
    plan = _plan(tp)
    with contextlib.ExitStack() as ends:
        links: dict[tuple[Side, int], Connection] = {}
        sides: tuple[Side, Side] = ("receiver", "sender")
        for side in sides:
            for rank in plan.ranks(side):
                link, theirs = context.Pipe()
                ends.callback(link.close)
                child = context.Process(target=play_rank, args=(transport, tp, side, rank, theirs), daemon=True)
                child.start()
                theirs.close()
                ends.callback(child.join)
                ends.callback(child.kill)
                links[side, rank] = link
        address = _hear(links["receiver", 0])
        for key, link in links.items():
            if key != ("receiver", 0):
                link.send(address)

        every = list(links.values())

        def measure(case: Case) -> float:
            _tell_all(every, READY)
            began = time.perf_counter()
            _tell_all(every, GO)
            return rate_of(case, time.perf_counter() - began)

        yield measure


def _tell_all(links: Iterable[Connection], word: str) -> None:
    """Send it to all ranks, and wait until all have sent it back."""
    for link in links:
        link.send(word)
    for link in links:
        if _hear(link) != word:
            raise TransferError("a rank sent another message")


def _hear(link: Connection) -> str:
    if not link.poll(ANSWER_S):
        raise TransferError(f"a rank did not answer in {ANSWER_S:g} s")
    return str(link.recv())


def measure_ranks(transports: Sequence[str], pairs: Sequence[Tp], repeats: int) -> dict[tuple[str, Tp], list[float]]:
    """GB/s of every transport and pair, once for each repeat, after a warm-up. Raises `TransferError`."""
    rates: dict[tuple[str, Tp], list[float]] = {(transport, tp): [] for transport in transports for tp in pairs}
    for repeat in range(repeats):
        for transport, tp in in_turn(list(rates), repeat):
            case = chunks_of(transport)
            with all_ranks(transport, tp) as measure:
                measure(case)
                rates[transport, tp].append(measure(case))
    return rates
