"""The whole cluster over public gRPC, with the deterministic model: two prefill and two decode workers, a gateway,
real clients.

Every test ends with an audit: the router has nothing queued or running, and no worker holds a sequence, a block, a
lease or a slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from disagg.client import AsyncClient, ClusterState, Explanation, Options
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import (
    ContextLengthError,
    DeadlineError,
    DisaggError,
    InvalidRequestError,
    ModelNotFoundError,
)
from tests.support.cluster_state import requests_of, until_counts
from tests.support.workers import wait_until_workers_idle

CONFIG = {
    "model": {"path": "fake"},
    "gateway": {"port": 0},
    "placement": {"local_prefill": "never"},
    "pools": {
        "prefill": {"size": 2, "token_budget": 64, "num_blocks": 256},
        "decode": {"size": 2, "num_blocks": 256},
    },
}


def greedy(max_tokens: int) -> Options:
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}


def own_cluster(policy: str) -> ProcessCluster:
    """One with a policy without a clock. Its workers load no torch, so it starts in a third of the time."""
    placement = {"local_prefill": "never", "policy": policy}
    return ProcessCluster(parse_config({**CONFIG, "placement": placement, "transfer": {"transport": "shm"}}))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(parse_config(CONFIG)) as running:
        yield running
    assert running.killed == []


@contextlib.asynccontextmanager
async def client_of(cluster: ProcessCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await until_counts(client, requests_of, (0, 0))
        await wait_until_workers_idle(cluster.workers, cluster.secret)


def prompt_of(dice: random.Random, length: int) -> list[int]:
    return [dice.randrange(250) for _ in range(length)]


async def test_mixed_load_is_exact_and_leaves_nothing(cluster: ProcessCluster) -> None:
    """Answers, early closes, cancels before the first token and deadlines, all at once."""
    dice = random.Random(3)
    shared = prompt_of(dice, 96)

    async def whole(client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        answer = await client.generate(prompt, **greedy(num_tokens))
        assert list(answer.token_ids) == fake_generate(prompt, num_tokens)
        assert answer.usage.completion_tokens == num_tokens
        route = await client.explain(answer.request_id)
        assert route.prefill_worker.startswith("prefill-")
        assert route.decode_worker.startswith("decode-")
        assert [stage.stage for stage in route.stages] == sorted(
            (stage.stage for stage in route.stages), key=[s.stage for s in route.stages].index
        )
        assert route.attempts == 1

    async def closed_early(client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        got: list[int] = []
        async with contextlib.aclosing(client.stream(prompt, **greedy(2000))) as stream:
            async for delta in stream:
                got += delta.token_ids
                if len(got) >= num_tokens:
                    break
        assert got == fake_generate(prompt, len(got))

    async def cancelled(client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        task = asyncio.create_task(client.generate(prompt, **greedy(2000)))
        await asyncio.sleep(num_tokens / 4000)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def out_of_time(client: AsyncClient, prompt: list[int], num_tokens: int) -> None:
        with pytest.raises(DeadlineError):
            await client.generate(prompt, timeout_s=num_tokens / 400, **greedy(3000))

    async with client_of(cluster) as client:
        kinds = [whole, whole, whole, closed_early, cancelled, out_of_time]
        jobs = []
        for i in range(60):
            prefix = shared[: dice.choice((0, 32, 96))]
            jobs.append(kinds[i % 6](client, prefix + prompt_of(dice, dice.randrange(1, 150)), dice.randrange(1, 60)))
        await asyncio.gather(*jobs)


async def test_more_than_fits_waits_and_is_answered(cluster: ProcessCluster) -> None:
    """Back-pressure: each request reserves 35 of the 512 decode blocks; forty of them take turns."""
    dice = random.Random(4)
    prompts = [prompt_of(dice, 40) for _ in range(40)]
    async with client_of(cluster) as client:
        answers = await asyncio.gather(*(client.generate(p, **greedy(500)) for p in prompts))
        assert [list(answer.token_ids) for answer in answers] == [fake_generate(p, 500) for p in prompts]


async def test_requests_go_round_both_pools() -> None:
    """One after the other, so that there is always room: the counts depend on no measured time."""
    dice = random.Random(5)
    with own_cluster("round_robin") as own:
        async with client_of(own) as client:
            answers = [await client.generate(prompt_of(dice, 64), **greedy(4)) for _ in range(8)]
            routes = [await client.explain(answer.request_id) for answer in answers]
    assert Counter(route.prefill_worker for route in routes) == {"prefill-0": 4, "prefill-1": 4}
    assert Counter(route.decode_worker for route in routes) == {"decode-0": 4, "decode-1": 4}


async def place_of(client: AsyncClient, prompt: list[int]) -> Explanation:
    """Where its answer, which is checked, was made."""
    answer = await client.generate(prompt, **greedy(4))
    assert list(answer.token_ids) == fake_generate(prompt, 4)
    place = await client.explain(answer.request_id)
    assert answer.usage.cached_tokens == place.prefill_cached_tokens
    return place


def cached_blocks(state: ClusterState) -> dict[str, int]:
    """How many the workers of each role have, by their reports to the router."""
    cached: Counter[str] = Counter()
    for worker in state.workers:
        (role,) = worker.roles
        cached[role] += worker.kv_blocks_cached
    return dict(cached)


async def test_a_repeated_prefix_is_found_where_it_is() -> None:
    """By a policy that weighs no measured time, so that it must go to the workers that have it."""
    dice = random.Random(6)
    prompts = [prompt_of(dice, 128) for _ in range(3)]
    with own_cluster("prefix") as own:
        async with client_of(own) as client:
            places = []
            for count, prompt in enumerate(prompts, start=1):
                places.append(await place_of(client, prompt))
                await until_counts(client, cached_blocks, {"prefill": 8 * count, "decode": 8 * count})
            for prompt, place in zip(prompts, places, strict=True):
                again = await place_of(client, [*prompt, 1, 2, 3])
                assert (again.prefill_worker, again.decode_worker) == (place.prefill_worker, place.decode_worker)
                assert (place.prefill_cached_tokens, place.decode_cached_tokens) == (0, 0)
                assert (again.prefill_cached_tokens, again.decode_cached_tokens) == (128, 128)


BAD: list[tuple[list[int] | str | list[dict[str, str]], Options, type[DisaggError], str]] = [
    ([], {}, InvalidRequestError, "prompt.token_ids"),
    ("", {}, InvalidRequestError, "prompt.text"),
    ([1, 2, 10**6], {}, InvalidRequestError, "prompt.token_ids[2]"),
    ([1] * 5000, {}, ContextLengthError, "prompt.token_ids"),
    ([1] * 100, {"max_tokens": 4000}, ContextLengthError, "stopping.max_tokens"),
    ([1], {"max_tokens": 0}, InvalidRequestError, "stopping.max_tokens"),
    ([1], {"min_tokens": 9, "max_tokens": 3}, InvalidRequestError, "stopping.min_tokens"),
    ([1], {"temperature": math.nan}, InvalidRequestError, "sampling.temperature"),
    ([1], {"temperature": -1.0}, InvalidRequestError, "sampling.temperature"),
    ([1], {"temperature": 1e30}, InvalidRequestError, "sampling.temperature"),
    ([1], {"top_p": 1.5}, InvalidRequestError, "sampling.top_p"),
    ([1], {"top_p": math.inf}, InvalidRequestError, "sampling.top_p"),
    ([1], {"top_k": -2}, InvalidRequestError, "sampling.top_k"),
    ([1], {"min_p": 1.5}, InvalidRequestError, "sampling.min_p"),
    ([1], {"presence_penalty": 3.0}, InvalidRequestError, "sampling.presence_penalty"),
    ([1], {"frequency_penalty": -3.0}, InvalidRequestError, "sampling.frequency_penalty"),
    ([1], {"repetition_penalty": 0.0}, InvalidRequestError, "sampling.repetition_penalty"),
    ([1], {"stop_token_ids": [10**6]}, InvalidRequestError, "stopping.stop_token_ids[0]"),
    ([1], {"stop": [""]}, InvalidRequestError, "stopping.stop[0]"),
    ([1], {"stop": ["x"] * 17}, InvalidRequestError, "stopping.stop"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "field"), BAD)
async def test_bad_input_names_its_field_and_reserves_nothing(
    cluster: ProcessCluster,
    prompt: list[int] | str | list[dict[str, str]],
    options: Options,
    error: type[DisaggError],
    field: str,
) -> None:
    async with client_of(cluster) as client:
        with pytest.raises(error) as caught:
            await client.generate(prompt, **options)
        assert isinstance(caught.value, InvalidRequestError)
        assert caught.value.field == field


async def test_unknown_model_and_past_deadline(cluster: ProcessCluster) -> None:
    async with client_of(cluster) as client:
        with pytest.raises(ModelNotFoundError, match="nobody"):
            await client.generate([1], model="nobody")
        with pytest.raises(DeadlineError):
            await client.generate([1], timeout_s=0.0, **greedy(5))
