"""The small parts around the core: configuration, wake-ups, the client's handle, frames."""

import asyncio
from typing import Any

import msgspec
import pytest

from disagg.proto.errors import ConfigError, InternalError, LimitError, RequestCancelledError, UnavailableError
from disagg.proto.ids import AttemptKey, GatewayId, Incarnation, RequestId, WorkerId
from disagg.proto.messages import Cancel, SessionHello, StepUpdate, TokenLogprobs, encode
from disagg.router.api import CallDemand, Completion, TenantLimits, TokenBatch
from disagg.router.config import RouterConfig
from disagg.router.requests.events import WorkerUp
from disagg.router.requests.timers import Timers
from disagg.router.shell import server as server_module
from disagg.router.shell import wire
from disagg.router.shell.handle import LOGPROBS_FACTOR, MAX_UNREAD_BYTES, Handle, num_bytes
from disagg.router.shell.router_servers import RouterServers
from disagg.router.shell.server import RouterServer
from tests.support.router import EMPTY, routed_request, tokens_update, worker_info
from tests.support.secret import SECRET

# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("max_queued", 0, "must be at least 1, not 0"),
        ("max_attempts", 0, "must be at least 1, not 0"),
        ("max_losses", 0, "must be at least 1, not 0"),
        ("breaker_failures", 0, "must be at least 1, not 0"),
        ("breaker_share", 0.0, r"must be in \(0, 1\], not 0.0"),
        ("breaker_pause_s", 0.0, "must be positive, not 0.0"),
        ("pair_timeout_s", 0.0, "must be positive, not 0.0"),
        ("kv_barrier_ms", -1, "must not be negative, not -1"),
        ("expected_output_tokens", 0, "must be at least 1, not 0"),
        ("ttft_slo_s", 0.0, "must be positive, not 0.0"),
        ("refusal_pause_s", 0.0, "must be positive, not 0.0"),
        ("watermark", 1.0, r"must be in \[0, 1\), not 1.0"),
    ],
)
def test_values_that_cannot_work_are_named(field: str, value: float, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"^router.{field}: {rule}$"):
        msgspec.structs.replace(RouterConfig(), **{field: value})


# ---------------------------------------------------------------- wake-ups


def test_wakeups_come_in_time_order_and_skip_requests_that_ended() -> None:
    timers = Timers()
    for when, name in ((3.0, "c"), (1.0, "gone"), (2.0, "b"), (2.0, "a"), (4.0, "b")):
        timers.add(when, RequestId(name))
    timers.forget(RequestId("gone"))
    assert timers.earliest() == 2.0
    assert timers.pop_due(1.9) is None
    assert [timers.pop_due(2.0) for _ in range(3)] == ["b", "a", None]
    timers.forget(RequestId("c"))
    assert timers.earliest() == 4.0
    timers.forget(RequestId("b"))
    assert timers.earliest() is None
    assert timers.pop_due(99.0) is None


def test_an_old_wakeup_is_none_of_a_new_request_with_the_same_id() -> None:
    timers = Timers()
    timers.add(1.0, RequestId("a"))
    timers.forget(RequestId("a"))
    timers.add(2.0, RequestId("a"))
    assert timers.earliest() == 2.0
    assert [timers.pop_due(9.0) for _ in range(2)] == ["a", None]


def test_wakeups_take_memory_for_what_is_in_flight_only() -> None:
    timers, alive = Timers(), 10
    for number in range(20_000):
        timers.add(600.0 + number, RequestId(f"r{number}"))
        if number >= alive:
            timers.forget(RequestId(f"r{number - alive}"))
        assert len(timers) <= 2 * alive + 2 * 64
    for number in range(20_000):
        timers.forget(RequestId(f"r{number}"))
    assert len(timers) <= 64
    assert timers.earliest() is None


# ---------------------------------------------------------------- the handle


def handle() -> tuple[Handle, list[str]]:
    cancelled: list[str] = []
    return Handle(RequestId("r0"), cancelled.append), cancelled


async def test_a_slow_consumer_gets_everything_at_once() -> None:
    it, _ = handle()
    it.put(TokenBatch([1]))
    it.put(TokenBatch([2, 3]))
    assert await anext(it) == TokenBatch([1, 2, 3])
    it.put(TokenBatch([4]))
    it.finish(Completion("stop", 4, 0))
    assert (it.completion, it.error) == (None, None)
    assert [batch async for batch in it] == [TokenBatch([4])]
    assert it.completion == Completion("stop", 4, 0)
    assert [batch async for batch in it] == []


