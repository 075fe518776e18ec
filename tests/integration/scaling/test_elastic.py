"""Mode elastic with real processes: two workers that hand over to each other, and compute requests alone."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from tests.support.workers import wait_until_workers_idle

CONFIG = {
    "mode": "elastic",
    "model": {"path": "fake"},
    "gateway": {"port": 0},
    "placement": {"policy": "random"},
    "transfer": {"transport": "shm"},
}
"""Policy `random` takes any option: which one is best is another test's question."""
NUM_REQUESTS, NUM_TOKENS = 40, 30


def test_workers_hand_over_both_ways_at_once_and_give_everything_back() -> None:
    prompts = [tuple(range(number, number + 40 + number)) for number in range(NUM_REQUESTS)]
    with ProcessCluster(parse_config(CONFIG)) as cluster, Client(cluster.address) as client:
        assert [info.worker_id for info in cluster.workers] == ["workers-0", "workers-1"]

        def run(prompt: tuple[int, ...]) -> tuple[list[int], tuple[str, str]]:
            answer = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            route = client.explain(answer.request_id)
            return list(answer.token_ids), (route.prefill_worker, route.decode_worker)

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(run, prompts))
        assert [tokens for tokens, _ in found] == [fake_generate(prompt, NUM_TOKENS) for prompt in prompts]
        assert {route for _, route in found} == {
            ("workers-0", "workers-1"),
            ("workers-1", "workers-0"),
            ("", "workers-0"),
            ("", "workers-1"),
        }
        asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))
    assert cluster.killed == []
