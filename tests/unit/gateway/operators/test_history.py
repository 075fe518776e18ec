"""The samples of the page's charts: how many are kept, and which of them a page gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from disagg.gateway.operators.history import LENGTH_S, MAX_WORKERS, WORKERS_LENGTH_S, History, Sample, sample_of
from disagg.gateway.operators.shell import admin as shell
from disagg.gateway.operators.shell.admin import AdminService
from disagg.proto.control import ControlReply, ControlRequest, ControlState, GatewayCounts, GatewayRecord
from disagg.proto.ids import GatewayId, WorkerId
from disagg.proto.messages import Load
from disagg.router.api import ClusterView, WorkerView
from disagg.router.statistics import Rates
from tests.support.gateway import FakeRouter


def sample(at: int) -> Sample:
    return Sample(at, 1.25, 50.04, {"ttft": (1, 3), "tpot": (0, 0)}, {"decode-0": 37, "decode-1": 5})


def history_of(*times: int) -> History:
    history = History()
    for at in times:
        history.add(sample(at))
    return history


def times_of(history: History, after: float = 0.0) -> list[int]:
    return [each["at"] for each in history.after(after, ())]


def test_a_sample_has_rates_shares_of_targets_that_somebody_had_and_the_workers_asked_for() -> None:
    assert history_of(100).after(99, ["decode-1", "another"]) == [
        {
            "at": 100,
            "requests_per_s": 1.25,
            "output_tokens_per_s": 50.0,
            "targets": {"ttft": 0.3333},
            "kv": {"decode-1": 5},
        }
    ]


def test_what_is_kept_is_bounded() -> None:
    history = history_of(*range(1000, 2000))
    assert times_of(history) == list(range(2000 - LENGTH_S, 2000))
    with_kv = [each["at"] for each in history.after(0, ["decode-0"]) if "kv" in each]
    assert with_kv == list(range(2000 - WORKERS_LENGTH_S, 2000))


def test_a_page_gets_what_it_does_not_have() -> None:
    history = history_of(100, 101, 104)
    assert times_of(history, 100) == [101, 104]
    assert times_of(history, 104) == []
    assert times_of(History()) == []


def test_of_one_second_there_is_one_sample() -> None:
    assert times_of(history_of(100, 100, 101)) == [100, 101]


def test_a_clock_that_is_set_back_a_little_waits_and_far_begins_anew() -> None:
    assert times_of(history_of(100, 95, 101)) == [100, 101]
    assert times_of(history_of(5000, 5000 - LENGTH_S)) == [5000 - LENGTH_S]


def test_a_sample_is_made_of_a_view() -> None:
    def worker(name: str, **load: int) -> Any:
        info: Any = type("Info", (), {"worker_id": WorkerId(name)})()
        return WorkerView(info, Load(**load))

    workers = [worker("decode-0", blocks_total=200, blocks_active=50, blocks_reserved=25), worker("decode-1")]
    workers += [worker(f"more-{number}", blocks_total=1) for number in range(MAX_WORKERS)]
    view = ClusterView(tuple(workers), 0, 0, rates=Rates(3.0, 90.0), slos={"both": (4, 5)})
    made = sample_of(view, 1234.9)
    assert (made.at, made.requests_per_s, made.output_tokens_per_s, made.targets) == (1234, 3.0, 90.0, {"both": (4, 5)})
    assert (made.kv["decode-0"], "decode-1" in made.kv) == (38, False)
    assert len(made.kv) == MAX_WORKERS - 1


class Controller:
    """Another gateway counted 5 requests per second."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def call(self, request: ControlRequest) -> ControlReply:
        self.num_calls += 1
        nothing: dict[str, Any] = {"num_queued": 0, "num_running": 0, "stages": {}, "slos": {}}
        counts = GatewayCounts(**nothing, requests_per_s=5.0, output_tokens_per_s=7.0)
        record = GatewayRecord(gateway_id=GatewayId("g1"), address="", pid=0, name="gateway-1", counts=counts)
        return ControlState(pools=(), workers=(), gateways=(record,))


@pytest.mark.parametrize(("has_peers", "requests_per_s", "num_calls"), [(False, 3.0, 0), (True, 8.0, 1)])
async def test_the_controller_is_called_for_a_sample_only_where_other_gateways_count(
    has_peers: bool, requests_per_s: float, num_calls: int
) -> None:
    router, controller = FakeRouter(), Controller()
    router.cluster = ClusterView((), 0, 0, rates=Rates(3.0, 90.0))
    audit: Any = None
    admin = AdminService(
        router, controller.call, audit=audit, name="gateway-0", wall_clock=lambda: 100.0, has_peers=has_peers
    )
    made = await admin.sample()
    assert (made.at, made.requests_per_s, controller.num_calls) == (100, requests_per_s, num_calls)


async def test_a_controller_that_does_not_answer_delays_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(request: ControlRequest) -> ControlReply:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(shell, "SAMPLE_TIMEOUT_S", 0.0)
    router = FakeRouter()
    router.cluster = ClusterView((), 0, 0, rates=Rates(3.0, 90.0))
    audit: Any = None
    admin = AdminService(router, silent, audit=audit, wall_clock=lambda: 100.0, has_peers=True)
    assert (await admin.sample()).requests_per_s == 3.0
    await admin.close()
