"""Models that come and go while a gateway serves: routers without sockets, the model without weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from disagg.gateway.auth.auth import ANONYMOUS
from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.event_loop.shell.offload import Offload
from disagg.gateway.models import model_changes
from disagg.gateway.models.model_changes import ModelChanges
from disagg.gateway.models.served_models import ServedModels
from disagg.proto.ids import GatewayId, RequestId, WorkerId
from disagg.router.api import ClusterView
from disagg.router.config import RouterConfig
from disagg.router.shell.router_servers import RouterServers
from disagg.router.shell.server import RouterServer
from tests.support.control import make_info
from tests.support.secret import SECRET


def source(key: str, path: str = "fake", name: str = "") -> ModelSource:
    return ModelSource(key=key, name=name or f"model {key}", path=path, prefix_root=key, max_model_len=100)


class Recorded(RouterServer):
    """Connects to no worker; records what it is to do."""

    def __init__(self) -> None:
        super().__init__(RouterConfig(), GatewayId("g"), (), SECRET)
        self.did: list[str] = []
        self.num_running = 0

    async def start(self) -> None:
        self.did.append("start")

    async def stop(self) -> None:
        self.did.append("stop")

    async def add_worker(self, info: object) -> None:
        self.did.append(f"add {info.worker_id}")  # type: ignore[attr-defined]

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self.did.append(f"remove {worker_id}")

    def drain_worker(self, worker_id: WorkerId, incarnation: object) -> None:
        self.did.append(f"drain {worker_id}")

    def view(self) -> ClusterView:
        return ClusterView((), 0, self.num_running)


class Gateway:
    """One that serves model a."""

    def __init__(self) -> None:
        self.routers = {"a": Recorded()}
        self.servers = RouterServers(self.routers)
        config = GatewayConfig(models=(source("a"),))
        self.served = ServedModels(config, self.servers.routers, lambda: RequestId("r"))
        self.offload = Offload(1, inline_bytes=1, max_bytes=1, max_tenant_bytes=1)
        self.served.begin(self.offload, None)
        self.generations: asyncio.Queue[int] = asyncio.Queue()
        self.changes = ModelChanges(self.served, self.servers, config, self._make, self.generations.put_nowait)
        self.changes.start()

    def _make(self, source: ModelSource, config: RouterConfig) -> RouterServer:
        self.routers[source.key] = Recorded()
        return self.routers[source.key]

    async def follow(self, generation: int, *sources: ModelSource) -> None:
        self.changes.follow(generation, sources, {each.key: RouterConfig() for each in sources})
        assert await self.generations.get() == generation

    async def close(self) -> None:
        await self.changes.stop()
        await self.servers.stop()
        self.offload.close()


def run(monkeypatch: pytest.MonkeyPatch, test: Callable[[Gateway], object]) -> None:
    monkeypatch.setattr(model_changes, "LOOK_S", 0.0)
    monkeypatch.setattr(model_changes, "CONNECT_TIMEOUT_S", 0.0)

    async def main() -> None:
        gateway = Gateway()
        try:
            await test(gateway)  # type: ignore[misc]  # a coroutine function
        finally:
            await gateway.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # tasks of the test make it true
        await asyncio.sleep(0)


def test_a_model_that_comes_gets_the_workers_that_came_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        drained: list[WorkerId] = []
        gateway.servers.on_drained = lambda worker_id, incarnation: drained.append(worker_id)
        for name in ("b/decode-0", "b/decode-1", "c/decode-0"):
            await gateway.servers.add_worker(make_info(name))
        gateway.servers.drain_worker(WorkerId("b/decode-1"), make_info("b/decode-1").incarnation)
        assert drained == ["b/decode-1"], "nothing runs there"
        await gateway.follow(2, source("a"), source("b"))
        assert gateway.routers["b"].did == ["start", "add b/decode-0", "add b/decode-1", "drain b/decode-1"]
        assert gateway.served.models.names == ["model a", "model b"]
        assert set(gateway.served.views) == {"model a", "model b"}
        assert gateway.routers["b"].on_drained is gateway.servers.on_drained

    run(monkeypatch, test)


def test_a_model_that_goes_is_refused_at_once_and_ends_with_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.follow(2, source("a"), source("b"))
        router = gateway.routers["b"]
        router.num_running = 1
        await gateway.follow(3, source("a"))
        assert gateway.served.models.names == ["model a"]
        assert set(gateway.served.views) == {"model a", "model b"}, "operators see what runs"
        assert router.did == ["start"]
        router.num_running = 0
        await until(lambda: "stop" in router.did)
        assert set(gateway.served.views) == {"model a"}
        assert (list(gateway.served.sources), list(gateway.servers.routers)) == (["a"], ["a"])
        assert list(gateway.served.pair_checkers) == ["a"]

    run(monkeypatch, test)


def test_a_model_that_comes_back_while_its_answers_end_keeps_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.follow(2, source("a"), source("b"))
        router = gateway.routers["b"]
        router.num_running = 1
        await gateway.follow(3, source("a"))
        again = msgspec.structs.replace(source("b"), max_model_len=90)  # by the workers that are there now
        await gateway.follow(4, source("a"), again)
        assert gateway.served.models.names == ["model a", "model b"]
        assert gateway.routers["b"] is router
        router.num_running = 0
        await gateway.follow(5, source("a"), source("b"))
        assert router.did == ["start"]

    run(monkeypatch, test)


def test_workers_that_come_are_not_for_a_model_that_is_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key comes back with other files, whose first worker is there while an answer of the former model runs."""

    async def test(gateway: Gateway) -> None:
        drained: list[WorkerId] = []
        gateway.servers.on_drained = lambda worker_id, incarnation: drained.append(worker_id)
        await gateway.follow(2, source("a"), source("b", name="x"))
        former = gateway.routers["b"]
        former.num_running = 1
        await gateway.follow(3, source("a"))
        for name in ("b/decode-0", "b/decode-1"):
            await gateway.servers.add_worker(make_info(name))
        gateway.servers.drain_worker(WorkerId("b/decode-1"), make_info("b/decode-1").incarnation)
        assert (former.did, drained) == (["start", "remove b/decode-0", "remove b/decode-1"], ["b/decode-1"])
        gateway.changes.follow(4, [source("a"), source("b", name="y")], {key: RouterConfig() for key in "ab"})
        former.num_running = 0
        assert await gateway.generations.get() == 4
        assert former.did[-1] == "stop"
        assert gateway.routers["b"].did == ["start", "add b/decode-0", "add b/decode-1", "drain b/decode-1"]
        assert gateway.served.models.names == ["model a", "y"]

    run(monkeypatch, test)


