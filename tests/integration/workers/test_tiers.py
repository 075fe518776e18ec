"""Worker processes with tiers: history that is loaded, a restart that finds its files, damaged files, and disks that
fail."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.engine.config import DiskTier, TierOptions, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from disagg.proto.messages import WatchRequest, WorkerInfo, WorkerReport, decoder, encode
from disagg.proto.services import CHANNEL_OPTIONS, WATCH
from tests.support.secret import SECRET
from tests.support.waiting import eventually
from tests.support.workers import open_gateway, prompt_of, running_workers

NUM_TOKENS = 6


def config_of(folder: Path, worker_id: str = "c0", *, failpoints: bool = False) -> WorkerConfig:
    """A colocated worker whose device cache holds one prompt and a half."""
    return WorkerConfig(
        worker_id=worker_id,
        roles=("prefill", "decode"),
        model_path="fake",
        num_blocks=32,
        max_model_len=400,
        max_num_seqs=4,
        watermark=0.0,
        tiers=TierOptions(disk=DiskTier(path=str(folder / worker_id), bytes=1 << 20)),
        failpoints=failpoints,
        token_budget=64,
    )


@asynccontextmanager
async def watched(info: WorkerInfo) -> AsyncIterator[list[str]]:
    """All that a worker reports of why its tier is off, from now on; an empty reason is a tier that is on. A worker
    serves before it has read its folder, and tries one that failed again after a while."""
    reasons: list[str] = []
    decode = decoder(WorkerReport).decode
    async with grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS) as channel:
        call: Any = channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)

        async def read() -> None:
            while isinstance(frame := await call.read(), bytes):
                metrics = decode(frame).metrics
                if metrics is not None:
                    reasons.extend(tier.off_reason for tier in metrics.tiers)

        reading = asyncio.create_task(read())
        await eventually(lambda: "" in reasons, "the tier was not turned on")
        yield reasons
        call.cancel()
        await asyncio.wait([reading])


async def cached_of(config: WorkerConfig, prompts: list[list[int]]) -> list[int]:
    """Start a worker and run each prompt alone, the next one when the folder has files of it; what each found."""
    with running_workers(config) as infos:
        async with open_gateway(infos) as gateway:
            async with watched(infos[0]):
                pass
            cached = []
            for number, prompt in enumerate(prompts, start=1):
                answer = await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)
                assert answer.token_ids == fake_generate(tuple(prompt), NUM_TOKENS)
                cached.append(answer.ends[0].cached_tokens)
                if len(prompts) > 1:
                    await eventually(lambda most=2 * number: len(files_of(config)) == most, "extents were not written")
    return cached


def files_of(config: WorkerConfig) -> list[Path]:
    assert config.tiers is not None
    assert config.tiers.disk is not None
    return sorted(Path(config.tiers.disk.path).rglob("*.kv"))


async def test_a_restarted_worker_loads_what_the_one_before_wrote(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    first, second = [prompt_of(300) for _ in range(2)]
    assert await cached_of(config, [first, second]) == [0, 0]
    assert await cached_of(config, [first]) == [256]
    for path in files_of(config):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert await cached_of(config, [first]) == [0]


async def test_what_is_kept_of_a_tenant_is_forgotten(tmp_path: Path) -> None:
    """Requests of the stub have no tenant."""
    config, prompt = config_of(tmp_path), prompt_of(300)
    with running_workers(config) as infos:
        async with open_gateway(infos) as gateway:
            async with watched(infos[0]):
                pass
            cached = []
            for number in range(3):
                answer = await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)
                cached.append(answer.ends[0].cached_tokens)
                await eventually(lambda: len(files_of(config)) == 2, "extents were not written")
                if number == 1:
                    gateway.forget(b"")
                    await eventually(lambda: not files_of(config), "files were not deleted")
    assert cached == [0, 288, 0]


def test_a_folder_that_cannot_be_used_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "c0").write_text("no folder")
    config = config_of(tmp_path)
    with pytest.raises(AssertionError, match=r"kv_cache.tiers.disk.path: .* cannot be used"), running_workers(config):
        pass


FAULTS = ";".join(
    (
        "tier.write=fail(worker=full)",
        "tier.read=fail(worker=broken)",
        "tier.read=delay(worker=slow,ms=1000)",
        "engine.step=hang(ms=30)",
    )
)
"""Steps take long, so that a load is quicker on a busy machine, too."""
OFF = {
    "full": "No space left on device",
    "broken": "Input/output error",
    "slow": "",
    "removed": "No such file or directory",
    "sound": "",
}
"""How the reason ends for which the disk tier of each worker is turned off; empty where it stays on."""
CACHED = {"full": 0, "broken": 0, "slow": 0, "removed": 0, "sound": 256}
"""Tokens of the first prompt that are not computed when it comes again."""


async def test_no_disk_fails_a_request_and_each_tells_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt is written, evicted from the device cache by two others, and asked for again. At the end of
    `open_gateway` every worker holds nothing."""
    monkeypatch.setenv(FAILPOINTS_VARIABLE, FAULTS)
    configs = [config_of(tmp_path, name, failpoints=True) for name in OFF]
    prompts = [prompt_of(300) for _ in range(3)]
    with running_workers(*configs) as infos:
        async with open_gateway(infos) as gateway:

            async def drive(info: WorkerInfo, config: WorkerConfig) -> int:
                name = info.worker_id
                async with watched(info) as reasons:
                    for number, prompt in enumerate(prompts, start=1):
                        answer = await gateway.run(prompt, worker=name, max_tokens=NUM_TOKENS)
                        assert answer.token_ids == fake_generate(tuple(prompt), NUM_TOKENS)
                        if name != "full":
                            await eventually(
                                lambda most=2 * number: len(files_of(config)) == most, "extents were not written"
                            )
                    if name == "removed":
                        shutil.rmtree(tmp_path / name)
                    answer = await gateway.run(prompts[0], worker=name, max_tokens=NUM_TOKENS)
                    assert answer.token_ids == fake_generate(tuple(prompts[0]), NUM_TOKENS)
                    await eventually(
                        lambda: any(reason.endswith(OFF[name]) for reason in reasons if reason or not OFF[name]),
                        f"{name}: {reasons}",
                    )
                return answer.ends[0].cached_tokens

            cached = await asyncio.gather(*map(drive, infos, configs))
    assert dict(zip(OFF, cached, strict=True)) == CACHED
