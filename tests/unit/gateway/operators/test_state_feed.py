"""However many watch the cluster, the controller is asked once."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from disagg.gateway.auth.auth import Caller
from disagg.gateway.operators.shell.state_feed import MAX_STREAMS, MAX_STREAMS_PER_TENANT, StateFeed
from disagg.proto.control import ControlState, PoolState
from disagg.proto.errors import OverloadedError
from disagg.router.api import ClusterView

ADMIN, PLAIN = Caller("ops", True), Caller("a", False)
NOTHING = ControlState(pools=(), workers=(), gateways=())


class Cluster:
    """A controller that answers when it is let."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.now = 0.0
        self.may_answer = asyncio.Event()
        self.feed = StateFeed(self._ask, lambda: ClusterView((), self.num_asked, 0), lambda: self.now)

    async def _ask(self) -> ControlState:
        self.num_asked += 1
        await self.may_answer.wait()
        return NOTHING


async def test_all_who_wait_get_the_answer_to_one_question() -> None:
    cluster = Cluster()
    asked = [asyncio.create_task(cluster.feed.latest(0.0)) for _ in range(300)]
    await asyncio.sleep(0)
    asked[0].cancel()
    await asyncio.sleep(0)
    cluster.may_answer.set()
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert (len({id(snapshot) for snapshot in others}), cluster.num_asked) == (1, 1)


async def test_a_state_is_used_as_long_as_it_is_young_enough() -> None:
    cluster = Cluster()
    cluster.may_answer.set()
    first = await cluster.feed.latest(0.5)
    cluster.now = 0.5
    assert await cluster.feed.latest(0.5) is first
    cluster.now = 0.6
    second = await cluster.feed.latest(0.5)
    assert (second is first, cluster.num_asked) == (False, 2)
    assert await cluster.feed.now() is not second
    assert second.message(ADMIN) is second.message(Caller("b", True))
    assert second.message(PLAIN) is not second.message(ADMIN)


async def test_each_set_of_models_has_a_message_of_its_own() -> None:
    async def ask() -> ControlState:
        names = ("q/decode", "l/decode")
        return ControlState(
            pools=tuple(PoolState(name=name, desired=1, ready=1) for name in names), workers=(), gateways=()
        )

    models = {"q": "qwen", "l": "llama"}
    feed = StateFeed(ask, lambda: ClusterView((), 0, 0), lambda: 0.0, models=lambda: models)
    found = await feed.latest(1.0)

    def pools(models: frozenset[str] | None, is_admin: bool = False) -> list[str]:
        message = found.message(Caller("a", is_admin, models=models))
        return [pool.name for pool in message.state.pools]

    qwen, llama, another = (frozenset({name}) for name in ("qwen", "llama", "another"))
    assert (pools(qwen), pools(llama), pools(another)) == (["q/decode"], ["l/decode"], [])
    assert pools(None) == pools(qwen, is_admin=True) == pools(qwen | llama) == ["q/decode", "l/decode"]
    assert found.message(Caller("a", False, models=qwen)) is found.message(Caller("b", False, models=qwen | another))


async def test_a_question_that_fails_is_asked_again_by_the_next() -> None:
    async def ask() -> ControlState:
        raise OSError("gone")

    feed = StateFeed(ask, lambda: ClusterView((), 0, 0), lambda: 0.0)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            await feed.latest(1.0)
    await feed.close()


async def test_closing_ends_a_question() -> None:
    cluster = Cluster()
    asked = asyncio.create_task(cluster.feed.latest(0.0))
    await asyncio.sleep(0)
    await cluster.feed.close()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_streams_are_few_for_a_tenant_and_bounded_in_all() -> None:
    feed = Cluster().feed
    with ExitStack() as stack:
        for i in range(MAX_STREAMS):
            stack.enter_context(feed.watching(Caller(f"t{i // MAX_STREAMS_PER_TENANT}", False)))
        with pytest.raises(OverloadedError, match=r"^WatchClusterState: 16 streams of a tenant at a time$"):
            feed.watching(Caller("t0", False)).__enter__()
        with pytest.raises(OverloadedError, match=r"^WatchClusterState: 64 streams at a time$"):
            feed.watching(PLAIN).__enter__()
        with feed.watching(ADMIN):
            pass
    with feed.watching(PLAIN):
        assert vars(feed)["_streams"] == {"a": 1}
    assert vars(feed)["_streams"] == {}