def test_a_model_that_comes_back_gets_the_workers_that_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.follow(2, source("a"), source("b"))
        router = gateway.routers["b"]
        router.num_running = 1
        await gateway.follow(3, source("a"))
        await gateway.servers.add_worker(make_info("b/decode-0"))
        await gateway.follow(4, source("a"), source("b"))
        await gateway.servers.add_worker(make_info("b/decode-1"))
        assert gateway.routers["b"] is router
        assert router.did == ["start", "remove b/decode-0", "add b/decode-0", "add b/decode-1"]

    run(monkeypatch, test)


def test_one_name_goes_from_one_model_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.follow(2, source("a"), source("b", name="x"))
        gateway.routers["b"].num_running = 1
        await gateway.follow(3, source("a"), source("c", name="x"))
        assert gateway.served.models.find(ANONYMOUS, "x")._router is gateway.routers["c"]
        gateway.routers["b"].num_running = 0
        await until(lambda: "stop" in gateway.routers["b"].did)
        assert gateway.served.models.find(ANONYMOUS, "x")._router is gateway.routers["c"]
        assert gateway.served.views["x"] == gateway.routers["c"].view

    run(monkeypatch, test)


def test_a_model_that_cannot_be_read_changes_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(gateway: Gateway) -> None:
        await gateway.follow(2, source("a"), source("b", path="/nowhere"), source("c"))
        assert gateway.served.models.names == ["model a", "model c"]
        assert "b" not in gateway.routers
        assert [m for m in caplog.messages if m.startswith("model b cannot be served by this gateway: ")]

    run(monkeypatch, test)
