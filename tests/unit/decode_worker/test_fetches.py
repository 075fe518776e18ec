"""The worker that fetches a prefix: the call to its source, the offer that follows, and what the engine is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from disagg.decode_worker import fetches as fetches_module
from disagg.decode_worker.role import DecodeRole
from disagg.decode_worker.service import FetchError
from disagg.engine.commands import FetchGivenUp, FetchOrdered, FetchOver, Release, Reserve, Reserved, Scatter, Scattered
from disagg.proto import handover
from disagg.proto.handover import Abort, ChunkDone, Commit, Fetch, FetchAnswer, FetchGranted, FetchRefused, Offer
from disagg.proto.ids import RequestId
from disagg.proto.messages import Dispatch, PeerRef
from tests.support.roles import LAYOUT, PlayedContext, info_of, key_of, peer_of, settle, spec_of, until
from tests.unit.decode_worker.test_role import Bench, Peer

SOURCE = info_of("p", "prefill")
NAME = "fetch-a"
ORDER = FetchOrdered(key_of(NAME), spec_of(NAME, 20, timeout_s=1.0), peer_of(SOURCE), 4)
KEY: dict[str, Any] = {"request_id": RequestId(NAME), "attempt": 1, "generation": 1}


class PlayedChannel:
    """In place of a `FetchChannel`: the test is the source."""

    all: list[PlayedChannel]

    def __init__(self, peer: PeerRef, secret: object) -> None:
        self.peer = peer
        self.used_at = 0.0
        self.asked: list[Fetch] = []
        self.answer: asyncio.Future[FetchAnswer] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.all.append(self)

    async def ask(self, fetch: Fetch, timeout_s: float | None) -> FetchAnswer:
        assert timeout_s == 1.0
        self.asked.append(fetch)
        return await asyncio.shield(self.answer)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def channels(monkeypatch: pytest.MonkeyPatch) -> list[PlayedChannel]:
    made: list[PlayedChannel] = []
    monkeypatch.setattr(PlayedChannel, "all", made, raising=False)
    monkeypatch.setattr(fetches_module, "FetchChannel", PlayedChannel)
    return made


class FetchingBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.context = PlayedContext("d", "decode")
        self.context.config = msgspec.structs.replace(self.context.config, fetch=True)
        self.role = DecodeRole(self.context)

    async def order(self) -> None:
        self.role.fetch(ORDER)
        await settle()

    def offer(self, peer: Peer) -> None:
        peer.link.on_message(Offer(spec=ORDER.spec, is_prefix=True))

    async def reserved_prefix(self) -> Peer:
        """The far end of a pair that has offered the prefix, for which room is reserved."""
        peer = await self.paired()
        await self.order()
        self.offer(peer)
        self.context.command(Reserve)
        self.role.on_event(Reserved(ORDER.key, 0))
        return peer

    def over(self, outcome: str, detail: str = "") -> None:
        """The engine was told, and nothing else; nothing is held."""
        assert self.context.commands() == [FetchOver(ORDER.key, outcome, detail)]  # type: ignore[arg-type]
        assert self.idle()
        assert self.context.ends == []


@asynccontextmanager
async def bench() -> AsyncIterator[FetchingBench]:
    it = FetchingBench()
    await it.role.start()
    try:
        yield it
    finally:
        await it.role.stop()
        assert it.context.faults == []


async def test_a_prefix_is_asked_for_received_and_left_in_the_cache(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        await it.order()
        (channel,) = channels
        assert channel.asked == [
            Fetch(
                spec=ORDER.spec,
                from_token=4,
                needy=peer_of(it.context.info),
                source_incarnation=SOURCE.incarnation,
                fingerprint="fake",
                kv_layout=LAYOUT,
            )
        ]
        channel.answer.set_result(FetchGranted(end_token=20))
        peer = await it.paired()
        it.offer(peer)
        assert it.context.command(Reserve) == Reserve(ORDER.spec, is_prefix=True)
        it.role.on_event(Reserved(ORDER.key, 10))
        assert peer.message(handover.Reserved).cached_tokens == 10
        peer.announce(0, NAME, first_token=10)
        peer.message(handover.ClearToSend)
        peer.send()
        await until(lambda: it.context._commands)
        scatter = it.context.command(Scatter)
        assert (scatter.start, scatter.end) == (10, 20)
        peer.link.on_message(Commit(**KEY, num_chunks=1))
        assert it.context.commands() == []  # it waits for the scatter, and joins nothing
        it.role.on_event(Scattered(ORDER.key, 0, ok=True))
        assert it.context.commands() == [Release(ORDER.key), FetchOver(ORDER.key, "done")]
        assert [type(message) for message in peer.said()] == [ChunkDone, handover.CommitAck]
        assert it.idle()
        assert it.context.handed_over == []


async def test_a_refusal_is_told_to_the_engine(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        await it.order()
        channels[0].answer.set_result(FetchRefused(reason="busy"))
        await settle()
        it.over("refused", "busy")


async def test_a_source_without_an_answer_has_failed_and_gets_a_new_channel(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        await it.order()
        channels[0].answer.set_exception(FetchError("UNAVAILABLE: gone"))
        await settle()
        it.over("failed", "UNAVAILABLE: gone")
        assert channels[0].closed
        await it.order()
        assert len(channels) == 2
        channels[1].answer.set_result(FetchRefused(reason="busy"))
        await settle()
        it.over("refused", "busy")


async def test_silence_is_no_fault(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        await it.order()
        channels[0].answer.set_exception(FetchError("DEADLINE_EXCEEDED: no answer", is_late=True))
        await settle()
        it.over("late", "DEADLINE_EXCEEDED: no answer")
        assert not channels[0].closed


async def test_the_deadline_of_the_source_is_no_fault(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        peer = await it.reserved_prefix()
        peer.said()
        detail = "the deadline passed"
        peer.link.on_message(
            Abort(request_id=RequestId(NAME), attempt=1, failure=handover.Failure.DEADLINE, detail=detail)
        )
        assert it.context.commands() == [Release(ORDER.key), FetchOver(ORDER.key, "late", detail)]
        assert it.idle()


async def test_an_order_that_is_given_up_takes_no_offer(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        peer = await it.paired()
        await it.order()
        channels[0].answer.set_result(FetchGranted(end_token=20))
        await settle()
        it.role.on_event(FetchGivenUp(ORDER.key))
        it.over("late")
        it.offer(peer)
        assert peer.message(handover.Refused).request_id == NAME
        assert it.idle()


async def test_a_hand_over_that_is_given_up_ends_the_order(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        peer = await it.reserved_prefix()
        peer.said()
        it.role.on_event(FetchGivenUp(ORDER.key))
        assert it.context.commands() == [Release(ORDER.key), FetchOver(ORDER.key, "failed", "cancelled")]
        assert isinstance(peer.message(Abort), Abort)
        assert it.idle()


async def test_a_pair_that_is_lost_ends_the_order(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        peer = await it.reserved_prefix()
        peer.link.on_lost()
        assert it.context.commands() == [Release(ORDER.key), FetchOver(ORDER.key, "failed", "the pair was closed")]
        await until(it.idle)


async def test_an_offer_that_nobody_asked_for_is_refused() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.offer(peer)
        assert peer.message(handover.Refused).request_id == NAME
        assert it.context.commands() == []
        assert it.idle()


async def test_a_worker_that_stops_ends_its_orders_and_channels(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        await it.order()
    it.over("failed", "this worker stops")
    assert channels[0].closed


async def test_an_idle_channel_is_closed(channels: list[PlayedChannel]) -> None:
    async with bench() as it:
        await it.order()
        channels[0].answer.set_result(FetchRefused(reason="busy"))
        await settle()
        it.context.time += it.context.config.pair_idle_s
        it.role.tick(it.context.time)
        await settle()
        assert channels[0].closed


async def test_a_worker_that_only_fetches_takes_no_dispatch() -> None:
    context = PlayedContext("p", "prefill")
    context.config = msgspec.structs.replace(context.config, fetch=True)
    assert not DecodeRole(context).takes(Dispatch(spec=spec_of("a")))
    assert FetchingBench().role.takes(Dispatch(spec=spec_of("a")))
