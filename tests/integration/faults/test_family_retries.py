"""Each family on workers of several ranks that are killed: the prefill worker while it computes prompts, a decode
worker in the middle of answers. All answers are those of `transformers`, in fp32."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from tests.integration.scaling.test_scaling import replaced
from tests.integration.workers.test_processes import PATIENT
from tests.support import reference
from tests.support.ranks import FOUR, FOUR_EP, ONE, TWO, TWO_EP, Ranks
from tests.support.tiny_models import EXPERT_KINDS, FAMILY_KINDS, VOCAB_SIZE, make_checkpoint
from tests.support.waiting import LONG_WAIT_S, eventually
from tests.support.workers import audit, wait_until_workers_idle

NUM_TOKENS, NUM_BEGUN = 60, 8
PROMPTS = [[(5 * i * i + 3 * i + length) % VOCAB_SIZE for i in range(length)] for length in (20, 50, 70, 100)]
SLOW_STEPS = "engine.step=hang(worker=prefill-*,ms=100);engine.step=hang(worker=decode-*,ms=15)"
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
    pool = {"num_blocks": 128, "token_budget": 64, "decode_reserve_tokens": 16, "cores": "none"}
    return parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": 512},
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
    folder = make_checkpoint(kind, tmp_path / "model")
    expected = [reference.generate(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
    monkeypatch.setenv(FAILPOINTS_VARIABLE, SLOW_STEPS)
    with ProcessCluster(cluster_config(folder, prefill, decode)) as cluster:
        pids = {name: cluster.pid(name) for name in ("prefill-0", "decode-0")}
        async with AsyncClient(cluster.address) as client:
            asked = [
                asyncio.create_task(
                    client.generate(
                        prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=LONG_WAIT_S
                    )
                )
                for prompt in PROMPTS
            ]
            await kill_in_a_prompt(cluster, pids["prefill-0"])
            attempts = await kill_in_an_answer(client, pids["decode-0"])
            answers = await asyncio.gather(*asked)
            assert [list(answer.token_ids) for answer in answers] == expected
            routes = [await client.explain(answer.request_id) for answer in answers]
        assert {route.request_id: route.attempts for route in routes} == attempts
        for name, pid in pids.items():
            assert replaced(cluster, name, pid)
        await wait_until_workers_idle(cluster.workers, cluster.secret)
    assert cluster.killed == []


async def kill_in_a_prompt(cluster: ProcessCluster, pid: int) -> None:
    """While the prefill worker has prompts."""
    (worker,) = [info for info in cluster.workers if info.pid == pid]

    async def has_prompts() -> bool:
        return (await audit(worker, cluster.secret)).counts["sequences"] > 0

    await eventually(has_prompts, "no prompt is computed")
    os.kill(pid, signal.SIGKILL)


async def kill_in_an_answer(client: AsyncClient, pid: int) -> dict[str, int]:
    """Once all answers have begun; how many attempts each will have had."""

    async def have_begun() -> bool:
        found = await client.requests()
        return len(found) == len(PROMPTS) and all(each.completion_tokens >= NUM_BEGUN for each in found)

    await eventually(have_begun, "the answers do not begin")
    os.kill(pid, signal.SIGKILL)
    found = await client.requests()
    assert {each.outcome for each in found} == {"running"}, "the answers are too short for this machine"
    lost = [each for each in found if each.decode_worker == "decode-0"]
    assert lost
    assert any(each.attempts > 1 for each in found)
    return {each.request_id: each.attempts + (each in lost) for each in found}
