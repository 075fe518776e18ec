"""`RouterServer` over real gRPC against scripted workers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from disagg.proto.block_hash import tenant_tag
from disagg.proto.errors import DeadlineError, OverloadedError, RequestCancelledError, UnavailableError
from disagg.proto.ids import GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import BlocksSnapshot, BlocksStored, Dispatch, Load
from disagg.router.api import Completion, RequestHandle
from disagg.router.config import RouterConfig
from disagg.router.shell.server import RouterServer
from tests.integration.gateways.scripted_worker import ScriptedWorker
from tests.support.router import (
    EMPTY,
    end_update,
    handed_over_update,
    prefilled_update,
    routed_request,
    tokens_update,
    worker_report,
)
from tests.support.secret import SECRET
from tests.support.waiting import eventually

WAIT_S = 60.0
CONFIG = RouterConfig(local_prefill="never", min_reconnect_s=0.02, max_reconnect_s=0.1)


@contextlib.asynccontextmanager
async def router(*workers: ScriptedWorker, config: RouterConfig = CONFIG) -> AsyncIterator[RouterServer]:
    """A router with sessions to all workers; afterwards it holds nothing and no task is left."""
    before = asyncio.all_tasks()
    server = RouterServer(config, GatewayId("g0"), [worker.info for worker in workers], SECRET)
    await server.start()
    try:
        await server.wait_until_connected(WAIT_S)
        yield server
        assert server.check_integrity() == []
    finally:
        await server.stop()
    assert server.holdings() == EMPTY
    assert [task.get_name() for task in asyncio.all_tasks() - before if _is_of_the_router(task)] == []


def _is_of_the_router(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename == inspect.getsourcefile(RouterServer)


async def read_all(handle: RequestHandle) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return [token async for batch in handle for token in batch.token_ids]


async def read(handle: RequestHandle, num_tokens: int) -> list[int]:
    """Exactly so many tokens."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += (await asyncio.wait_for(anext(aiter(handle)), WAIT_S)).token_ids
    assert len(tokens) == num_tokens
    return tokens


def submit(server: RouterServer, name: str, **how: object) -> RequestHandle:
    return server.submit(routed_request(name, **how), time.monotonic())  # type: ignore[arg-type]


def is_for(dispatch: Dispatch, name: str, attempt: int = 0) -> bool:
    return (dispatch.spec.request_id, dispatch.spec.attempt) == (name, attempt)


async def test_a_request_over_a_pair_with_tokens_in_order() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        assert (p0.gateways, d0.gateways) == (["g0"], ["g0"])
        handle = submit(server, "r0", deadline=time.monotonic() + 60)
        dispatch = await p0.next_dispatch()
        peer = dispatch.decode_peer
        assert is_for(dispatch, "r0")
        assert peer is not None
        assert (peer.worker_id, peer.incarnation, peer.address) == ("d0", "1", d0.info.address)
        assert dispatch.spec.timeout_s == pytest.approx(60, abs=5)
        # D's stream overtakes P's: its second token waits for the first.
        d0.say(handed_over_update("r0", 0, kv_bytes=123))
        d0.say(tokens_update("r0", 0, 1, 11, 12))
        await eventually(lambda: server.holdings()["sequences"] == 1)
        p0.say(tokens_update("r0", 0, 0, 10))
        p0.say(prefilled_update("r0", 0, cached_tokens=16))
        assert await read(handle, 3) == [10, 11, 12]
        d0.say(tokens_update("r0", 0, 3, 13))
        d0.say(end_update("r0", 0, "stop"))
        assert await read_all(handle) == [13]
        assert handle.completion == Completion("stop", 4, 16)
        assert server.holdings() == EMPTY
        trace = server.trace(RequestId("r0"))
        assert trace is not None
        assert (trace.prefill_worker, trace.decode_worker, trace.kv_bytes) == ("p0", "d0", 123)
        assert list(trace.stages) == ["tokenize", "route", "kv_transfer", "first_token", "end"]


async def test_what_is_refused_at_once_is_raised_and_not_held() -> None:
    config = RouterConfig(local_prefill="never", max_queued=1, retry_after_s=2.5)
    async with ScriptedWorker("p0", token_budget=16) as p0, ScriptedWorker("d0") as d0:
        async with router(p0, d0, config=config) as server:
            with pytest.raises(DeadlineError):
                submit(server, "r0", deadline=time.monotonic() - 1)
            submit(server, "r0")
            submit(server, "r1")
            with pytest.raises(OverloadedError) as overloaded:
                submit(server, "r2")
            assert overloaded.value.retry_after_s == 2.5
            with pytest.raises(ValueError, match="r0 is in use"):
                submit(server, "r0")
            assert server.view().num_queued == 1
        with pytest.raises(UnavailableError):
            submit(server, "r3")


