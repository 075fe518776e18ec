"""Running sequences that move between real worker processes: random moves under load give the answers that the same
workers give without any, and a worker that is killed in the middle of one changes nothing but the time it takes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.config import TransferLimits, WorkerConfig
from disagg.engine.fake_runner import fake_generate
from disagg.engine.faults.faulty import FAILPOINTS_VARIABLE
from disagg.proto.block_hash import chain_hashes, root_hash
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import RoleName, Sampling, WorkerInfo
from disagg.proto.token_ids import pack_token_ids
from disagg.router.api import RoutedRequest
from disagg.router.config import RouterConfig
from disagg.router.shell.server import RouterServer
from tests.support.router import EMPTY
from tests.support.secret import SECRET
from tests.support.tiny_models import END_OF_TEXT_ID, make_checkpoint
from tests.support.waiting import eventually
from tests.support.workers import running_workers, wait_until_workers_idle

NUM_MOVES = 60
NUM_STREAMS = 12
LIMIT_S = 60.0
_ITEM = {
    "type": "object",
    "properties": {"kind": {"enum": ["small", "large"]}, "many": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["kind", "many"],
    "additionalProperties": False,
}
_LIST = {"type": "array", "items": _ITEM, "minItems": 60, "x-guidance": {"whitespace_flexible": False}}
GRAMMAR = json.dumps({"grammars": [{"json_schema": _LIST}]})


def worker_config(name: str, roles: tuple[RoleName, ...], folder: Path, **options: Any) -> WorkerConfig:
    """Chunks of 40 tokens, so that most of a sequence travels before it is held."""
    bytes_per_token = 3 * 2 * 2 * 16 * 4
    return WorkerConfig(
        worker_id=name,
        roles=roles,
        model_path=str(folder),
        dtype="float32",
        transport="shm",
        num_blocks=1024,
        max_model_len=1024,
        token_budget=64,
        decode_reserve_tokens=32,
        transfer=TransferLimits(chunk_bytes=40 * bytes_per_token, staging_bytes=240 * bytes_per_token),
        **options,
    )


def samplings(dice: random.Random, max_tokens: int) -> Sampling:
    """Under a grammar that forces most tokens, greedy, or drawn with penalties; some with logprobs."""
    logprobs = dice.choice((-1, -1, 2))
    if dice.random() < 0.3:
        temperature, seed = dice.choice((0.0, 0.9)), dice.randrange(1 << 30)
        return Sampling(
            temperature=temperature, seed=seed, grammar=GRAMMAR, stop_token_ids=(END_OF_TEXT_ID,), max_tokens=max_tokens
        )
    if dice.random() < 0.4:
        return Sampling(temperature=0.0, max_tokens=max_tokens, logprobs=logprobs)
    return Sampling(
        temperature=0.9,
        top_p=0.95,
        seed=dice.randrange(1 << 30),
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        min_tokens=dice.randrange(50),
        stop_token_ids=(dice.randrange(384),),
        max_tokens=max_tokens,
        logprobs=logprobs,
    )


class Requests:
    """The same ones again and again, under new ids."""

    def __init__(self, info: WorkerInfo, count: int, vocab_size: int = 384) -> None:
        self._dice = random.Random(7)
        self._root = root_hash(info.fingerprint)
        self._parts = [
            (
                pack_token_ids([self._dice.randrange(vocab_size) for _ in range(1 + self._dice.randrange(150))]),
                samplings(self._dice, 150 + self._dice.randrange(150)),
            )
            for _ in range(count)
        ]
        self._num_made = 0

    def make(self, number: int) -> RoutedRequest:
        prompt, sampling = self._parts[number]
        self._num_made += 1
        return RoutedRequest(
            request_id=RequestId(f"r{self._num_made}"),
            prompt_token_ids=prompt,
            block_hashes=tuple(chain_hashes(self._root, prompt)),
            root_hash=self._root,
            sampling=sampling,
        )


@asynccontextmanager
async def router_to(infos: Sequence[WorkerInfo]) -> AsyncIterator[RouterServer]:
    server = RouterServer(RouterConfig(policy="random", migrations=4), GatewayId("g"), infos, SECRET)
    await server.start()
    try:
        await server.wait_until_connected(LIMIT_S)
        yield server
    finally:
        await server.stop()


async def answer_of(server: RouterServer, request: RoutedRequest) -> tuple[list[int], int, str]:
    """Tokens, how many of them had logprobs, and the reason."""
    handle = server.submit(request, time.monotonic())
    tokens, num_logprobs = [], 0
    async for batch in handle:
        tokens += batch.token_ids
        num_logprobs += len(batch.logprobs)
    assert handle.completion is not None
    return tokens, num_logprobs, handle.completion.reason


async def answers_while_workers_drain_at_random(infos: Sequence[WorkerInfo], num_moves: int) -> dict[str, int]:
    """Endless streams while one worker after the other drains, until so many sequences moved; the moves by outcome. All
    answers must be those without moves."""
    requests = Requests(infos[0], NUM_STREAMS)
    dice = random.Random(3)
    async with router_to(infos) as server:
        numbers = range(NUM_STREAMS)
        expected = await asyncio.gather(*(answer_of(server, requests.make(number)) for number in numbers))
        assert not any(server.view().stats.migrations.values())
        movers = [info for info in infos if "decode" in info.roles]

        def moved() -> dict[str, int]:
            return dict(server.view().stats.migrations)

        async def stream(number: int) -> None:
            while moved().get("moved", 0) < num_moves:
                assert await answer_of(server, requests.make(number)) == expected[number]

        async def drains() -> None:
            while moved().get("moved", 0) < num_moves:
                info = dice.choice(movers)
                server.drain_worker(info.worker_id, info.incarnation)
                await asyncio.sleep(dice.uniform(0.01, 0.2))
                server.resume_worker(info.worker_id, info.incarnation)

        async with asyncio.timeout(4 * LIMIT_S):
            await asyncio.gather(drains(), *(stream(number) for number in numbers))
        found = moved()
        assert server.check_integrity() == []
        assert server.holdings() == EMPTY
        failed = ("worker_lost", "decode_failed", "kv_transfer_failed", "contradicting_tokens", "end_before_tokens")
        assert [server.counters().get(name, 0) for name in failed] == [0] * len(failed)
    await wait_until_workers_idle(infos)
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama3_rope", tmp_path_factory.mktemp("models") / "tiny")


async def test_elastic_workers_move_sequences_under_load_and_answers_stay_the_same(checkpoint: Path) -> None:
    both: tuple[RoleName, ...] = ("prefill", "decode")
    configs = [worker_config(f"workers-{n}", both, checkpoint, is_elastic=True) for n in range(3)]
    with running_workers(*configs) as infos:
        assert (await answers_while_workers_drain_at_random(infos, NUM_MOVES))["moved"] >= NUM_MOVES


@pytest.mark.slow
async def test_decode_workers_hand_over_to_each_other(checkpoint: Path) -> None:
    """One of them with two ranks, so that each head goes from the rank that has it to the one that needs it."""
    configs = [
        worker_config("prefill-0", ("prefill",), checkpoint),
        worker_config("decode-0", ("decode",), checkpoint),
        worker_config("decode-1", ("decode",), checkpoint, tp=2),
    ]
    with running_workers(*configs) as infos:
        assert (await answers_while_workers_drain_at_random(infos, NUM_MOVES // 3))["moved"] >= NUM_MOVES // 3


# ---------------------------------------------------------------- kills

KILLS = {
    "offered": "Reserved",
    "held": "ClearToSend",
    "committed": "CommitAck",
}
"""Phase of a move -> the message of the target that comes late, so that it lasts."""
NUM_TOKENS = 700


@pytest.mark.parametrize("phase", KILLS)
async def test_either_worker_is_killed_in_the_middle_of_a_move(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(
        {
            "model": {"path": "fake"},
            "gateway": {"port": 0},
            "placement": {"local_prefill": "never", "migrations": 8},
            "recovery": {"failpoints": True},
            "transfer": {"transport": "shm"},
            "pools": {"decode": {"size": 2}},
        }
    )
    fault = f"control.send=delay(worker=decode-*,message={KILLS[phase]},ms=400,after=6)"
    monkeypatch.setenv(FAILPOINTS_VARIABLE, fault)
    prompts = [tuple(range(number, number + 30)) for number in range(6)]
    with ProcessCluster(config) as cluster:
        async with AsyncClient(cluster.address) as client:
            for victim in ("decode-0", "decode-1"):
                await one_kill(cluster, client, prompts, victim)
            await wait_until_workers_idle(cluster.workers, cluster.secret)


async def one_kill(cluster: ProcessCluster, client: AsyncClient, prompts: Sequence[Sequence[int]], victim: str) -> None:
    """Drain decode-0, which begins moves to decode-1, and kill one of the two."""

    async def run(prompt: Sequence[int]) -> list[int]:
        deltas = client.stream(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=LIMIT_S)
        return [token async for delta in deltas for token in delta.token_ids]

    streams = [asyncio.create_task(run(prompt)) for prompt in prompts]
    await eventually(lambda: decodes_on(client, "decode-0"), "nothing decodes on decode-0")
    pid = cluster.pid(victim)
    await client.drain("decode-0")
    async with asyncio.timeout(LIMIT_S):
        while not await is_moving(client):
            assert not all(stream.done() for stream in streams), "the answers are too short for this machine"
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*streams) == [fake_generate(prompt, NUM_TOKENS) for prompt in prompts]

    def is_replaced() -> bool:
        return cluster.state().is_settled and cluster.pid(victim) != pid

    await eventually(is_replaced, f"{victim} did not come back")


async def decodes_on(client: AsyncClient, name: str) -> bool:
    """Whether the worker has a sequence."""
    workers = (await client.cluster_state()).workers
    return any(worker.sequences for worker in workers if worker.worker_id == name)


async def is_moving(client: AsyncClient) -> bool:
    """Whether a sequence is on its way."""
    spans = [span for request in await client.requests() for span in request.spans]
    return any(span.stage == "migration" and not span.HasField("end_ms") for span in spans)
