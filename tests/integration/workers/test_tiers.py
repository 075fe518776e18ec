"""Worker processes with tiers: history that is loaded, a restart that finds its files, and files that are damaged."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.engine.config import DiskTier, TierOptions, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.proto.messages import WatchRequest, WorkerInfo, WorkerReport, decoder, encode
from disagg.proto.services import CHANNEL_OPTIONS, WATCH
from tests.support.secret import SECRET
from tests.support.waiting import LONG_WAIT_S, eventually
from tests.support.workers import open_gateway, prompt_of, running_workers

NUM_TOKENS = 6


def config_of(folder: Path) -> WorkerConfig:
    """A colocated worker whose device cache holds one prompt and a half."""
    return WorkerConfig(
        worker_id="c0",
        roles=("prefill", "decode"),
        model_path="fake",
        num_blocks=32,
        max_model_len=400,
        max_num_seqs=4,
        watermark=0.0,
        tiers=TierOptions(disk=DiskTier(path=str(folder / "c0"), bytes=1 << 20)),
    )


async def until_its_tier_is_on(info: WorkerInfo) -> None:
    """A worker serves before it has read its folder."""
    decode = decoder(WorkerReport).decode
    async with (
        asyncio.timeout(LONG_WAIT_S),
        grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS) as channel,
    ):
        call: Any = channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)
        while True:
            metrics = decode(await call.read()).metrics
            if metrics is not None and [tier.off_reason for tier in metrics.tiers] == [""]:
                call.cancel()
                return


async def cached_of(config: WorkerConfig, prompts: list[list[int]]) -> list[int]:
    """Start a worker and run each prompt alone, the next one when the folder has files of it; what each found."""
    with running_workers(config) as infos:
        async with open_gateway(infos) as gateway:
            await until_its_tier_is_on(infos[0])
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


def test_a_folder_that_cannot_be_used_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "c0").write_text("no folder")
    config = config_of(tmp_path)
    with pytest.raises(AssertionError, match=r"kv_cache.tiers.disk.path: .* cannot be used"), running_workers(config):
        pass
