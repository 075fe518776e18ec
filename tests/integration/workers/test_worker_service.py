"""The sockets of a worker around a worker that the test plays: who is in session, who is too slow, who comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from disagg.engine.config import WorkerConfig
from disagg.engine.core.reports import EngineTotals
from disagg.engine.shell import service as service_module
from disagg.engine.shell.engine_thread import Batch, EngineStoppedError
from disagg.engine.shell.service import WorkerService
from disagg.proto.ids import BlockHash, GatewayId, RequestId, WorkerId
from disagg.proto.messages import (
    AuditReport,
    AuditRequest,
    BlocksRemoved,
    BlocksSnapshot,
    BlocksStored,
    Cancel,
    End,
    GatewayToWorker,
    KvEvent,
    Load,
    SessionHello,
    StepSample,
    StepUpdate,
    TransferCount,
    WatchRequest,
    WorkerReport,
    WorkerToGateway,
    decoder,
    encode,
)
from disagg.proto.services import AUDIT, CHANNEL_OPTIONS, GATEWAY_ID_METADATA, SESSION, WATCH
from tests.support.router import worker_info
from tests.support.secret import SECRET
from tests.support.waiting import eventually

GATEWAY = GatewayId("g")
NEVER_S = 60.0
"""Until an idle heartbeat, in tests of reports that follow turns of the engine: longer than any machine's hiccup."""
SOON_S = 0.02
"""The same in tests of heartbeats."""
SNAPSHOT = BlocksSnapshot(hashes=(BlockHash(b"everything"),))
_up = decoder(WorkerToGateway).decode
_report = decoder(WorkerReport).decode


class PlayedWorker:
    """What `WorkerService` uses of a worker."""

    def __init__(self, report_idle_s: float) -> None:
        self.config = WorkerConfig(
            worker_id="w",
            roles=("decode",),
            model_path="fake",
            report_interval_s=0.001,
            report_idle_s=report_idle_s,
        )
        self.info = worker_info("d0")
        self.messages: list[GatewayToWorker] = []
        self.lost: list[GatewayId] = []
        self.snapshots: list[Future[BlocksSnapshot]] = []
        self.fault: Exception | None = None
        self.num_bytes = 0
        self.turn = 0.0
        self.num_pending = 0

    def turn_s(self) -> float:
        return self.turn

    def expected_s(self) -> float:
        return 2 * self.turn

    def num_pending_prompt_tokens(self) -> int:
        return self.num_pending

    def on_message(self, message: GatewayToWorker, gateway_id: GatewayId) -> None:
        if self.fault is not None:
            raise self.fault
        self.messages.append(message)

    def on_gateway_lost(self, gateway_id: GatewayId) -> None:
        self.lost.append(gateway_id)

    async def prefix_snapshot(self) -> BlocksSnapshot:
        future: Future[BlocksSnapshot] = Future()
        self.snapshots.append(future)
        return await asyncio.wrap_future(future)

    def transfers(self) -> tuple[TransferCount, ...]:
        return (TransferCount(decode_worker=WorkerId("d"), transport="t", num_bytes=self.num_bytes),)

    def num_served_fetches(self) -> int:
        return 0

    async def audit(self) -> AuditReport:
        raise EngineStoppedError("the engine has stopped")


class Bench:
    """A served `PlayedWorker`, and a channel to it."""

    def __init__(self, worker: PlayedWorker, service: WorkerService, channel: grpc.aio.Channel) -> None:
        self.worker = worker
        self.service = service
        self.channel = channel
        self.calls: list[Any] = []

    async def open_session(self) -> Any:
        """A session that greeted."""
        call: Any = self.channel.stream_stream(SESSION, None, None)(
            None, metadata=((GATEWAY_ID_METADATA, GATEWAY), *SECRET.metadata)
        )
        self.calls.append(call)
        assert _up(await call.read()) == SessionHello(info=self.worker.info)
        return call

    def publish(
        self, load: Load, *kv_events: KvEvent, step: StepSample | None = None, totals: EngineTotals | None = None
    ) -> None:
        """One turn of the engine."""
        steps = () if step is None else (step,)
        self.service.publish(Batch([], kv_events, load, steps, totals or EngineTotals()))

    def send(self, detail: str) -> bool:
        end = End(request_id=RequestId("r"), attempt=1, reason="failed", detail=detail)
        return self.service.send(GATEWAY, StepUpdate(ends=(end,)))


