"""Worker processes that get the KV of a prefix from each other: the answers of `transformers` over every transport and
between different ranks, and faults that cost time and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import pytest

from disagg.engine.config import TierOptions, TransferLimits, TransportName, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from disagg.proto.messages import RoleName, WatchRequest, WorkerInfo, WorkerReport, decoder, encode
from disagg.proto.services import CHANNEL_OPTIONS, WATCH
from tests.support import reference
from tests.support.processes import children_of
from tests.support.secret import SECRET
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint
from tests.support.transports import HAS_NIXL
from tests.support.waiting import LONG_WAIT_S, eventually
from tests.support.workers import GatewayStub, audit, open_gateway, prompt_of, running_workers

KIND = "llama_odd_vocab"
"""8 query and 4 KV heads, and a vocabulary that no number of ranks divides."""
TOKEN_BYTES = 3 * 2 * 4 * 8 * 4
FAKE_TOKEN_BYTES = 8
NUM_TOKENS = 20
BOTH: tuple[RoleName, ...] = ("prefill", "decode")


NEEDS_NIXL = pytest.mark.skipif(not HAS_NIXL, reason="the extra `nixl` is not installed")


class Row(NamedTuple):
    """How bytes travel, and the ranks and stages of the workers that have KV and of the one that lacks it."""

    transport: TransportName
    sources: int
    needy: int
    source_stages: int = 1
    needy_stages: int = 1


ROWS = [
    Row("gloo", 1, 1),
    Row("shm", 2, 1),
    pytest.param(Row("gloo", 1, 2), marks=pytest.mark.slow),
    pytest.param(Row("shm", 2, 2), marks=pytest.mark.slow),
    pytest.param(Row("gloo", 1, 1, 1, 3), marks=pytest.mark.slow),
    pytest.param(Row("shm", 1, 1, 3, 2), marks=pytest.mark.slow),
    pytest.param(Row("nixl", 1, 2), marks=[pytest.mark.slow, NEEDS_NIXL]),
]


def config_of(name: str, roles: tuple[RoleName, ...], token_bytes: int, **options: Any) -> WorkerConfig:
    """Chunks of 40 tokens."""
    return WorkerConfig(
        worker_id=name,
        roles=roles,
        num_blocks=256,
        max_model_len=1024,
        token_budget=64,
        decode_reserve_tokens=32,
        transfer=TransferLimits(chunk_bytes=40 * token_bytes, staging_bytes=120 * token_bytes),
        fetch=True,
        **options,
    )


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_fetched_prefixes_give_the_tokens_of_transformers(row: Row, tmp_path: Path) -> None:
    folder = make_checkpoint(KIND, tmp_path / KIND)
    options: dict[str, Any] = {"model_path": str(folder), "dtype": "float32", "transport": row.transport}
    sources, needy = {"tp": row.sources, "pp": row.source_stages}, {"tp": row.needy, "pp": row.needy_stages}
    configs = (
        config_of("p0", ("prefill",), TOKEN_BYTES, **sources, **options),
        config_of("p1", ("prefill",), TOKEN_BYTES, **needy, **options),
        config_of("d0", ("decode",), TOKEN_BYTES, **sources, **options),
    )
    first, second = [[token % VOCAB_SIZE for token in prompt_of(300)] for _ in range(2)]
    with running_workers(*configs) as infos:
        assert [info.fetches for info in infos] == [True] * 3
        async with open_gateway(infos) as gateway:
            answer = await gateway.run(first, worker="p0", to="d0", max_tokens=NUM_TOKENS)
            assert answer.token_ids == reference.generate(folder, first, NUM_TOKENS)

            history = [*first, *answer.token_ids, *second[:100]]  # D has what it decoded, too
            again = await gateway.run(
                history, worker="p1", to="d0", max_tokens=NUM_TOKENS, fetch_from="d0", end_token=256
            )
            assert again.token_ids == reference.generate(folder, history, NUM_TOKENS)
            assert [(each.source, each.outcome, each.tokens) for each in again.fetched] == [("d0", "done", 256)]
            assert again.fetched[0].kv_bytes == 256 * TOKEN_BYTES
            assert again.prefilled[0].cached_tokens == 256

            await gateway.run(second, worker="p0", to="d0", max_tokens=1)
            shared = [*second[:280], *first[:90]]
            beside = await gateway.run(
                shared, worker="p1", to="d0", max_tokens=NUM_TOKENS, fetch_from="p0", end_token=256
            )
            assert beside.token_ids == reference.generate(folder, shared, NUM_TOKENS)
            assert [(each.source, each.outcome, each.tokens) for each in beside.fetched] == [("p0", "done", 256)]


def fake_workers(**options: Any) -> tuple[WorkerConfig, WorkerConfig]:
    common: dict[str, Any] = {"model_path": "fake", "transport": "shm", **options}
    return tuple(config_of(name, BOTH, FAKE_TOKEN_BYTES, **common) for name in ("c0", "c1"))  # type: ignore[return-value]


async def fetched_answer(gateway: GatewayStub, prompt: list[int], timeout_s: float = LONG_WAIT_S) -> tuple[str, int]:
    """Have c1 answer with a prefix of c0; the outcome, and what was cached then. The tokens are right."""
    answer = await gateway.run(
        prompt, worker="c1", max_tokens=NUM_TOKENS, fetch_from="c0", end_token=256, fetch_timeout_s=timeout_s
    )
    assert answer.token_ids == fake_generate(tuple(prompt), NUM_TOKENS)
    (fetched,) = answer.fetched
    return fetched.outcome, answer.ends[0].cached_tokens


async def until_it_sends(info: WorkerInfo) -> None:
    """A chunk is on its way."""
    async with asyncio.timeout(LONG_WAIT_S):
        while True:
            if (await audit(info)).counts.get("sending_chunks"):
                return
            await asyncio.sleep(0.02)


async def test_a_source_that_does_not_answer_costs_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "transport.receive=corrupt(times=1,worker=c1)")
    first, second, third, fourth = [prompt_of(300) for _ in range(4)]
    with running_workers(*fake_workers(failpoints=True)) as infos:
        async with open_gateway(infos) as gateway:
            for prompt in (first, second, third, fourth):
                await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)
            assert await fetched_answer(gateway, first) == ("failed", 0)  # a damaged chunk
            assert await fetched_answer(gateway, second) == ("done", 256)
            os.kill(infos[0].pid, signal.SIGSTOP)
            try:
                assert await fetched_answer(gateway, third, timeout_s=0.3) == ("late", 0)
            finally:
                os.kill(infos[0].pid, signal.SIGCONT)
            await gateway.wait_until_idle()
            assert await fetched_answer(gateway, fourth) == ("done", 256)
            assert await fetched_answer(gateway, prompt_of(300)) == ("refused", 0)


@asynccontextmanager
async def turns_of(info: WorkerInfo) -> AsyncIterator[list[float]]:
    """The times of its present turn that a worker reports from now on, in seconds."""
    turns: list[float] = []
    decode = decoder(WorkerReport).decode
    async with grpc.aio.insecure_channel(info.address, options=CHANNEL_OPTIONS) as channel:
        call: Any = channel.unary_stream(WATCH, None, None)(encode(WatchRequest()), metadata=SECRET.metadata)

        async def read() -> None:
            while isinstance(frame := await call.read(), bytes):
                turns.append(decode(frame).turn_s)

        reading = asyncio.create_task(read())
        yield turns
        call.cancel()
        await asyncio.wait([reading])


@pytest.mark.slow
async def test_a_source_tells_for_how_long_it_waits_for_a_stage_that_hangs_in_a_copy() -> None:
    first, prompt = [prompt_of(300) for _ in range(2)]
    with running_workers(*fake_workers(pp=2, fake_layers=2)) as infos:
        async with open_gateway(infos) as gateway, turns_of(infos[0]) as turns:
            await gateway.run(first, worker="c0", max_tokens=NUM_TOKENS)
            assert await fetched_answer(gateway, first) == ("done", 256)  # the pair is formed
            await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)
            (stage,) = children_of(infos[0].pid)
            os.kill(stage, signal.SIGSTOP)
            try:
                fetching = asyncio.create_task(fetched_answer(gateway, prompt))
                await eventually(lambda: max(turns, default=0.0) > 1.0, "the wait for the copy does not show")
            finally:
                os.kill(stage, signal.SIGCONT)
            assert await fetching == ("done", 256)
            await eventually(lambda: turns[-1] < 1.0, "the wait for the copy does not end")


async def test_whoever_goes_in_the_middle_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "transport.send=delay(ms=1000,worker=c0)")
    prompts = [prompt_of(300) for _ in range(2)]
    with running_workers(*fake_workers(failpoints=True)) as infos:
        async with open_gateway(infos[1:]) as gateway:
            await gateway.connect(infos[0])
            for prompt in prompts:
                await gateway.run(prompt, worker="c0", max_tokens=NUM_TOKENS)
            key, _ = gateway.submit(prompts[0], worker="c1", fetch_from="c0", end_token=256)
            await until_it_sends(infos[0])
            gateway.cancel(key)
            await gateway.wait_until_idle()

            _, answer = gateway.submit(prompts[1], worker="c1", max_tokens=NUM_TOKENS, fetch_from="c0", end_token=256)
            await until_it_sends(infos[0])
            os.kill(infos[0].pid, signal.SIGKILL)
            del gateway.infos["c0"]
            await eventually(answer.ended.is_set, "the answer did not end")
            assert answer.token_ids == fake_generate(tuple(prompts[1]), NUM_TOKENS)
            (fetched,) = answer.fetched
            assert fetched.outcome == "failed"
            assert fetched.tokens < 256


async def test_what_a_source_has_in_host_memory_only_is_fetched_from_it() -> None:
    """The device cache of D holds two conversations. Its tier has the prompt, which P sent it, and the
    answer."""
    options: dict[str, Any] = {"model_path": "fake", "transport": "shm"}
    source = msgspec.structs.replace(
        config_of("d0", ("decode",), FAKE_TOKEN_BYTES, **options),
        num_blocks=50,
        max_model_len=400,
        tiers=TierOptions(host_bytes=1 << 20),
    )
    computing = [config_of(name, ("prefill",), FAKE_TOKEN_BYTES, **options) for name in ("p0", "p1")]
    with running_workers(*computing, source) as infos:
        async with open_gateway(infos) as gateway:
            first, *others = [prompt_of(370) for _ in range(3)]
            answer = await gateway.run(first, worker="p0", to="d0", max_tokens=NUM_TOKENS)
            for other in others:
                await gateway.run(other, worker="p0", to="d0", max_tokens=NUM_TOKENS)
            history = [*first, *answer.token_ids]
            again = await gateway.run(history, worker="p1", to="d0", max_tokens=4, fetch_from="d0", end_token=384)
            assert again.token_ids == fake_generate(tuple(history), 4)
            assert [(each.outcome, each.tokens) for each in again.fetched] == [("done", 384)]
            assert again.prefilled[0].cached_tokens == 384
