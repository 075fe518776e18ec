"""Each family on workers of several ranks that are killed: a decode worker in the middle of answers, the prefill worker
while it computes prompts. All answers are those of `transformers`, in fp32."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from disagg.proto.messages import WorkerInfo
from tests.integration.scaling.test_scaling import replaced
from tests.integration.workers.test_processes import PATIENT
from tests.support import reference
from tests.support.ranks import FOUR, FOUR_EP, ONE, TWO, TWO_EP, Ranks
from tests.support.tiny_models import EXPERT_KINDS, FAMILY_KINDS, VOCAB_SIZE, make_checkpoint
from tests.support.waiting import LONG_WAIT_S, eventually
from tests.support.workers import audit, wait_until_workers_idle

T = TypeVar("T")
NUM_TOKENS, NUM_BEGUN, MAX_MODEL_LEN = 50, 8, 128
PROMPTS = [[(5 * i * i + 3 * i + length) % VOCAB_SIZE for i in range(length)] for length in (20, 40, 50, 66)]
MANY = 500
"""More requests than there are: each try of the client is one."""
SLOW_STEPS = "engine.step=hang(worker=prefill-*,ms=200);engine.step=hang(worker=decode-*,ms=15)"
"""Steps that take so long that a worker can be killed within one, and an answer."""
PAIRS = ((ONE, TWO), (TWO, ONE), (TWO, FOUR), (FOUR, TWO), (FOUR, ONE), (ONE, FOUR))
"""Ranks of the prefill worker and of each decode worker. Four share the two KV heads."""
EXPERT_PAIRS = ((ONE, TWO_EP), (TWO_EP, ONE), (TWO, FOUR_EP), (FOUR_EP, TWO), (TWO_EP, FOUR_EP), (FOUR_EP, ONE))
"""Of families with experts."""


def cases() -> list[Any]:
    """Each family on one of the pairs."""
    found = []
    for number, kind in enumerate(FAMILY_KINDS):
        pairs = EXPERT_PAIRS if kind in EXPERT_KINDS else PAIRS
        prefill, decode = pairs[number % len(pairs)]
        name = f"{kind}-{prefill}-to-{decode}"
        found.append(pytest.param(kind, prefill, decode, id=name, marks=pytest.mark.slow))
    return found


def cluster_config(folder: Path, prefill: Ranks, decode: Ranks) -> ClusterConfig:
    """Chunks and messages so small that prompts are computed, and moved, in several."""
    pool = {"num_blocks": 128, "token_budget": 32, "decode_reserve_tokens": 16, "cores": "none"}
    return parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
            "gateway": {"port": 0},
            "placement": {"policy": "round_robin", "local_prefill": "never"},
            "pools": {
                "prefill": {**pool, **prefill._asdict()},
                "decode": {**pool, **decode._asdict(), "size": 2},
            },
            "transfer": {"chunk_bytes": 48 << 10, "staging_bytes": 192 << 10},
            "recovery": {**PATIENT, "failpoints": True},
        }
    )


@pytest.mark.parametrize(("kind", "prefill", "decode"), cases())
async def test_killed_workers_change_no_token(
    kind: str, prefill: Ranks, decode: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are asked of the prefill worker that is killed: a request that two workers did not survive is refused."""
    folder = make_checkpoint(kind, tmp_path / "model")
    expected = [reference.generate(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    second = [*PROMPTS[0], *expected[0][:NUM_BEGUN], 7]
    others = [second, *(prompt[::-1] for prompt in PROMPTS)]
    monkeypatch.setenv(FAILPOINTS_VARIABLE, SLOW_STEPS)
    with ProcessCluster(cluster_config(folder, prefill, decode)) as cluster:
        workers = {str(info.worker_id): info for info in cluster.workers}
        async with AsyncClient(cluster.address) as client:
            answers = asyncio.gather(*(greedy(client, prompt) for prompt in PROMPTS))
            lost = await unless_ended(answers, are_answered_by(client, "decode-0"))
            os.kill(workers["decode-0"].pid, signal.SIGKILL)
            assert await answers == expected
            assert min([(await client.explain(request)).attempts for request in lost]) > 1

            before = {each.request_id for each in await client.requests(MANY)}
            answers = asyncio.gather(*(greedy(client, prompt) for prompt in others))
            await unless_ended(answers, are_computed_by(workers["prefill-0"], cluster.secret))
            os.kill(workers["prefill-0"].pid, signal.SIGKILL)
            assert await answers == [reference.generate(folder, prompt, NUM_TOKENS) for prompt in others]
            made = [each for each in await client.requests(MANY) if each.request_id not in before]
            attempts = [each.attempts + (each.outcome != "length") for each in made if each.attempts]
            assert max(attempts) > 1, "no prompt was lost"
        for name in ("decode-0", "prefill-0"):
            assert replaced(cluster, name, workers[name].pid)
        await wait_until_workers_idle(cluster.workers, cluster.secret)
    assert cluster.killed == []


async def greedy(client: AsyncClient, prompt: Sequence[int]) -> list[int]:
    """Of an answer that goes on behind an end. The client asks again while there is no prefill worker."""
    answer = await client.generate(
        prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=LONG_WAIT_S
    )
    return list(answer.token_ids)


async def are_answered_by(client: AsyncClient, name: str) -> list[str]:
    """Requests in the middle of whose answers a worker is, once there are some."""
    found: list[str] = []

    async def are_there() -> bool:
        requests = await client.requests()
        decoding = [each for each in requests if each.decode_worker == name and each.outcome == "running"]
        found[:] = [each.request_id for each in decoding if each.completion_tokens >= NUM_BEGUN]
        return bool(found)

    await eventually(are_there, f"{name} answers nothing")
    return found


async def are_computed_by(worker: WorkerInfo, secret: ClusterSecret) -> None:
    """Until a worker has sequences."""

    async def are_there() -> bool:
        return (await audit(worker, secret)).counts["sequences"] > 0

    await eventually(are_there, f"{worker.worker_id} computes nothing")


async def unless_ended(answers: asyncio.Future[list[list[int]]], what: Coroutine[Any, Any, T]) -> T:
    """The result of `what`, before the answers end or fail."""
    waiting = asyncio.ensure_future(what)
    either: set[asyncio.Future[Any]] = {waiting, answers}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        raise AssertionError(f"the answers ended before: {await answers}")
    return waiting.result()