@asynccontextmanager
async def bench(report_idle_s: float = NEVER_S) -> AsyncIterator[Bench]:
    worker = PlayedWorker(report_idle_s)
    service = WorkerService(cast(Any, worker), Load(blocks_total=7), SECRET)
    port = await service.bind("127.0.0.1", 0, [])
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            it = Bench(worker, service, channel)
            try:
                yield it
            finally:
                for call in it.calls:
                    call.cancel()
    finally:
        await service.close()


async def details(call: Any) -> list[str]:
    """What is still sent, to the end of the stream."""
    found = []
    while isinstance(frame := await asyncio.wait_for(call.read(), 60), bytes):
        found += [end.detail for end in _up(frame).ends]
    return found


def cancel_frame(request_id: str) -> bytes:
    return encode(Cancel(request_id=RequestId(request_id), attempt=1))


async def test_a_session_begins_and_ends_with_a_sweep() -> None:
    async with bench() as it:
        assert not it.send("nobody is here")
        call = await it.open_session()
        assert it.worker.lost == [GATEWAY]  # orphans of a session that broke unseen
        assert it.send("one")
        await call.write(cancel_frame("a"))
        await eventually(lambda: it.worker.messages)
        call.cancel()
        await eventually(lambda: it.worker.lost == [GATEWAY] * 2)
        assert not it.send("gone")


async def test_a_new_session_replaces_the_old_one_and_outlives_its_end() -> None:
    async with bench() as it:
        old = await it.open_session()
        new = await it.open_session()
        assert it.worker.lost == [GATEWAY] * 2
        assert await details(old) == []  # ended by the worker, in good order
        assert it.send("to the new one")
        await new.write(cancel_frame("new"))
        await eventually(lambda: it.worker.messages)
        assert it.worker.lost == [GATEWAY] * 2  # the old handler's end swept nothing
        assert [end.detail for end in _up(await new.read()).ends] == ["to the new one"]


async def test_a_gateway_that_does_not_read_is_swept_while_its_stream_is_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service_module, "MAX_PENDING_UPDATES", 20)
    async with bench() as it:
        call = await it.open_session()
        assert it.send("read")
        assert [end.detail for end in _up(await call.read()).ends] == ["read"]
        big = "x" * (1 << 20)
        while len(it.worker.lost) == 1:
            assert it.send(big)
            await asyncio.sleep(0)
        assert not it.send("no session is left")
        assert set(await details(call)) <= {big}  # what was on its way, if anything, and then the end
        assert it.worker.lost == [GATEWAY] * 2


async def test_a_fault_of_ours_closes_the_session_and_sweeps() -> None:
    async with bench() as it:
        call = await it.open_session()
        it.worker.fault = KeyError("a bug")
        await call.write(cancel_frame("a"))
        assert await details(call) == []
        assert it.worker.lost == [GATEWAY] * 2


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(StepUpdate())])
async def test_a_bad_frame_closes_the_session(frame: bytes) -> None:
    async with bench() as it:
        call = await it.open_session()
        await call.write(frame)
        assert await details(call) == []
        assert it.worker.lost == [GATEWAY] * 2


# ---------------------------------------------------------------- reports


def stored(number: int) -> BlocksStored:
    return BlocksStored(hashes=(BlockHash(b"%d" % number),))


async def answer_snapshot(it: Bench, number: int) -> None:
    await eventually(lambda: len(it.worker.snapshots) == number)
    it.worker.snapshots[-1].set_result(SNAPSHOT)


async def test_the_first_report_has_the_snapshot_and_what_came_meanwhile() -> None:
    async with bench() as it:
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        it.calls.append(call)
        await eventually(lambda: it.worker.snapshots)
        it.publish(Load(blocks_total=7, num_running=1), stored(1), step=StepSample(ms=1.5, num_decodes=1))
        await answer_snapshot(it, 1)
        first = _report(await call.read())
        assert (first.sequence, first.kv_events) == (0, (SNAPSHOT, stored(1)))
        assert first.load == Load(blocks_total=7, num_running=1)
        assert first.steps == (StepSample(ms=1.5, num_decodes=1),)
        removed = BlocksRemoved(hashes=(BlockHash(b"1"),))
        for ms in range(6):
            it.publish(Load(blocks_total=7, steps=ms), *([removed] if ms == 0 else []), step=StepSample(ms=ms))
        second = _report(await call.read())
        assert (second.sequence, second.kv_events, second.load) == (1, (removed,), Load(blocks_total=7, steps=5))
        assert [step.ms for step in second.steps] == [0, 1, 2, 3]


