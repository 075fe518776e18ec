"""Operators' requests about adapters: workers check first, then it is saved, then gateways know it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from disagg.cluster.control import adapters as shell
from disagg.cluster.control.adapters import AdapterControl, AdapterError, AdapterWorkers
from disagg.cluster.core.adapters import Adapters, Base
from disagg.proto.control import AdapterList, AddAdapter, ControlRefused, ControlReply, ListAdapters, RemoveAdapter
from disagg.proto.messages import Adapter, AdapterLoaded, WorkerInfo
from tests.support.control import make_info

A, B = "a" * 64, "b" * 64


class PlayedWorkers(AdapterWorkers):
    """Find what `contents` has at a path."""

    def __init__(self, did: list[str], contents: dict[str, str]) -> None:
        self._did, self._contents = did, contents

    async def load(self, workers: Sequence[WorkerInfo], adapter: Adapter) -> AdapterLoaded:
        assert adapter.fingerprint == ""
        self._did.append(f"load {adapter.path} on {', '.join(info.worker_id for info in workers)}")
        if adapter.path not in self._contents:
            raise AdapterError("prefill-0: q_proj maps to nothing")
        return AdapterLoaded(fingerprint=self._contents[adapter.path], bytes=10, load_ms=1.0)

    async def unload(self, workers: Sequence[WorkerInfo], fingerprint: str) -> None:
        self._did.append(f"unload {fingerprint[0]}")


class Cluster:
    def __init__(self) -> None:
        self.did: list[str] = []
        self.contents = {"sql": A, "other": B}
        self.bases = {"": Base("m", {}, "/adapters")}
        self.ready = [make_info("prefill-0"), make_info("decode-0")]
        self.adapters = Adapters()
        self.control = AdapterControl(
            self.adapters,
            PlayedWorkers(self.did, self.contents),
            lambda: self.bases,
            lambda key: self.ready,
            self._save,
            self._publish,
        )

    async def _save(self) -> None:
        self.did.append("save")

    async def _publish(self) -> list[str]:
        self.did.append(
            "publish " + " ".join(f"{e.adapter.name}={e.adapter.fingerprint[0]}" for e in self.adapters.served)
        )
        return []

    def take(self) -> list[str]:
        did, self.did[:] = list(self.did), []
        return did


def shown(reply: ControlReply) -> list[tuple[str, str, str]]:
    assert isinstance(reply, AdapterList)
    return [(each.name, each.base, each.phase) for each in reply.adapters]


async def test_an_adapter_is_checked_saved_and_published_in_this_order() -> None:
    cluster = Cluster()
    reply = await cluster.control.control(AddAdapter(name="sql", path="sql"))
    assert shown(reply) == [("sql", "m", "ready")]
    assert cluster.take() == ["load sql on prefill-0, decode-0", "save", "publish sql=a"]
    assert shown(await cluster.control.control(ListAdapters())) == [("sql", "m", "ready")]
    assert cluster.take() == []


async def test_what_workers_refuse_changes_nothing() -> None:
    cluster = Cluster()
    await cluster.control.control(AddAdapter(name="sql", path="sql"))
    cluster.take()
    reply = await cluster.control.control(AddAdapter(name="sql", path="bad"))
    assert reply == ControlRefused(field="path", message="prefill-0: q_proj maps to nothing")
    assert cluster.take() == ["load bad on prefill-0, decode-0"]
    assert cluster.adapters.served[0].adapter.fingerprint == A


async def test_a_replaced_adapter_is_left_to_those_that_use_it_and_a_removed_one_unloaded() -> None:
    cluster = Cluster()
    await cluster.control.control(AddAdapter(name="sql", path="sql"))
    await cluster.control.control(AddAdapter(name="same", path="sql"))
    await cluster.control.control(AddAdapter(name="sql", path="other"))
    assert cluster.take()[-1] == "publish same=a sql=b"
    assert shown(await cluster.control.control(RemoveAdapter(name="sql"))) == [("same", "m", "ready")]
    assert cluster.take() == ["save", "publish same=a", "unload b"]
    refused = await cluster.control.control(RemoveAdapter(name="sql"))
    assert isinstance(refused, ControlRefused)
    assert refused.is_missing


async def test_a_configuration_that_changes_while_workers_check_is_followed() -> None:
    cluster = Cluster()
    adding = asyncio.create_task(cluster.control.control(AddAdapter(name="sql", path="sql")))
    cluster.bases = {"": Base("m")}  # before the task begins, which is after the request came
    assert isinstance(await adding, ControlRefused)
    assert cluster.adapters.records == ()


async def test_adapters_of_the_configuration_are_checked_when_workers_are_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shell, "LOOK_S", 0.0)
    cluster = Cluster()
    cluster.bases = {"": Base("m", {"sql": "sql", "bad": "bad"}, "/adapters")}
    cluster.ready, workers = [], cluster.ready
    cluster.control.start()
    for _ in range(5):
        await asyncio.sleep(0)
    assert cluster.take() == ["save", "publish "]
    cluster.ready = workers
    while not cluster.adapters.served:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert cluster.take() == [
        "load bad on prefill-0, decode-0",
        "load sql on prefill-0, decode-0",
        "save",
        "publish sql=a",
    ]
    assert "adapter bad of the configuration cannot be served: prefill-0: q_proj maps to nothing" in caplog.text
    cluster.bases = {"": Base("m", {}, "/adapters")}
    cluster.control.follow_file()
    while cluster.take() != ["save", "publish "]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await cluster.control.stop()


async def test_a_change_that_could_not_be_saved_is_published_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    failing, published = iter([OSError("disk full")]), asyncio.Event()

    async def save_or_fail() -> None:
        for error in failing:
            raise error
        published.set()

    monkeypatch.setattr(cluster.control, "_save", save_or_fail)
    monkeypatch.setattr(shell, "LOOK_S", 0.0)
    with pytest.raises(OSError, match="disk full"):
        await cluster.control.control(AddAdapter(name="sql", path="sql"))
    assert cluster.take() == ["load sql on prefill-0, decode-0"]
    cluster.control.start()
    await published.wait()
    await cluster.control.stop()
    assert cluster.take() == ["publish sql=a"]
