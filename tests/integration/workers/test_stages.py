"""Workers of several stages in a real cluster, with the deterministic model: answers, and a stage that is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from tests.integration.scaling.test_scaling import replaced
from tests.support.leftovers import is_ours
from tests.support.workers import wait_until_workers_idle

PROMPT = tuple(range(300))
NUM_TOKENS = 2000
"""An answer that is far from its end when a stage is killed."""
PREFILL = {"pp": 2, "tp": 2}


def cluster_config(decode: dict[str, int]) -> dict[str, Any]:
    return {
        "model": {"path": "fake"},
        "gateway": {"port": 0},
        "transfer": {"transport": "shm"},
        "placement": {"local_prefill": "never"},
        "pools": {"prefill": {**PREFILL, "token_budget": 128}, "decode": {**decode, "num_blocks": 1024}},
        "recovery": {"suspect_after_s": 30.0, "kill_after_s": 60.0},
    }


def rank_pid(log: Path, rank: int) -> int:
    """The process of a rank of the worker that wrote this log, in its latest incarnation."""
    return int(re.findall(rf"rank {rank} joined, process (\d+)", log.read_text())[-1])


@pytest.mark.parametrize(
    ("decode", "name", "rank"), [({"tp": 2}, "prefill-0", 3), ({"pp": 2}, "decode-0", 1)], ids=["of_p", "of_d"]
)
def test_a_stage_that_is_killed_costs_no_answer(decode: dict[str, int], name: str, rank: int, tmp_path: Path) -> None:
    """The last stage of P, before a prompt, or of D, in the middle of an answer."""
    with ProcessCluster(parse_config(cluster_config(decode)), log_dir=tmp_path) as cluster:
        assert [info.tp for info in cluster.workers] == [2, decode.get("tp", 1)]
        before, pid = cluster.pid(name), rank_pid(tmp_path / f"{name}.log", rank)
        with Client(cluster.address) as client:
            answer(client, PROMPT)
            if name == "prefill-0":
                os.kill(pid, signal.SIGKILL)
            else:
                answer_while_killed(client, PROMPT[::-1], pid)
            assert replaced(cluster, name, before)
            assert not is_ours(pid)
            answer(client, (*PROMPT, 7))
        asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    assert cluster.killed == []


def answer(client: Client, prompt: tuple[int, ...]) -> None:
    """Ask for an answer, which is right and went through both pools."""
    found = client.generate(prompt, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert list(found.token_ids) == fake_generate(prompt, 20)
    route = client.explain(found.request_id)
    assert (route.prefill_worker, route.decode_worker) == ("prefill-0", "decode-0")
    assert route.kv_bytes > 0


def answer_while_killed(client: Client, prompt: tuple[int, ...], pid: int) -> None:
    """Kill a process at the first tokens of an answer, which goes on behind those."""
    tokens: list[int] = []
    for delta in client.stream(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True):
        if delta.token_ids and not tokens:
            os.kill(pid, signal.SIGKILL)
        tokens += delta.token_ids
        finished = delta.finished
    assert tokens == fake_generate(prompt, NUM_TOKENS)
    assert finished is not None
    assert client.explain(finished.request_id).attempts == 2