async def test_reports_come_while_the_engine_is_in_a_long_step() -> None:
    """Which takes no snapshot until it ends."""
    async with bench(SOON_S) as it:
        it.worker.turn = 3.5
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        it.calls.append(call)
        for sequence in range(2):
            report = _report(await call.read())
            assert (report.sequence, report.kv_events, report.turn_s, report.expected_s) == (sequence, (), 3.5, 7.0)
        it.publish(Load(num_running=1), stored(1))
        it.worker.turn = 0.0
        await answer_snapshot(it, 1)
        while not (report := _report(await call.read())).kv_events:
            pass
        assert (report.kv_events, report.turn_s) == ((SNAPSHOT, stored(1)), 0.0)


async def test_a_report_counts_prompts_that_the_engine_does_not_have_yet() -> None:
    async with bench(SOON_S) as it:
        it.worker.num_pending = 100
        it.publish(Load(uncomputed_prompt_tokens=30))
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        it.calls.append(call)
        await answer_snapshot(it, 1)
        assert _report(await call.read()).load == Load(uncomputed_prompt_tokens=130)


async def test_counters_are_reported_when_they_change() -> None:
    async with bench(SOON_S) as it:
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        it.calls.append(call)
        await answer_snapshot(it, 1)
        first = _report(await call.read()).metrics
        assert first is not None
        assert (sum(first.step_seconds), first.transfers) == (0, it.worker.transfers())
        assert _report(await call.read()).metrics is None
        it.publish(Load(steps=1), step=StepSample(ms=1500, prefill_tokens=7), totals=EngineTotals(3, 2, 1))
        while (second := _report(await call.read()).metrics) is None:
            pass
        assert (second.step_seconds_sum, second.prompt_tokens, second.output_tokens) == (1.5, 7, 3)
        assert (second.cached_tokens, second.preemptions) == (2, 1)
        it.worker.num_bytes = 5  # Without a turn of the engine the next heartbeat brings it.
        while (third := _report(await call.read()).metrics) is None:
            pass
        assert third.transfers[0].num_bytes == 5


async def test_an_idle_worker_reports_its_load_before_any_step() -> None:
    async with bench(SOON_S) as it:
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        it.calls.append(call)
        await answer_snapshot(it, 1)
        reports = [_report(await call.read())]
        while not reports[-1].kv_events:  # where the snapshot took longer than the time until a heartbeat
            reports.append(_report(await call.read()))
        reports.append(_report(await call.read()))
        assert [report.sequence for report in reports] == [*range(len(reports))]
        assert [report.kv_events for report in reports[-2:]] == [(SNAPSHOT,), ()]
        assert {report.load for report in reports} == {Load(blocks_total=7)}


async def test_a_router_that_is_too_far_behind_gets_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_PENDING_KV_EVENTS", 3)
    async with bench() as it:
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        it.calls.append(call)
        await answer_snapshot(it, 1)
        assert _report(await call.read()).kv_events == (SNAPSHOT,)
        it.publish(Load(), stored(1), stored(2))
        it.publish(Load(), stored(3), stored(4))
        await eventually(lambda: len(it.worker.snapshots) == 2)
        it.publish(Load(), stored(5))
        await answer_snapshot(it, 2)
        report = _report(await call.read())
        assert (report.sequence, report.kv_events) == (1, (SNAPSHOT, stored(5)))


async def test_an_engine_that_has_stopped_is_an_answer_not_a_fault() -> None:
    async with bench() as it:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await it.channel.unary_unary(AUDIT, None, None)(encode(AuditRequest()), metadata=SECRET.metadata)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        call: Any = it.channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        await eventually(lambda: it.worker.snapshots)
        it.worker.snapshots[0].set_exception(EngineStoppedError("the engine has stopped"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