async def test_cancel_reaches_every_leg_and_ends_the_iteration() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        handle = submit(server, "r0")
        await p0.next_dispatch()
        handle.cancel()
        handle.cancel()
        with pytest.raises(RequestCancelledError):
            await read_all(handle)
        assert (await p0.next_cancel(), await d0.next_cancel()) == (("r0", 0), ("r0", 0))
        p0.say(tokens_update("r0", 0, 0, 10))
        await eventually(lambda: server.counters().get("unknown_request"))
        assert server.holdings() == EMPTY


async def test_a_lost_worker_is_left_and_found_again_in_its_next_incarnation() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        handle = submit(server, "r0")
        await p0.next_dispatch()
        p0.say(tokens_update("r0", 0, 0, 10))
        p0.say(prefilled_update("r0", 0))
        d0.say(handed_over_update("r0", 0))
        assert await read(handle, 1) == [10]
        d0.say(tokens_update("r0", 0, 0, 10, 11))
        assert await read(handle, 1) == [11]
        await eventually(lambda: server.holdings()["tokens"] == 0)
        await d0.restart("2")
        dispatch = await p0.next_dispatch()
        assert is_for(dispatch, "r0", attempt=1)
        assert dispatch.decode_peer is not None
        assert (dispatch.decode_peer.incarnation, dispatch.spec.emitted_token_ids) == ("2", (10, 11))
        d0.say(handed_over_update("r0", 1))
        d0.say(tokens_update("r0", 1, 2, 12))
        d0.say(end_update("r0", 1, "length"))
        assert await read_all(handle) == [12]
        assert handle.completion == Completion("length", 3, 0)


async def test_a_session_that_the_worker_closes_is_opened_again() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        handle = submit(server, "r0")
        await p0.next_dispatch()
        d0.end_session()
        assert await p0.next_cancel() == ("r0", 0)
        # The same incarnation comes back: it receives the cancels, and gets the next attempt.
        assert await d0.next_cancel() == ("r0", 0)
        assert is_for(await p0.next_dispatch(), "r0", attempt=1)
        assert d0.gateways == ["g0", "g0"]
        handle.cancel()


@pytest.mark.parametrize("frame", [b"\xc1 no frame", b""], ids=["garbage", "empty"])
async def test_a_frame_that_cannot_be_read_ends_the_session(frame: bytes) -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        submit(server, "r0")
        await p0.next_dispatch()
        d0.say_raw(frame)
        assert is_for(await p0.next_dispatch(), "r0", attempt=1)


async def test_no_session_without_a_proper_hello() -> None:
    config = RouterConfig(hello_timeout_s=0.2, min_reconnect_s=0.02, max_reconnect_s=0.05)
    async with ScriptedWorker("p0") as p0, ScriptedWorker("p1") as silent:
        p0.hello = b"\xc1"
        silent.greets = False
        server = RouterServer(config, GatewayId("g0"), [p0.info, silent.info], SECRET)
        await server.start()
        with pytest.raises(TimeoutError, match=r"no session with p0, p1 after 0\.3 s"):
            await server.wait_until_connected(0.3)
        assert server.view().workers == ()
        p0.hello, silent.greets = None, True
        await server.wait_until_connected(WAIT_S)
        await server.stop()


async def test_a_worker_that_starts_late_is_found() -> None:
    async with ScriptedWorker("c0") as c0:
        await c0.stop_listening()
        server = RouterServer(CONFIG, GatewayId("g0"), [c0.info], SECRET)
        await server.start()
        with pytest.raises(UnavailableError):
            submit(server, "r0")
        await c0.listen()
        await server.wait_until_connected(WAIT_S)
        handle = submit(server, "r0")
        dispatch = await c0.next_dispatch()
        assert dispatch.decode_peer is None
        c0.say(tokens_update("r0", 0, 0, 10))
        c0.say(end_update("r0", 0, "stop"))
        assert await read_all(handle) == [10]
        await server.stop()


async def test_deadlines_fire_without_any_message() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        handle = submit(server, "r0", deadline=time.monotonic() + 1.0)
        with pytest.raises(DeadlineError):
            await read_all(handle)
        assert await d0.next_cancel() == ("r0", 0)
        assert server.holdings() == EMPTY


async def test_reports_are_followed_over_gaps_and_breaks() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        await eventually(lambda: d0.num_watches == 1)
        d0.report(worker_report("d0", 0, BlocksSnapshot(hashes=()), load=Load(num_running=1)))
        await eventually(lambda: server.view().workers[0].load.num_running == 1)
        d0.report(worker_report("d0", 5, BlocksStored(hashes=())))
        await eventually(lambda: d0.num_watches == 2)
        assert server.counters()["report_gap"] == 1
        d0.end_watch()
        await eventually(lambda: d0.num_watches == 3)
        d0.report(worker_report("d0", 0, BlocksSnapshot(hashes=()), load=Load(num_running=2)))
        await eventually(lambda: server.view().workers[0].load.num_running == 2)
        assert d0.gateways == ["g0"]


