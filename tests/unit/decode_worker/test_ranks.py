"""The decode role with prefill workers of several ranks, and with transports that post their receives late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from disagg.decode_worker.service import Outgoing
from disagg.engine.commands import Release, Scatter, Scattered
from disagg.engine.io.blocking import call_on_thread
from disagg.engine.kv_transfer.transport import Done, PairTransport, Posted, Received, ignore_posted
from disagg.engine.kv_transfer.transports.local import LocalRendezvous
from disagg.engine.plan import Buffer
from disagg.proto import handover
from disagg.proto.handover import ChunkDone, ClearToSend, PairHello
from disagg.proto.ids import Incarnation
from disagg.proto.messages import ONE_RANK, KvLayout
from tests.support.roles import info_of, key_of, until
from tests.support.secret import SECRET
from tests.unit.decode_worker.test_role import PAYLOAD, Bench, Peer, bench


class LateTransport(PairTransport):
    """A transport of several ranks, played by the test: receives are posted, and over, when it says so."""

    name = "late"

    def __init__(self) -> None:
        self.posts: list[Posted] = []
        self.dones: list[Received] = []

    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        raise AssertionError("D sends nothing")

    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        self.posts.append(posted)
        self.dones.append(done)

    def skip_checksums(self) -> None:
        raise AssertionError("ranks compute no digests")

    def close(self) -> None:
        for done in self.dones:
            done(False, "closed", 0)


async def late_pair(it: Bench) -> tuple[Peer, LateTransport]:
    peer = await it.paired()
    transport = LateTransport()
    assert peer.link._transport is not None
    peer.link._transport.close()
    peer.link._transport = transport
    it.reserved(peer)
    return peer, transport


async def from_another_thread(call: Callable[[], None]) -> None:
    await call_on_thread("rank", call)


async def test_p_may_send_when_all_ranks_have_posted_in_the_order_of_the_receives() -> None:
    async with bench() as it:
        peer, transport = await late_pair(it)
        peer.announce(0)
        peer.announce(1)
        await from_another_thread(transport.posts[1])
        await until(lambda: not peer.link._ordered._unposted.get((key_of("a"), 1)))
        assert peer.said() == []
        await from_another_thread(transport.posts[0])
        await until(lambda: len(peer.outgoing._items) == 2)
        assert [message.seq for message in peer.said() if isinstance(message, ClearToSend)] == [0, 1]


async def test_a_receive_that_fails_before_it_is_posted_ends_the_pair() -> None:
    async with bench() as it:
        peer, transport = await late_pair(it)
        peer.announce(0)
        done = transport.dones.pop()
        await from_another_thread(lambda: done(False, "rank 1: broken", 0))
        await until(lambda: peer.outgoing.closed)
        assert not any(isinstance(message, ClearToSend) for message in peer.said())
        assert it.context.command(Release) == Release(key_of("a"))
        await until(lambda: not it.role._links)
        assert it.idle()


async def test_a_payload_with_another_checksum_fails_its_attempt() -> None:
    """As when one slice is spoilt on one rank: the checksum of the whole is another."""
    async with bench() as it:
        peer, transport = await late_pair(it)
        peer.announce(0)
        transport.posts[0]()
        peer.message(ClearToSend)
        transport.dones.pop()(True, "", 1)
        await until(lambda: it.context._commands)
        assert it.context.command(Release) == Release(key_of("a"))
        chunk_done, abort = peer.said()
        assert isinstance(chunk_done, ChunkDone)
        assert not chunk_done.ok
        assert isinstance(abort, handover.Abort)
        assert it.idle()


async def test_a_wider_prefill_worker_is_met_rank_by_rank() -> None:
    """One KV head, which both ranks of P hold: rank 0 sends it."""
    async with bench() as it:
        peer = it.peer(tp=2)
        assert peer.welcome.shape == ONE_RANK
        name, address = peer.welcome.pair_name, peer.welcome.store_address
        peer.transport = await call_on_thread(
            "connect", lambda: LocalRendezvous.connect(f"{name}/0-0", address, secret=SECRET)
        )
        await until(lambda: peer.link._transport)
        it.reserved(peer)
        peer.announce(0)
        peer.message(ClearToSend)
        peer.send()
        await until(lambda: it.context._commands)
        scatter = it.context.command(Scatter)
        assert (scatter.peer.tp, scatter.data.tolist()) == (2, PAYLOAD.tolist())
        it.role.on_event(Scattered(key_of("a"), 0, ok=True))


@pytest.mark.parametrize(("ours", "theirs"), [(1, 3), (3, 1)])
async def test_ranks_that_cannot_share_the_heads_are_refused(ours: int, theirs: int) -> None:
    async with bench() as it:
        layout = KvLayout.dense(num_layers=1, num_kv_heads=4, head_dim=1, dtype="fake", bytes_per_token=32)
        it.context.info = info_of("d", "decode", kv_layout=layout, tp=ours)
        hello = PairHello(
            info=info_of("p", "prefill", kv_layout=layout, tp=theirs), receiver_incarnation=Incarnation("d.1")
        )
        answer = it.role._accept(hello, Outgoing(1))
        assert isinstance(answer, handover.PairRefused)
        text = f"tp {theirs} (prefill) and tp {ours} (decode) do not go with 4 KV heads"
        assert answer.reason == f"{text}: 4 cannot be divided among 3 ranks"


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"stage_ends": (1, 2, 3)}, "has stages up to layers [1, 2, 3]; they must ascend and end at 2"),
        ({"stage_ends": (2, 1)}, "has stages up to layers [2, 1]; they must ascend and end at 2"),
        ({"stage_ends": (0, 2)}, "has stages up to layers [0, 2]; they must ascend and end at 2"),
        ({"stage_ends": (1,)}, "has stages up to layers [1]; they must ascend and end at 2"),
        ({"stage_ends": tuple(range(1, 100_000))}, "has tp 1 and pp 99999; there may be at most 64 ranks"),
        ({"tp": 40, "stage_ends": (1, 2)}, "has tp 40 and pp 2; there may be at most 64 ranks"),
        ({"tp": 1 << 60}, f"has tp {1 << 60}; it must be from 1 to 64"),
    ],
)
async def test_stages_that_the_model_cannot_have_are_refused(shape: dict[str, Any], reason: str) -> None:
    """What a peer says of itself is checked before anything is made of it."""
    async with bench() as it:
        layout = KvLayout.dense(num_layers=2, num_kv_heads=1, head_dim=1, dtype="fake", bytes_per_token=16)
        it.context.info = info_of("d", "decode", kv_layout=layout)
        theirs = info_of("p", "prefill", kv_layout=layout, **shape)
        answer = it.role._accept(PairHello(info=theirs, receiver_incarnation=Incarnation("d.1")), Outgoing(1))
        assert answer == handover.PairRefused(reason=f"the prefill worker {reason}")
        assert it.idle()
