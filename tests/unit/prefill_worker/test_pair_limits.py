"""A prefill worker keeps so many pairs, and closes those that nothing uses: the test plays the decode workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from disagg.engine.config import TransferLimits
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.messages import Dispatch, PeerRef
from tests.support.roles import PlayedContext, PlayedStream, info_of, key_of, peer_of, settle, spec_of, until

PEERS = [peer_of(info_of(f"d-{number}", "decode")) for number in range(5)]


@asynccontextmanager
async def role_with(max_pairs: int) -> AsyncIterator[tuple[PrefillRole, PlayedContext]]:
    context = PlayedContext("p", "prefill")
    context.config = msgspec.structs.replace(
        context.config, transfer=TransferLimits(max_pairs=max_pairs), pair_idle_s=60.0
    )
    role = PrefillRole(context)
    await role.start()
    yield role, context
    await role.stop()
    assert not role._all_links
    assert context.faults == []


def dispatch(role: PrefillRole, context: PlayedContext, name: str, peer: PeerRef) -> None:
    context.time += 1.0
    role.dispatch(Dispatch(spec=spec_of(name), decode_peer=peer))


async def test_the_pair_that_was_not_used_for_longest_makes_room(streams: list[PlayedStream]) -> None:
    async with role_with(max_pairs=3) as (role, context):
        for number in range(3):
            dispatch(role, context, f"r-{number}", PEERS[number])
        await settle()  # the links have begun
        for number in (0, 2):  # the attempt with d-1 stays
            role.cancel(key_of(f"r-{number}"))
        dispatch(role, context, "again", PEERS[0])
        role.cancel(key_of("again"))
        dispatch(role, context, "r-3", PEERS[3])
        assert list(role._links) == [PEERS[0], PEERS[1], PEERS[3]]
        dispatch(role, context, "r-4", PEERS[4])
        assert list(role._links) == [PEERS[1], PEERS[3], PEERS[4]]
        await until(lambda: len(role._all_links) == 3)
        assert [stream.closed for stream in streams] == [True, False, True, False, False]
        dispatch(role, context, "r-5", PEERS[0])  # all three are in use
        assert list(role._links) == [PEERS[1], PEERS[3], PEERS[4], PEERS[0]]
        assert context.ends == []


async def test_what_a_gateway_asks_for_ahead_of_time_closes_no_other_pair(streams: list[PlayedStream]) -> None:
    async with role_with(max_pairs=2) as (role, _):
        for peer in PEERS:
            role.connect(peer)
        assert list(role._links) == PEERS[:2]
        assert len(streams) == 2


async def test_a_pair_that_nothing_uses_is_closed_after_a_while(streams: list[PlayedStream]) -> None:
    async with role_with(max_pairs=8) as (role, context):
        role.connect(PEERS[0])
        dispatch(role, context, "done", PEERS[1])
        dispatch(role, context, "busy", PEERS[2])
        role.cancel(key_of("done"))
        context.time = 160.9
        role.tick(context.time)
        assert list(role._links) == PEERS[:3]
        context.time = 161.0
        role.tick(context.time)
        assert list(role._links) == [PEERS[0], PEERS[2]]
        dispatch(role, context, "later", PEERS[1])
        assert [stream.peer for stream in streams] == [*PEERS[:3], PEERS[1]]
