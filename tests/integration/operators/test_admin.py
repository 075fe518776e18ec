"""The operators' service over gRPC: the state again and again, the latest requests, what is refused."""

from __future__ import annotations

import contextlib
import itertools
import logging
from pathlib import Path

import httpx
import pytest

from disagg.client import AsyncClient, ShapeComparison
from disagg.gateway.operators.decode_placement_log import STALE
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId
from disagg.router.api import ClusterView, PlacementView, RequestTrace
from disagg.router.statistics import Rates
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.gateway_server import running
from tests.support.waiting import eventually


async def test_the_state_comes_again_and_again(folder: Path) -> None:
    router, looks = FakeRouter(), itertools.count(3)
    router.view = lambda: ClusterView((), num_queued=next(looks), num_running=0)  # type: ignore[method-assign]
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        queued = []
        async with contextlib.aclosing(client.watch(0.1)) as states:
            async for state in states:
                queued.append(state.queued_requests)
                if len(queued) == 3:
                    break
        assert queued == [3, 4, 5]


async def test_a_state_too_often_is_refused(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server, AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match="interval_ms"):
            async with contextlib.aclosing(client.watch(0.05)) as states:
                await anext(states)


async def test_the_latest_requests_are_listed(folder: Path) -> None:
    router = FakeRouter()
    for i in range(3):
        name = RequestId(f"r{i}")
        router.traces[name] = RequestTrace(request_id=name, arrival=float(i), stages={"tokenize": float(i)})
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        assert [found.request_id for found in await client.requests(2)] == ["r2", "r1"]
        assert await client.requests(0) == []
        with pytest.raises(InvalidRequestError, match="limit"):
            await client.requests(1001)


def elastic() -> FakeRouter:
    router = FakeRouter()
    router.cluster = ClusterView((), 0, 0, placement=PlacementView("elastic", "spread"))
    return router


async def test_where_answers_decode_is_set_logged_and_shown(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    router = elastic()
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        compared = ShapeComparison(cause="first", requests=40, present="spread", chosen="spread", reason="no better")
        await client.set_decodes("spread", compared)
        assert caplog.messages == []
        compared = ShapeComparison(cause="60 s passed", present="spread", chosen="gather", reason="gather is better")
        await client.set_decodes("gather", compared)
        assert router.cluster.placement.decodes == "gather"
        (line,) = [each for each in caplog.messages if each.startswith("answers decode")]
        assert line.startswith("answers decode with gather from the next placement on (was spread for ")
        assert "set by configuration); set by a caller without a key: gather is better (60 s passed; " in line
        assert any(each.startswith("set decodes gather by ") for each in caplog.messages)
        shape = await client.shape()
        assert (shape.policy, shape.decodes) == ("elastic", "gather")
        assert [each.cause for each in shape.comparisons] == ["60 s passed", "first"]
        with pytest.raises(InvalidRequestError, match=r"^comparison\.cause"):
            await client.set_decodes("spread", ShapeComparison(cause="x" * 1000))
        with pytest.raises(
            InvalidRequestError, match=r"^comparison\.present: it is gather by now, not spread"
        ) as stale:
            await client.set_decodes("spread", compared)  # made before that change: it must not be undone
        assert stale.value.field == STALE
        assert router.cluster.placement.decodes == "gather"
        assert len((await client.shape()).comparisons) == 2


async def test_the_shape_says_when_the_load_was_read_and_counts_requests_with_targets(folder: Path) -> None:
    router = elastic()
    for i, target in enumerate((2.0, None, 2.0)):
        name = RequestId(f"r{i}")
        router.traces[name] = RequestTrace(request_id=name, arrival=float(i), ttft_slo_s=target, is_probe=i == 2)
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        assert (await client.shape()).load_read == 0
        await client.load()
        shape = await client.shape()
        assert shape.load_read > 0
        assert shape.targeted_requests == 1


async def test_the_recent_load_has_no_probes_and_a_limit(folder: Path) -> None:
    router = elastic()
    for i in range(60):
        name = RequestId(f"r{i}")
        router.traces[name] = RequestTrace(request_id=name, arrival=float(i), num_prompt_tokens=i, is_probe=i == 58)
    async with running(folder, router) as server, AsyncClient(server.address) as client:
        load = await client.load(3)
        assert (load.policy, load.decodes, load.admission) == ("elastic", "spread", True)
        assert [each.prompt_tokens for each in load.requests] == [59, 57]
        assert len((await client.load()).requests) == 59
        with pytest.raises(InvalidRequestError, match="limit"):
            await client.load(1001)


async def test_the_page_has_a_history_that_began_before_it_was_opened_and_the_refused_calls(folder: Path) -> None:
    router = FakeRouter()
    router.cluster = ClusterView((), 0, 0, rates=Rates(7.0, 70.0))
    async with (
        running(folder, router, http_port=0) as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", trust_env=False) as client,
    ):
        body = {"model": MODEL_NAME, "prompt": "hi", "temperature": -1}
        refused = await client.post("/v1/completions", json=body)
        assert refused.status_code == 400

        async def has_samples() -> bool:
            history = (await client.get("/ui/state")).json()["history"]
            return [each["requests_per_s"] for each in history][:2] == [7.0, 7.0]

        await eventually(has_samples, every_s=0.05)
        (shown,) = (await client.get("/ui/state", params={"state": "refused"})).json()["requests"]
        assert (shown["id"], shown["model"]) == (refused.headers["x-request-id"], MODEL_NAME)
        assert (shown["outcome"], shown["reason"]) == ("invalid_value", "temperature: must be in [0, 100], not -1")
