"""The role of pooled requests: the test plays the engine and the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from disagg.decode_worker.role import DecodeRole
from disagg.engine.commands import Add, Ended, Release
from disagg.engine.shell.role import Role
from disagg.prefill_worker.pooled import PooledRole
from disagg.prefill_worker.role import PrefillRole
from disagg.proto.ids import RequestId
from disagg.proto.messages import Dispatch, End, Pooling, RoleName
from tests.support.roles import GATEWAY, PlayedContext, info_of, key_of, peer_of, spec_of

SPEC = msgspec.structs.replace(spec_of("a"), pooling=Pooling(kind="last"))
DISPATCH = Dispatch(spec=SPEC)
VECTOR = b"\0\0\0\0\0\0\x80?"
IDLE = {"pooled_attempts": 0}


def with_role(play: Callable[[PooledRole, PlayedContext], None]) -> None:
    async def run() -> None:
        context = PlayedContext("p", "prefill")
        role = PooledRole(context)
        play(role, context)
        assert role.holdings() == IDLE
        await role.stop()

    asyncio.run(run())


def test_a_vector_goes_to_the_gateway_of_its_dispatch() -> None:
    def play(role: PooledRole, context: PlayedContext) -> None:
        role.dispatch(DISPATCH)
        role.dispatch(DISPATCH)  # which is dropped
        assert context.commands() == [Add(SPEC)]
        assert role.owns(key_of("a"))
        assert role.keys_of_gateway(GATEWAY) == [key_of("a")]
        role.on_event(Ended(key_of("a"), GATEWAY, "stop", "", 16, 0.25, vector=VECTOR))
        end = End(request_id=RequestId("a"), attempt=1, reason="stop", cached_tokens=16, queue_s=0.25, vector=VECTOR)
        assert [update.ends for update in context.outbox.flush().values()] == [(end,)]

    with_role(play)


def test_a_cancelled_one_is_dropped_once() -> None:
    def play(role: PooledRole, context: PlayedContext) -> None:
        role.dispatch(DISPATCH)
        role.cancel(key_of("a"))
        role.cancel(key_of("a"))
        role.on_event(Ended(key_of("a"), GATEWAY, "stop", vector=VECTOR))
        assert context.commands() == [Add(SPEC), Release(key_of("a"))]
        assert context.outbox.flush() == {}

    with_role(play)


def test_each_dispatch_is_taken_by_one_role() -> None:
    async def run() -> None:
        peer = peer_of(info_of("d", "decode"))
        dispatches = {
            "pooled": DISPATCH,
            "alone": Dispatch(spec=spec_of("a")),
            "pair": Dispatch(spec=spec_of("a"), decode_peer=peer),
        }
        taken = {}
        names: tuple[RoleName, ...] = ("prefill", "decode")
        for worker in names:
            context = PlayedContext(worker, worker)
            roles: list[Role] = [PooledRole(context), PrefillRole(context), DecodeRole(context)]
            for name, dispatch in dispatches.items():
                taken[worker, name] = [type(role).__name__ for role in roles if role.takes(dispatch)]
        assert taken == {
            ("prefill", "pooled"): ["PooledRole"],
            ("prefill", "alone"): [],  # it has the decode role where it fetches prefixes, and for that only
            ("prefill", "pair"): ["PrefillRole"],
            ("decode", "pooled"): [],
            ("decode", "alone"): ["DecodeRole"],
            ("decode", "pair"): [],
        }

    asyncio.run(run())
