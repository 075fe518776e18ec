"""The decode role and its links: the test plays the engine, the prefill worker and the gateway."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest

from disagg.decode_worker.link import PrefillLink
from disagg.decode_worker.role import DecodeRole
from disagg.decode_worker.service import Outgoing
from disagg.engine.commands import (
    Add,
    Ended,
    Join,
    Joined,
    PrefillComputed,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Scatter,
    Scattered,
)
from disagg.engine.io.blocking import call_on_thread
from disagg.engine.kv_transfer.transport import TransportError
from disagg.engine.kv_transfer.transports.local import LocalRendezvous, LocalTransport
from disagg.proto import handover
from disagg.proto.handover import (
    Abort,
    ChunkDone,
    ChunkHeader,
    ClearToSend,
    CloseWhenIdle,
    Commit,
    CommitAck,
    Failure,
    Offer,
    PairHello,
)
from disagg.proto.ids import GatewayId, Incarnation, RequestId
from disagg.proto.messages import Dispatch, HandedOver, KvLayout, TokenLogprobs, WorkerInfo
from tests.support.roles import (
    BYTES_PER_TOKEN,
    GATEWAY,
    PlayedContext,
    info_of,
    key_of,
    settle,
    spec_of,
    until,
)
from tests.support.secret import SECRET, checksum

C = TypeVar("C")
A = RequestId("a")
PAYLOAD = np.arange(80, dtype=np.uint8)


class Peer:
    """One pair, as its prefill worker sees it."""

    def __init__(self, role: DecodeRole, info: WorkerInfo, *, digests: bool = False) -> None:
        self.outgoing = Outgoing(100)
        hello = PairHello(info=info, receiver_incarnation=Incarnation("d.1"), digests=digests)
        answer = role._accept(hello, self.outgoing)
        assert not isinstance(answer, handover.PairRefused), answer
        self.welcome, pair = answer
        assert isinstance(pair, PrefillLink)
        self.link = pair
        self.transport: LocalTransport | None = None

    async def connect(self) -> None:
        welcome = self.welcome
        self.transport = await call_on_thread(
            "connect", lambda: LocalRendezvous.connect(welcome.pair_name, welcome.store_address, secret=SECRET)
        )
        await until(lambda: self.link._transport)

    def said(self) -> list[handover.ReceiverToSender]:
        """What D said since the last call."""
        found = list(self.outgoing._items)
        self.outgoing._items.clear()
        return found

    def message(self, kind: type[C]) -> C:
        (message,) = self.said()
        assert isinstance(message, kind), message
        return message

    def offer(self, request: str = "a", num_tokens: int = 20) -> None:
        self.link.on_message(Offer(spec=spec_of(request, num_tokens)))

    def announce(self, seq: int, request: str = "a", first_token: int = 0) -> None:
        """Chunk `seq` of ten tokens each, from `first_token` on."""
        header = ChunkHeader(
            request_id=RequestId(request),
            attempt=1,
            generation=1,
            seq=seq,
            start_token=first_token + 10 * seq,
            end_token=first_token + 10 * seq + 10,
            nbytes=10 * BYTES_PER_TOKEN,
            checksum=checksum(PAYLOAD),
        )
        self.link.on_message(header)

    def send(self, payload: Any = PAYLOAD) -> None:
        assert self.transport is not None
        self.transport.send(payload, len(payload), lambda ok, error: None)


class Bench:
    def __init__(self) -> None:
        self.context = PlayedContext("d", "decode")
        self.role = DecodeRole(self.context)

    def peer(self, name: str = "p", **changes: Any) -> Peer:
        return Peer(self.role, info_of(name, "prefill", **changes))

    async def paired(self) -> Peer:
        peer = self.peer()
        await peer.connect()
        return peer

    def reserved(self, peer: Peer, request: str = "a") -> None:
        """Offered and reserved."""
        peer.offer(request)
        assert self.context.command(Reserve).spec.request_id == request
        self.role.on_event(Reserved(key_of(request), 0))
        peer.message(handover.Reserved)

    def idle(self) -> bool:
        return not any(count for name, count in self.role.holdings().items() if name != "tombstones")


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    it = Bench()
    await it.role.start()
    try:
        yield it
    finally:
        await it.role.stop()
        assert it.context.faults == []
        assert not it.role._links


async def chunk(it: Bench, peer: Peer, seq: int) -> Scatter:
    """A chunk, up to its copy by the engine."""
    peer.announce(seq)
    peer.message(ClearToSend)
    peer.send()
    await until(lambda: it.context._commands)
    return it.context.command(Scatter)


async def test_idle_pairs_are_to_make_room_for_one_more() -> None:
    async with bench() as it:
        transfer = msgspec.structs.replace(it.context.config.transfer, max_pairs=2)
        it.context.config = msgspec.structs.replace(it.context.config, transfer=transfer)
        first, second = it.peer("p-0"), it.peer("p-1")
        await first.connect()
        it.context.time += 1.0
        it.reserved(first)
        third = it.peer("p-2")
        assert (first.said(), second.said(), third.said()) == ([], [CloseWhenIdle()], [])
        second.link.on_lost()  # its prefill worker closes it
        await second.link.wait_gone()
        it.peer("p-3")
        assert (first.said(), third.said()) == ([], [CloseWhenIdle()])
        first.link.cancel(key_of("a"))
        assert it.context.command(Release) == Release(key_of("a"))


# ---------------------------------------------------------------- the whole way


@pytest.mark.parametrize(("theirs", "ours"), [(False, False), (True, False), (False, True), (True, True)])
async def test_digests_where_both_devices_compute_them(theirs: bool, ours: bool) -> None:
    """Then the engine compares them, and the transport looks at nothing: here something else arrives."""
    async with bench() as it:
        it.context.digests = ours
        peer = Peer(it.role, info_of("p", "prefill"), digests=theirs)
        assert peer.welcome.digests is (theirs and ours)
        await peer.connect()
        it.reserved(peer)
        peer.announce(0)
        peer.message(ClearToSend)
        peer.send(PAYLOAD ^ 1)
        if theirs and ours:
            await until(lambda: it.context._commands)
            assert it.context.command(Scatter).digest == checksum(PAYLOAD)
            it.role.on_event(Scattered(key_of("a"), 0, ok=False, intact=False))
        else:
            await until(lambda: peer.outgoing._items)
        assert [type(message).__name__ for message in peer.said()] == ["ChunkDone", "Abort"]
        assert it.context.command(Release) == Release(key_of("a"))
        assert it.idle()


async def test_a_sequence_is_taken_over() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        for seq in range(2):
            scatter = await chunk(it, peer, seq)
            assert (scatter.start, scatter.end) == (10 * seq, 10 * seq + 10)
            assert scatter.data.tolist() == PAYLOAD.tolist()
            it.role.on_event(Scattered(key_of("a"), seq, ok=True))
            assert peer.message(ChunkDone).ok
        commit = Commit(request_id=A, attempt=1, generation=1, token_id=9, logprobs=TokenLogprobs(-0.5), num_chunks=2)
        peer.link.on_message(commit)
        assert it.context.command(Join) == Join(key_of("a"), 9, TokenLogprobs(-0.5))
        peer.message(CommitAck)
        moved = HandedOver(request_id=A, attempt=1, kv_bytes=160, cached_tokens=0, transport="local")
        assert it.context.handed_over == [moved]
        it.role.on_event(Joined(key_of("a")))
        assert it.role.holdings()["decode_attempts"] == 1
        it.role.on_event(Ended(key_of("a"), GATEWAY, "stop", num_drafted=5, num_accepted=3))
        assert it.context.reasons() == [("a", "stop")]
        assert (it.context.ends[0].drafted_tokens, it.context.ends[0].accepted_tokens) == (5, 3)
        assert it.idle()


async def test_a_chunk_that_is_announced_before_the_transport_stands_waits_for_it() -> None:
    async with bench() as it:
        peer = it.peer()
        it.reserved(peer)
        peer.announce(0)
        peer.offer("b", 5)
        it.context.command(Reserve)
        it.role.on_event(ReserveRefused(key_of("b"), "no room"))
        assert peer.said() == []  # P must not hear that it may send, nor anything that comes after it
        await peer.connect()
        assert [type(message) for message in peer.said()] == [ClearToSend, handover.Refused]
        peer.send()
        await until(lambda: it.context._commands)
        assert it.context.command(Scatter).data.tolist() == PAYLOAD.tolist()
        it.role.on_event(Scattered(key_of("a"), 0, ok=True))


async def test_a_whole_dispatch_runs_here() -> None:
    async with bench() as it:
        it.role.dispatch(Dispatch(spec=spec_of("a")))
        it.role.dispatch(Dispatch(spec=spec_of("a")))
        assert it.context.command(Add) == Add(spec_of("a"))
        it.role.on_event(PrefillComputed(key_of("a"), GATEWAY, 9, 16))
        assert [done.cached_tokens for done in it.context.prefilled] == [16]
        # The engine knows no gateway of a sequence that it had forgotten; the role does.
        it.role.on_event(Ended(key_of("a"), GatewayId(""), "failed", "the sequence is gone"))
        assert it.context.reasons() == [("a", "failed")]
        assert it.idle()


# ---------------------------------------------------------------- cancels


async def test_a_cancel_before_the_offer_turns_it_away() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.role.cancel(key_of("a"))
        peer.offer()
        assert peer.message(Abort).failure is Failure.CANCELLED
        assert it.context.commands() == []
        assert it.idle()


async def test_a_cancel_while_the_engine_reserves() -> None:
    async with bench() as it:
        peer = await it.paired()
        peer.offer()
        it.context.command(Reserve)
        it.role.cancel(key_of("a"))
        assert it.context.command(Release) == Release(key_of("a"))
        peer.message(Abort)
        assert not it.role.owns(key_of("a"))  # the engine's answer is for nobody
        assert it.idle()
        assert it.context.ends == []


async def test_a_cancel_while_bytes_are_under_way_and_while_they_are_copied() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        await chunk(it, peer, 0)
        peer.announce(1)
        peer.message(ClearToSend)
        it.role.cancel(key_of("a"))
        assert it.context.command(Release) == Release(key_of("a"))
        peer.message(Abort)
        assert it.role.owns(key_of("a"))
        assert it.role.holdings()["receiving_slots"] == 2
        peer.send()  # what was cleared is sent in full, and dropped
        await until(lambda: it.role.holdings()["receiving_slots"] == 1)
        assert not peer.message(ChunkDone).ok
        it.role.on_event(Scattered(key_of("a"), 0, ok=True))
        peer.message(ChunkDone)
        assert not it.role.owns(key_of("a"))
        assert it.idle()


async def test_a_cancel_after_the_commit_is_the_engines() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        for seq in range(2):
            await chunk(it, peer, seq)
            it.role.on_event(Scattered(key_of("a"), seq, ok=True))
            peer.message(ChunkDone)
        peer.link.on_message(Commit(request_id=A, attempt=1, generation=1, token_id=9, num_chunks=2))
        it.context.command(Join)
        peer.message(CommitAck)
        it.role.cancel(key_of("a"))
        assert it.context.command(Release) == Release(key_of("a"))
        assert peer.said() == []
        assert it.idle()


# ---------------------------------------------------------------- pairs

OTHER_LAYOUT = KvLayout.dense(num_layers=2, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=BYTES_PER_TOKEN)
IN_INT8 = KvLayout.dense(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int8", bytes_per_token=BYTES_PER_TOKEN)


@pytest.mark.parametrize(
    ("changes", "receiver", "reason"),
    [
        ({}, "d.0", "d is incarnation d.1, not d.0"),
        ({"fingerprint": "other"}, "d.1", "model fingerprints differ: other and fake"),
        ({"kv_layout": OTHER_LAYOUT}, "d.1", "KV layouts differ: KvLayout(groups=("),
        ({"kv_layout": IN_INT8}, "d.1", "KV layouts differ: KV in int8 and in fake (model.kv_cache_dtype)"),
        ({"tp": 0}, "d.1", "the prefill worker has tp 0; it must be from 1 to 64"),
        ({"tp": 1 << 40}, "d.1", "the prefill worker has tp 1099511627776; it must be from 1 to 64"),
    ],
)
async def test_a_pair_that_must_not_be_is_refused(changes: dict[str, Any], receiver: str, reason: str) -> None:
    async with bench() as it:
        hello = PairHello(info=info_of("p", "prefill", **changes), receiver_incarnation=Incarnation(receiver))
        answer = it.role._accept(hello, Outgoing(1))
        assert isinstance(answer, handover.PairRefused)
        assert answer.reason.startswith(reason)


async def test_nobody_is_accepted_before_the_start_and_after_the_stop() -> None:
    it = Bench()
    hello = PairHello(info=info_of("p", "prefill"), receiver_incarnation=Incarnation("d.1"))
    assert isinstance(it.role._accept(hello, Outgoing(1)), handover.PairRefused)
    await it.role.start()
    await it.role.stop()
    assert isinstance(it.role._accept(hello, Outgoing(1)), handover.PairRefused)
    await it.role.stop()


async def test_a_lost_stream_ends_its_attempts_and_waits_for_the_engine() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        await chunk(it, peer, 0)
        peer.announce(1)
        peer.link.on_lost()
        peer.link.on_lost()
        assert it.context.command(Release) == Release(key_of("a"))
        await until(lambda: not it.role._links)
        assert it.role.owns(key_of("a"))
        it.role.on_event(Scattered(key_of("a"), 0, ok=False))
        assert not it.role.owns(key_of("a"))
        assert it.idle()
        answers: list[bool] = []
        assert peer.transport is not None
        peer.transport.send(PAYLOAD, 80, lambda ok, _: answers.append(ok))
        assert answers == [False]


async def test_the_staging_memory_of_a_pair_goes_with_it() -> None:
    """And not when the garbage collector comes, which knows nothing of its size."""
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        peer.announce(0)
        peer.send()
        await until(lambda: it.context._commands)
        staging = weakref.ref(it.context.command(Scatter).data.base)
        gc.disable()
        try:
            peer.link.on_lost()
            await until(lambda: not it.role._links)
            it.role.on_event(Scattered(key_of("a"), 0, ok=False))
            it.context.commands()
            await settle()
            assert staging() is None
        finally:
            gc.enable()


async def test_a_stream_that_is_lost_before_the_peer_came_leaves_nothing() -> None:
    async with bench() as it:
        peer = it.peer()
        it.reserved(peer)
        peer.announce(0)
        rendezvous: Any = it.role._rendezvous
        await until(lambda: rendezvous._meetings)
        peer.link.on_lost()
        await until(lambda: not it.role._links)
        assert it.idle()
        welcome = peer.welcome
        late = await call_on_thread(
            "connect", lambda: LocalRendezvous.connect(welcome.pair_name, welcome.store_address, secret=SECRET)
        )
        await until(lambda: late._channel.closed)  # D's end was opened for nobody, and is closed


async def test_a_transport_that_fails_ends_the_pair() -> None:
    async with bench() as it:
        peer = it.peer()
        it.reserved(peer)
        rendezvous: Any = it.role._rendezvous
        await until(lambda: rendezvous._meetings)
        rendezvous.close()
        await until(lambda: peer.outgoing.closed)
        assert it.context.command(Release) == Release(key_of("a"))
        await until(lambda: not it.role._links)
        assert it.idle()


@pytest.mark.parametrize("error", [TransportError("nobody came"), ValueError("a fault of ours")])
async def test_a_transport_that_cannot_be_formed_ends_the_pair(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def accept(pair_name: str) -> LocalTransport:
        raise error

    async with bench() as it:
        monkeypatch.setattr(it.role._rendezvous, "accept", accept)
        peer = it.peer()
        peer.offer()
        await until(lambda: not it.role._links)
        assert peer.outgoing.closed
        assert [type(command) for command in it.context.commands()] == [Reserve, Release]
        assert it.idle()


async def test_a_violation_ends_the_pair_at_once() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        peer.announce(1)  # where chunk 0 is due
        assert peer.outgoing.closed
        assert it.context.command(Release) == Release(key_of("a"))
        await until(lambda: not it.role._links)
        assert it.idle()


async def test_an_attempt_has_one_owner() -> None:
    """A second prefill worker with the same attempt, or one that was dispatched whole, is turned away."""
    async with bench() as it:
        first, second = await it.paired(), it.peer("q")
        it.reserved(first)
        it.role.dispatch(Dispatch(spec=spec_of("w")))
        it.context.commands()
        second.offer("a")
        second.offer("w")
        assert [type(message) for message in second.said()] == [handover.Refused] * 2
        assert it.context.commands() == []
        await chunk(it, first, 0)  # undisturbed
        it.role.on_event(Scattered(key_of("a"), 0, ok=True))
        assert first.message(ChunkDone).ok
        assert it.role.holdings()["decode_attempts"] == 2


async def test_no_room_is_told_and_forgotten() -> None:
    async with bench() as it:
        peer = await it.paired()
        peer.offer()
        it.role.on_event(ReserveRefused(key_of("a"), "no room"))
        assert peer.message(handover.Refused).reason == "no room"
        assert it.idle()
        it.role.on_event(Scattered(key_of("a"), 0, ok=False))  # too late, for nobody


async def test_a_deadline_of_a_reserved_sequence_is_told_to_both() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        it.role.on_event(Ended(key_of("a"), GATEWAY, "deadline"))
        assert it.context.reasons() == [("a", "deadline")]
        assert peer.message(Abort).failure is Failure.DEADLINE
        assert it.context.commands() == []  # the engine holds nothing of it
        assert it.idle()


async def test_a_sweep_finds_what_is_live() -> None:
    async with bench() as it:
        peer = await it.paired()
        it.reserved(peer)
        it.role.dispatch(Dispatch(spec=spec_of("w")))
        assert it.role.keys_of_gateway(GATEWAY) == [key_of("a"), key_of("w")]
        assert it.role.keys_of_gateway("another") == []
        await settle()
