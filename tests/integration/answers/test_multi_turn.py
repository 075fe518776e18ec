"""Conversations over public gRPC: what a turn moves between the workers of a real cluster, and that all of it is
accounted for. One prefill and one decode worker with the deterministic model, whose KV has 8 bytes a token."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import httpx
import pytest

from disagg.client import AsyncClient, ClusterState, Explanation, Options
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from tests.support.cluster_state import until_counts
from tests.support.metrics import Samples, scrape, value
from tests.support.workers import wait_until_workers_idle

BYTES_PER_TOKEN = 8
NUM_PROMPT, NUM_ANSWER, NUM_NEW = 100, 60, 25


def greedy(max_tokens: int) -> Options:
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}


@contextlib.contextmanager
def cluster_of(local_prefill: Literal["auto", "never"], swap_bytes: int | str) -> Iterator[ProcessCluster]:
    pool = {"num_blocks": 128, "decode_reserve_tokens": 16, "swap_bytes": swap_bytes}
    config = {
        "model": {"path": "fake"},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0},
        "placement": {"local_prefill": local_prefill},
        "pools": {"prefill": pool, "decode": pool},
    }
    with ProcessCluster(parse_config(config)) as cluster:
        yield cluster
    assert cluster.killed == []


@pytest.fixture(scope="module")
def pairs_only() -> Iterator[ProcessCluster]:
    """Every prompt goes through the prefill worker; what is preempted is not kept."""
    with cluster_of("never", swap_bytes=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def with_local_prefill() -> Iterator[ProcessCluster]:
    """The decode worker may compute prompts, and keeps what is preempted."""
    with cluster_of("auto", swap_bytes="1MiB") as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def client_of(cluster: ProcessCluster) -> AsyncIterator[AsyncClient]:
    """The workers are idle at the end."""
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_workers_idle(cluster.workers, cluster.secret)


async def converse(client: AsyncClient, num_turns: int) -> list[Explanation]:
    """A conversation of exact answers; how its turns went."""
    dice = random.Random(7)
    history = [dice.randrange(250) for _ in range(NUM_PROMPT)]
    routes = []
    for _ in range(num_turns):
        answer = await client.generate(history, **greedy(NUM_ANSWER))
        assert list(answer.token_ids) == fake_generate(history, NUM_ANSWER)
        routes.append(await client.explain(answer.request_id))
        history += [*answer.token_ids, *(dice.randrange(250) for _ in range(NUM_NEW))]
        await until_cached(client, cached_at(len(routes)) // 16)
    return routes


async def until_cached(client: AsyncClient, num_blocks: int) -> None:
    """Until the router has the report that the decode worker has cached so many blocks: both come with one report."""

    def cached(state: ClusterState) -> list[int]:
        return [worker.kv_blocks_cached for worker in state.workers if worker.worker_id == "decode-0"]

    await until_counts(client, cached, [num_blocks])


def cached_at(turn: int) -> int:
    """Tokens in whole blocks of all turns before; the KV of an answer's last token was never computed."""
    return (NUM_PROMPT + turn * NUM_ANSWER + (turn - 1) * NUM_NEW - 1) // 16 * 16 if turn else 0


def tokens_at(turn: int) -> int:
    return NUM_PROMPT + turn * (NUM_ANSWER + NUM_NEW)


async def test_a_turn_moves_the_kv_that_the_decode_worker_lacks(pairs_only: ProcessCluster) -> None:
    async with client_of(pairs_only) as client:
        routes = await converse(client, 4)
        assert [route.decode_cached_tokens for route in routes] == [cached_at(turn) for turn in range(4)]
        moved = [BYTES_PER_TOKEN * (tokens_at(turn) - cached_at(turn)) for turn in range(4)]
        assert [route.kv_bytes for route in routes] == moved
        assert [route.kv_bytes for route in reversed(await client.requests())] == moved


async def test_or_the_decode_worker_computes_it_itself(with_local_prefill: ProcessCluster) -> None:
    """Two idle workers: with one of them alone fewer are busy."""
    async with client_of(with_local_prefill) as client:
        routes = await converse(client, 3)
        assert [(route.prefill_worker, route.kv_bytes) for route in routes[1:]] == [("", 0)] * 2
        assert [route.decode_cached_tokens for route in routes[1:]] == [cached_at(1), cached_at(2)]


async def more_than_fits(client: AsyncClient) -> list[int]:
    """Eight answers that need twice the blocks of the decode worker, beyond what is reserved, and are exact; how many
    attempts each one took."""
    dice = random.Random(8)
    prompts = [[dice.randrange(250) for _ in range(40)] for _ in range(8)]
    answers = await asyncio.gather(*(client.generate(prompt, **greedy(500)) for prompt in prompts))
    assert [list(answer.token_ids) for answer in answers] == [fake_generate(prompt, 500) for prompt in prompts]
    return [(await client.explain(answer.request_id)).attempts for answer in answers]


async def counted(cluster: ProcessCluster, name: str) -> float:
    """The decode worker's count, which comes with its next report."""

    def count(samples: Samples) -> float:
        return value(samples, f"disagg_engine_{name}_total", instance="decode-0")

    async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}") as http:
        return count(await scrape(http, lambda samples: count(samples) > 0))


async def test_what_is_preempted_and_not_kept_goes_on_in_another_attempt(pairs_only: ProcessCluster) -> None:
    async with client_of(pairs_only) as client:
        assert max(await more_than_fits(client)) > 1
        assert await counted(pairs_only, "preemptions") > 0


async def test_what_is_preempted_and_kept_goes_on_in_the_same(with_local_prefill: ProcessCluster) -> None:
    async with client_of(with_local_prefill) as client:
        assert await more_than_fits(client) == [1] * 8
        assert await counted(with_local_prefill, "swapped_in_blocks") > 0
