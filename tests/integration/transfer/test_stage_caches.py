"""KV of real caches between workers of stages, over byte channels: ranks are objects of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch

from disagg.engine.config import TransportName
from disagg.engine.kv_transfer.transport import Connector, PairTransport
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.parallel.channels import RankChannels
from disagg.engine.runner.model.kv_cache import KvCache
from disagg.engine.sharding.kv_routes import PairGroup, PairPlan, plan_pair
from disagg.proto.handover import Side
from disagg.proto.messages import ParallelShape
from tests.support.secret import SECRET, checksum
from tests.unit.engine.parallel.test_cache_stages import LAYOUTS, TABLES, caches, noise, raw, shape, share

HOST, WAIT_S = "127.0.0.1", 60.0
START, END = 5, 90
Channels = Mapping[Side, list[RankChannels]]
"""Of the ranks of both workers."""


@contextmanager
def opened(plan: PairPlan, transport: TransportName) -> Iterator[Channels]:
    """The channels of every rank. Ranks of D above 0 dial rank 0's rendezvous as those of P do."""
    with ExitStack() as stack:
        rendezvous = make_rendezvous(transport, HOST, SECRET)
        stack.callback(rendezvous.close)
        made: dict[Side, list[RankChannels]] = {"sender": [], "receiver": []}
        for side, ranks in made.items():
            dial = partial(_dial, make_connector(transport, HOST, SECRET, side), rendezvous.address)
            for rank in range(plan.shape(side).num_ranks):
                hosts = (side, rank) == ("receiver", 0)
                ranks.append(RankChannels(plan, side, rank, "pair", rendezvous.accept if hosts else dial))
                stack.callback(ranks[-1].close)
        with ThreadPoolExecutor(16) as pool:
            for opening in [pool.submit(each.open) for ranks in made.values() for each in ranks]:
                opening.result(WAIT_S)
        yield made


def _dial(connect: Connector, address: str, name: str) -> PairTransport:
    return connect(name, address)


class Operation:
    """One rank's part of a payload, and how its channels end."""

    def __init__(self, moved: PairGroup, side: Side, rank: int, element_bytes: int) -> None:
        num_elements = sum([route.num_elements for route in moved.routes(side, rank)])
        self.part: npt.NDArray[np.uint8] = np.empty(element_bytes * num_elements, np.uint8)
        self.posted = threading.Event()
        self.over: Future[tuple[int, ...]] = Future()

    def done(self, ok: bool, error: str, checksums: tuple[int, ...]) -> None:
        if ok:
            self.over.set_result(checksums)
        else:
            self.over.set_exception(AssertionError(error))


def move(made: Channels, moved: PairGroup, group: int, p: list[KvCache], d: list[KvCache]) -> None:
    """Gather on every rank of P, send each slice to its rank of D, and scatter there what came."""
    element_bytes = moved.element_bytes(moved.token_bytes * (END - START))
    receives, sends = (
        {rank: Operation(moved, side, rank, element_bytes) for rank in moved.ranks(side)}
        for side in ("receiver", "sender")
    )
    for rank, each in receives.items():
        made["receiver"][rank].receive(each.part, group, element_bytes, each.done, each.posted.set)
    for each in receives.values():
        assert each.posted.wait(WAIT_S)
    gathered = {}
    for rank, each in sends.items():
        out = torch.from_numpy(each.part)
        gathered[rank] = p[rank].gather_part(TABLES[16], START, END, out, d[0].shape, checksum, group=group)
        made["sender"][rank].send(each.part, group, element_bytes, each.done)
    for each in sends.values():
        each.over.result(WAIT_S)
    came = {rank: each.over.result(WAIT_S) for rank, each in receives.items()}
    assert moved.in_order("sender", gathered) == moved.in_order("receiver", came)
    for rank, each in receives.items():
        d[rank].scatter_part(TABLES[32], START, END, torch.from_numpy(each.part), p[0].shape, group=group)


@pytest.mark.parametrize("transport", ["local", "gloo"])
@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (shape(1), shape(1, 3, 5)),
        (shape(2, 2, 5), shape(2)),
        (shape(1, 1, 2, 4, 5), shape(2, 3, 5)),
        (shape(2, 2, 5), shape(2, 3, 5)),
    ],
)
def test_stages_have_the_bytes_of_their_layers(
    sender: ParallelShape, receiver: ParallelShape, transport: TransportName
) -> None:
    """Of five layers, of which some have a window."""
    layout = LAYOUTS["windows"]
    whole, expected = noise(layout, 16), noise(layout, 32)
    p, d = caches(layout, sender, 16), caches(layout, receiver, 32)
    plan = plan_pair(layout, sender, receiver)
    for group in range(len(layout.groups)):
        for ranks, origin in ((p, whole), (d, expected)):
            for cache in ranks:
                raw(cache, group).copy_(share(cache, origin, group))
    with opened(plan, transport) as made:
        for group, moved in enumerate(plan.groups):
            move(made, moved, group, p, d)
    for group in range(len(layout.groups)):
        for token in range(START, END):
            origin_LPHR = raw(whole, group)[TABLES[16][token // 16], :, :, :, token % 16]
            raw(expected, group)[TABLES[32][token // 32], :, :, :, token % 32] = origin_LPHR
        for cache in d:
            assert torch.equal(raw(cache, group), share(cache, expected, group))
