"""Workers of several stages in a real cluster, with the deterministic model: answers, and a stage that is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from tests.integration.scaling.test_scaling import replaced
from tests.support.leftovers import is_ours
from tests.support.workers import wait_until_workers_idle

PROMPT = tuple(range(300))
NUM_TOKENS, NUM_BEGUN = 3000, 50
"""An answer that is far from its end when a stage is killed."""


def cluster_config(prefill: dict[str, int], decode: dict[str, int]) -> dict[str, Any]:
    return {
        "model": {"path": "fake"},
        "gateway": {"port": 0},
        "transfer": {"transport": "shm"},
        "placement": {"local_prefill": "never"},
        "pools": {"prefill": {**prefill, "token_budget": 128}, "decode": decode},
        "recovery": {"suspect_after_s": 30.0, "kill_after_s": 60.0},
    }


def last_rank(cluster: ProcessCluster, logs: Path, name: str) -> int:
    """The process of the last rank of a worker, which has joined it last."""
    worker = next(worker for worker in cluster.plan.workers if worker.worker_id == name)
    pattern = rf"rank {worker.num_ranks - 1} joined, process (\d+)"
    return int(re.findall(pattern, (logs / f"{name}.log").read_text())[-1])


def test_a_prefill_worker_is_restarted_after_one_of_its_stages_was_killed(tmp_path: Path) -> None:
    config = cluster_config({"pp": 2, "tp": 2}, {"tp": 2})
    with ProcessCluster(parse_config(config), log_dir=tmp_path) as cluster:
        before, stage = cluster.pid("prefill-0"), last_rank(cluster, tmp_path, "prefill-0")
        with Client(cluster.address) as client:
            answer(client, PROMPT)
            os.kill(stage, signal.SIGKILL)
            assert replaced(cluster, "prefill-0", before)
            assert not is_ours(stage)
            answer(client, PROMPT)
        asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    assert cluster.killed == []


def test_an_answer_goes_on_after_a_stage_of_its_decode_worker_was_killed(tmp_path: Path) -> None:
    config = cluster_config({"tp": 2}, {"pp": 2, "size": 2})
    with ProcessCluster(parse_config(config), log_dir=tmp_path) as cluster, Client(cluster.address) as client:
        tokens: list[int] = []
        name, before = "", 0
        for delta in client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True):
            tokens += delta.token_ids
            finished = delta.finished
            if not name and len(tokens) >= NUM_BEGUN:
                (name,) = {each.decode_worker for each in client.requests() if each.outcome == "running"}
                before = cluster.pid(name)
                os.kill(last_rank(cluster, tmp_path, name), signal.SIGKILL)
        assert tokens == fake_generate(PROMPT, NUM_TOKENS)
        assert finished is not None
        assert client.explain(finished.request_id).attempts == 2
        assert replaced(cluster, name, before)
        answer(client, PROMPT[::-1])
        asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    assert cluster.killed == []


def answer(client: Client, prompt: tuple[int, ...]) -> None:
    """Ask for an answer, which is right and went through both pools."""
    found = client.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert list(found.token_ids) == fake_generate(prompt, 20)
    route = client.explain(found.request_id)
    assert route.prefill_worker == "prefill-0"
    assert route.kv_bytes > 0
