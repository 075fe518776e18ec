"""Adapters on real workers: calls that load and unload them, reports, and hand-overs, also to a worker of two ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.messages import (
    Adapter,
    AdapterLoaded,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
    WatchRequest,
    WorkerInfo,
    WorkerReport,
    decoder,
    encode,
)
from disagg.proto.services import CHANNEL_OPTIONS, LOAD_ADAPTER, UNLOAD_ADAPTER, WATCH
from tests.support.adapters import options_of, small_adapter
from tests.support.secret import SECRET
from tests.support.workers import GatewayStub, prompt_of, running_workers, wait_until_workers_idle

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fleet:
    """A prefill and a decode worker, the latter of two ranks, with slots for two adapters."""

    folder: Path
    adapters: tuple[Adapter, ...]
    prefill: WorkerInfo
    decode: WorkerInfo


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = tuple(small_adapter(folder, f"a{number}", number) for number in range(4))
    options = options_of(folder, max_loaded=2)
    configs = (
        WorkerConfig(worker_id="p", roles=("prefill",), model_path="fake", adapters=options),
        WorkerConfig(worker_id="d", roles=("decode",), model_path="fake", adapters=options, tp=2),
    )
    with running_workers(*configs) as (prefill, decode):
        yield Fleet(folder, adapters, prefill, decode)


async def call(info: WorkerInfo, path: str, message: LoadAdapter | UnloadAdapter, answer: Any) -> Any:
    async with grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS) as channel:
        frame = await channel.unary_unary(path, None, None)(encode(message), metadata=SECRET.metadata)
    return decoder(answer).decode(frame)


async def loaded_on(info: WorkerInfo) -> set[str]:
    """Fingerprints that the worker's next report has."""
    async with grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS) as channel:
        stream: Any = channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        report = decoder(WorkerReport).decode(await stream.read())
        stream.cancel()
    return {state.fingerprint for state in report.adapters}


@asynccontextmanager
async def gateway_of(fleet: Fleet) -> AsyncIterator[GatewayStub]:
    gateway = GatewayStub()
    try:
        for info in (fleet.prefill, fleet.decode):
            await gateway.connect(info)
        yield gateway
    finally:
        await gateway.close()


async def test_an_operator_loads_and_unloads(fleet: Fleet) -> None:
    adapter = fleet.adapters[0]
    for info in (fleet.prefill, fleet.decode):
        asked = LoadAdapter(adapter=msgspec.structs.replace(adapter, fingerprint=""))
        found: AdapterLoaded = await call(info, LOAD_ADAPTER, asked, AdapterLoaded)
        assert (found.fingerprint, found.bytes > 0) == (adapter.fingerprint, True)
        assert adapter.fingerprint in await loaded_on(info)
        again: AdapterLoaded = await call(info, LOAD_ADAPTER, LoadAdapter(adapter=adapter), AdapterLoaded)
        assert again.load_ms == 0.0
        unload = UnloadAdapter(fingerprint=adapter.fingerprint)
        assert await call(info, UNLOAD_ADAPTER, unload, AdapterUnloaded) == AdapterUnloaded(was_loaded=True, uses=0)
        assert await call(info, UNLOAD_ADAPTER, unload, AdapterUnloaded) == AdapterUnloaded(was_loaded=False, uses=0)
        assert adapter.fingerprint not in await loaded_on(info)


@pytest.mark.parametrize(
    ("path", "fingerprint", "code", "detail"),
    [
        ("nowhere", "", grpc.StatusCode.NOT_FOUND, "nowhere: there is no such folder here"),
        ("../outside", "", grpc.StatusCode.INVALID_ARGUMENT, "path: '../outside' is not one inside of adapters.folder"),
        ("a0", "0" * 64, grpc.StatusCode.FAILED_PRECONDITION, "adapter changed: "),
    ],
)
async def test_what_cannot_be_loaded_is_named(
    fleet: Fleet, path: str, fingerprint: str, code: grpc.StatusCode, detail: str
) -> None:
    asked = LoadAdapter(adapter=Adapter(name="x", path=path, fingerprint=fingerprint))
    for info in (fleet.prefill, fleet.decode):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(info, LOAD_ADAPTER, asked, AdapterLoaded)
        assert caught.value.code() is code
        assert detail in str(caught.value.details())


async def test_four_adapters_take_turns_in_two_slots_and_no_answer_is_lost(fleet: Fleet) -> None:
    """All at once, handed over from one rank to two, with the base beside them."""
    async with gateway_of(fleet) as gateway:
        prompts = [prompt_of(40 + number) for number in range(15)]
        adapters = [(*fleet.adapters, None)[number % 5] for number in range(15)]
        answers = await asyncio.gather(
            *(
                gateway.run(prompt, worker="p", to="d", max_tokens=8, adapter=adapter)
                for prompt, adapter in zip(prompts, adapters, strict=True)
            )
        )
        for prompt, adapter, answer in zip(prompts, adapters, answers, strict=True):
            fingerprint = "" if adapter is None else adapter.fingerprint
            assert answer.reason == "length", answer.ends
            assert answer.token_ids == fake_generate(prompt, 8, adapter=fingerprint)
            assert len(answer.handed_over) == 1
        await wait_until_workers_idle([fleet.prefill, fleet.decode])
        assert len(await loaded_on(fleet.decode)) <= 2


async def test_a_missing_folder_refuses_the_attempt_only(fleet: Fleet) -> None:
    async with gateway_of(fleet) as gateway:
        gone = Adapter(name="gone", path="gone", fingerprint="0" * 64)
        answer = await gateway.run(prompt_of(40), worker="p", to="d", adapter=gone)
        assert answer.reason == "refused"
        assert "adapter gone: " in answer.ends[0].detail
        await wait_until_workers_idle([fleet.prefill, fleet.decode])