async def test_logprobs_stay_with_their_tokens() -> None:
    it, _ = handle()
    it.put(TokenBatch([1], [TokenLogprobs(-0.5)]))
    it.put(TokenBatch([2, 3], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)]))
    assert await anext(it) == TokenBatch([1, 2, 3], [TokenLogprobs(-0.5), TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    it.put(TokenBatch([4], [TokenLogprobs(-3.0)]))
    assert await anext(it) == TokenBatch([4], [TokenLogprobs(-3.0)])


async def test_a_waiting_consumer_is_woken_by_tokens_and_by_the_end() -> None:
    it, _ = handle()

    async def consume() -> list[TokenBatch]:
        return [batch async for batch in it]

    consumer = asyncio.create_task(consume())
    for token in (1, 2):
        await asyncio.sleep(0)
        it.put(TokenBatch([token]))
        await asyncio.sleep(0)
    it.finish(Completion("length", 2, 0))
    assert await consumer == [TokenBatch([1]), TokenBatch([2])]


async def test_tokens_before_a_failure_are_delivered() -> None:
    it, _ = handle()
    it.put(TokenBatch([1]))
    it.fail(UnavailableError("gone", "worker_lost"))
    assert await anext(it) == TokenBatch([1])
    with pytest.raises(UnavailableError, match="gone"):
        await anext(it)
    assert it.completion is None


async def test_after_a_cancel_nothing_is_delivered() -> None:
    it, cancelled = handle()
    it.put(TokenBatch([1]))
    it.cancel()
    assert cancelled == ["r0"]
    it.fail(RequestCancelledError("cancelled"))
    with pytest.raises(RequestCancelledError):
        await anext(it)
    it.cancel()
    assert cancelled == ["r0"]


async def test_a_consumer_that_leaves_too_much_unread_is_lost() -> None:
    it, cancelled = handle()
    most = MAX_UNREAD_BYTES // num_bytes(TokenBatch([1000]))
    it.put(TokenBatch([1000] * most))
    assert (await anext(it)).token_ids == [1000] * most  # what was read counts no more
    it.put(TokenBatch([1000] * most))
    assert it.error is None
    it.put(TokenBatch([1000]))
    assert cancelled == []
    await asyncio.sleep(0)
    assert cancelled == ["r0"]
    it.put(TokenBatch([1000]))
    it.fail(RequestCancelledError("cancelled"))
    with pytest.raises(UnavailableError) as lost:
        await anext(it)
    assert lost.value.code == "stream_lost"


async def test_log_probabilities_may_take_more() -> None:
    it, cancelled = handle()
    one = TokenBatch([1], [TokenLogprobs(-1.0, (1, 2), (-1.0, -2.0))])
    most = LOGPROBS_FACTOR * MAX_UNREAD_BYTES // num_bytes(one)
    for _ in range(most):
        it.put(one)
    assert it.error is None
    it.put(one)
    await asyncio.sleep(0)
    assert cancelled == ["r0"]


async def test_the_first_end_counts() -> None:
    it, cancelled = handle()
    it.put(TokenBatch([1]))
    it.finish(Completion("stop", 1, 0))
    it.fail(RequestCancelledError("too late"))
    it.cancel()
    assert ([batch async for batch in it], it.error, cancelled) == ([TokenBatch([1])], None, [])


# ---------------------------------------------------------------- frames


def test_frames_of_a_session() -> None:
    info = worker_info("p0")
    assert wire.hello(encode(SessionHello(info=info)), WorkerId("p0")) == info
    update = tokens_update("r0", 0, 0, 7)
    assert wire.step_update(encode(update)) == update
    assert wire.cancel(AttemptKey(RequestId("r0"), 3)) == Cancel(request_id=RequestId("r0"), attempt=3)


def test_what_a_worker_must_not_say() -> None:
    with pytest.raises(InternalError, match="p0 answers at the address of p1"):
        wire.hello(encode(SessionHello(info=worker_info("p0"))), WorkerId("p1"))
    with pytest.raises(InternalError, match="p0 sent StepUpdate before its hello"):
        wire.hello(encode(StepUpdate()), WorkerId("p0"))
    with pytest.raises(InternalError, match="a second hello"):
        wire.step_update(encode(SessionHello(info=worker_info("p0"))))
    with pytest.raises(msgspec.MsgspecError):
        wire.step_update(b"\xc1")


# ---------------------------------------------------------------- the server


class FailingDetector:
    """Fails at the first looks, as a fault of ours would."""

    def __init__(self, num_failures: int) -> None:
        self.num_looks = 0
        self.looked = asyncio.Event()
        self._num_failures = num_failures

    def sweep(self, now: float) -> list[tuple[tuple[WorkerId, Incarnation], str]]:
        self.num_looks += 1
        if self.num_looks <= self._num_failures:
            raise RuntimeError("a fault of ours")
        self.looked.set()
        return []


async def test_a_fault_in_one_look_for_workers_that_hang_is_not_the_end_of_looking(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "SWEEP_S", 0.0)
    server = RouterServer(RouterConfig(), GatewayId("g0"), (), SECRET)
    detector = FailingDetector(2)
    server._detector = detector  # type: ignore[assignment]
    await server.start()
    await asyncio.wait_for(detector.looked.wait(), 20.0)
    await server.stop()
    failed = [record for record in caplog.records if record.getMessage().startswith("looking for workers that hang")]
    assert len(failed) == 2


class SilentLink:
    """A worker that takes all and answers nothing."""

    def send(self, message: object) -> None:
        pass

    async def stop(self, flush_s: float) -> None:
        pass


@pytest.mark.parametrize("in_core", [True, False])
async def test_a_fault_while_a_request_is_taken_leaves_nothing_of_it(
    in_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the core has it, and after."""
    server = RouterServer(RouterConfig(), GatewayId("g0"), (), SECRET)
    server._links[WorkerId("c0")] = SilentLink()  # type: ignore[assignment]
    server._handle_event(WorkerUp(worker_info("c0")))
    request = routed_request("r0")

    def fault(*args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("a fault of ours")

    if in_core:
        monkeypatch.setattr(server._core, "handle", fault)
    else:
        monkeypatch.setattr(server, "_set_timer", fault)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        server.submit(request, 0.0)
    assert (server.holdings(), server._handles) == (EMPTY, {})
    handle = server.submit(request, 0.0)
    assert server.holdings()["requests"] == 1
    handle.cancel()
    assert server.holdings() == EMPTY
    await server.stop()


async def test_routers_of_one_gateway_share_limits_for_a_minute() -> None:
    """Also what a request is charged when it is queued, and what it gives back at its end."""
    servers = {key: RouterServer(RouterConfig(), GatewayId("g0"), (), SECRET, clock=lambda: 5.0) for key in "abc"}
    routers = RouterServers(servers)
    limits = TenantLimits(requests_per_minute=4, tokens_per_minute=1000, is_sole=False)

    def left() -> list[tuple[int, ...]]:
        quotas = [server.remaining_quota("t", limits) for server in servers.values()]
        return [tuple(each.remaining for each in quota if each is not None) for quota in quotas]

    servers["a"].admit(CallDemand(tenant="t", limits=limits, num_answers=2, num_tokens=50))
    assert left() == [(2, 950)] * 3
    servers["a"].refund("t", 50, 2)
    assert left() == [(2, 1000)] * 3
    link: Any = SilentLink()
    servers["b"]._links[WorkerId("c0")] = link
    servers["b"]._handle_event(WorkerUp(worker_info("c0")))
    request = msgspec.structs.replace(routed_request("r0", 16, max_tokens=16), tenant="t", limits=limits)
    handle = servers["b"].submit(request, 5.0)
    assert left() == [(1, 968)] * 3
    handle.cancel()
    assert left()[0][0] == 1
    assert len(set(left())) == 1
    with pytest.raises(LimitError, match="asks for 2 requests, and of 4 a minute has 1 left"):
        servers["c"].admit(CallDemand(tenant="t", limits=limits, num_answers=2, num_tokens=1))
    before = left()[0]
    servers["d"] = RouterServer(RouterConfig(), GatewayId("g0"), (), SECRET, clock=lambda: 5.0)
    await routers.add("d", servers["d"])
    assert left() == [before] * 4, "a model that comes begins with what is left"
    servers["d"].admit(CallDemand(tenant="t", limits=limits, num_answers=1, num_tokens=1))
    assert left() == [(0, before[1] - 1)] * 4
    for server in servers.values():
        await server.stop()