async def test_workers_may_join_move_and_leave() -> None:
    d0, moved = ScriptedWorker("d0"), ScriptedWorker("d0", incarnation="2")
    async with ScriptedWorker("p0") as p0, d0, moved, router(p0) as server:
        with pytest.raises(UnavailableError):
            submit(server, "r0")
        await server.add_worker(d0.info)
        await server.wait_until_connected(WAIT_S)
        submit(server, "r0")
        await p0.next_dispatch()
        await server.add_worker(moved.info)
        dispatch = await p0.next_dispatch()
        assert is_for(dispatch, "r0", attempt=1)
        assert dispatch.decode_peer is not None
        assert dispatch.decode_peer.address == moved.info.address
        await server.remove_worker(p0.info.worker_id)
        assert [view.info.worker_id for view in server.view().workers] == ["d0"]


async def test_a_worker_whose_queue_is_full_is_lost() -> None:
    config = RouterConfig(local_prefill="never", outbox_frames=4, min_reconnect_s=5.0, max_reconnect_s=5.0)
    async with ScriptedWorker("c0") as c0, router(c0, config=config) as server:
        # In one breath: the writer has no chance in between.
        handles = [submit(server, f"r{i}", prompt=16) for i in range(6)]
        assert server.view().num_running == 6
        await eventually(lambda: not server.view().workers)
        assert server.counters()["worker_lost"] == 6
        assert server.view().num_queued == 6
        for handle in handles:
            handle.cancel()


async def test_stop_fails_what_runs_and_tells_the_workers() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0:
        async with router(p0, d0) as server:
            handle = submit(server, "r0")
            await p0.next_dispatch()
        with pytest.raises(UnavailableError, match="stopping"):
            await read_all(handle)
        assert (await p0.next_cancel(), await d0.next_cancel()) == (("r0", 0), ("r0", 0))


async def test_audit() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        assert [report.worker_id for report in await server.audit()] == ["p0", "d0"]
        await d0.stop_listening()
        with pytest.raises(UnavailableError, match="d0 does not answer"):
            await server.audit(timeout_s=WAIT_S)


async def test_a_draining_worker_keeps_what_it_has_gets_nothing_new_and_is_empty_in_the_end() -> None:
    drained: list[tuple[str, str]] = []
    async with (
        ScriptedWorker("p0") as p0,
        ScriptedWorker("d0") as d0,
        ScriptedWorker("d1") as d1,
        router(p0, d0, d1) as server,
    ):
        server.on_drained = lambda worker_id, incarnation: drained.append((worker_id, incarnation))
        handle = submit(server, "r0")
        peer = (await p0.next_dispatch()).decode_peer
        assert peer is not None
        busy, other = (d0, d1) if peer.worker_id == "d0" else (d1, d0)
        server.drain_worker(busy.info.worker_id, busy.info.incarnation)
        server.drain_worker(busy.info.worker_id, busy.info.incarnation)
        p0.say(prefilled_update("r0", 0))
        p0.say(tokens_update("r0", 0, 0, 10))
        busy.say(handed_over_update("r0", 0))
        assert await read(handle, 1) == [10]
        later = submit(server, "r1")
        dispatch = await p0.next_dispatch()
        assert dispatch.decode_peer is not None
        assert dispatch.decode_peer.worker_id == other.info.worker_id
        assert drained == []
        busy.say(end_update("r0", 0, "stop"))
        assert await read_all(handle) == []
        assert drained == [(busy.info.worker_id, busy.info.incarnation)]
        later.cancel()
        with contextlib.suppress(RequestCancelledError):
            await read_all(later)


async def test_a_worker_without_a_session_is_empty_at_once() -> None:
    drained: list[tuple[str, str]] = []
    async with (
        ScriptedWorker("p0") as p0,
        ScriptedWorker("d0") as d0,
        ScriptedWorker("d1") as d1,
        router(p0, d0, d1) as server,
    ):
        server.on_drained = lambda worker_id, incarnation: drained.append((worker_id, incarnation))
        server.drain_worker(WorkerId("d7"), Incarnation("1"))
        assert drained == []
        server.drain_worker(d1.info.worker_id, Incarnation("another"))
        assert drained == [("d1", "another")]
        server.drain_worker(d0.info.worker_id, d0.info.incarnation)
        assert drained[1:] == [("d0", "1")]
        await server.remove_worker(d0.info.worker_id)
        assert [worker.info.worker_id for worker in server.view().workers] == ["d1", "p0"]


async def test_all_workers_with_a_session_are_told_to_forget_a_tenant() -> None:
    async with ScriptedWorker("p0") as p0, ScriptedWorker("d0") as d0, router(p0, d0) as server:
        await d0.stop_listening()
        await eventually(lambda: server.view().unreachable != ())
        assert server.forget("team-a") == {"p0": True, "d0": False}
        assert await asyncio.wait_for(p0.forgotten.get(), WAIT_S) == tenant_tag("team-a")
