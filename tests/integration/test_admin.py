"""The operators' service over gRPC: the state again and again, the latest requests, what is refused."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

import pytest

from disagg.client import AsyncClient
from disagg.proto.errors import InvalidRequestError
from disagg.proto.ids import RequestId
from disagg.router.api import ClusterView, RequestTrace
from tests.support.gateway import FakeRouter, write_checkpoint
from tests.support.gateway_server import running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


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
