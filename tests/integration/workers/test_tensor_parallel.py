"""Workers of several ranks in a whole cluster of processes: the answers of `transformers`, whatever the ranks of either
pool, and nothing left.

A step takes 64 tokens and a KV message 40, so that prompts are computed, and moved, in several uneven pieces. All
prompts are sent at once, so that long ones are computed beside others that decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typing_extensions import override

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import ClusterConfig, parse_config
from disagg.cluster.core.ranks import rank_cores
from disagg.cluster.hosts.processes import WORKER_MODULE, ProcessCluster, start_child, stop_children
from disagg.cluster.system.process_tools import ProcessRef
from disagg.engine.config import WorkerConfig
from disagg.engine.sharding.shards import Shard
from disagg.proto.errors import ConfigError
from tests.integration.scaling.test_scaling import endless_streams, replaced
from tests.integration.workers.test_processes import FAKE
from tests.support import reference
from tests.support.processes import children_of
from tests.support.registry import Registry
from tests.support.secret import SECRET
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

BLOCK = 16
CHUNK = 64
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7]
NUM_TOKENS = 20
SHARED_PREFIX = 5 * BLOCK


class Pair(NamedTuple):
    """Ranks of the prefill and of the decode worker, and which model they serve."""

    prefill: int
    decode: int
    kind: str
    stages: tuple[int, int] = (1, 1)
    """Stages of either."""

    @override
    def __str__(self) -> str:
        return "-to-".join(f"{stages}x{tp}" for stages, tp in zip(self.stages, self[:2], strict=True))


WIDE, NARROW = "llama_odd_vocab", "qwen3"
"""8 query and 4 KV heads, and a vocabulary that no number of ranks divides; 4 query and 2 KV heads, which is fewer than
some workers have ranks."""
BYTES_PER_TOKEN = {WIDE: 3 * 2 * 4 * 8 * 4, NARROW: 3 * 2 * 2 * 32 * 4}
PAIRS = [
    Pair(1, 2, WIDE),
    Pair(2, 1, NARROW),
    Pair(1, 1, NARROW, (2, 3)),
    pytest.param(Pair(2, 2, WIDE), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_checkpoint(kind, root / kind) for kind in (WIDE, NARROW)}


def cluster_config(folder: Path, pair: Pair) -> ClusterConfig:
    pool = {"num_blocks": 256, "token_budget": CHUNK, "decode_reserve_tokens": 64}
    token_bytes = BYTES_PER_TOKEN[pair.kind]
    return parse_config(
        {
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": 1024},
            "gateway": {"port": 0},
            "placement": {"local_prefill": "never"},
            "pools": {
                "prefill": {**pool, "tp": pair.prefill, "pp": pair.stages[0]},
                "decode": {**pool, "tp": pair.decode, "pp": pair.stages[1]},
            },
            "transfer": {"chunk_bytes": 40 * token_bytes, "staging_bytes": 120 * token_bytes},
        }
    )


@contextlib.contextmanager
def running(config: ClusterConfig) -> Iterator[ProcessCluster]:
    """A cluster that ends by itself at SIGTERM, with all ranks of its workers, each on cores of its own."""
    with ProcessCluster(config) as cluster:
        ranks: list[ProcessRef] = []
        for info, planned in zip(cluster.workers, cluster.plan.workers, strict=True):
            assert (info.worker_id, info.tp) == (planned.worker_id, planned.tp)
            pids = [info.pid, *children_of(info.pid)]
            shards = [Shard.of_number(rank, planned.tp, planned.pp) for rank in range(planned.num_ranks)]
            cores = [set(rank_cores(planned.cores, shard)) for shard in shards]
            assert [os.sched_getaffinity(pid) for pid in pids] == cores
            ranks += [ProcessRef.of(pid) for pid in pids]
        yield cluster
    assert cluster.killed == []
    assert not [rank for rank in ranks if rank.is_alive()]


def prompts_of(dice: random.Random) -> list[list[int]]:
    """One of each length, and some that begin alike."""

    def prompt(length: int) -> list[int]:
        return [dice.randrange(VOCAB_SIZE) for _ in range(length)]

    shared = prompt(SHARED_PREFIX)
    return [prompt(length) for length in LENGTHS] + [[*shared, *prompt(length)] for length in (1, 20, 70)]


async def check_answers(folder: Path, pair: Pair) -> None:
    """All prompts at once, with cold caches and then, as a second turn, with what the first one has left in them."""
    with running(cluster_config(folder, pair)) as cluster:
        async with AsyncClient(cluster.address) as client:
            prompts = prompts_of(random.Random(str(pair)))
            for _ in range(2):
                expected = [reference.generate(folder, prompt, NUM_TOKENS) for prompt in prompts]
                answers = await asyncio.gather(
                    *(client.generate(p, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True) for p in prompts)
                )
                assert [list(answer.token_ids) for answer in answers] == expected
                routes = [await client.explain(answer.request_id) for answer in answers]
                assert all(route.kv_bytes > 0 for route in routes)
                prompts = [[*prompt, *ids, 7] for prompt, ids in zip(prompts, expected, strict=True)]
        await wait_until_workers_idle(cluster.workers, cluster.secret)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
async def test_answers_are_those_of_transformers(folders: dict[str, Path], pair: Pair) -> None:
    await check_answers(folders[pair.kind], pair)


def test_a_killed_rank_costs_no_answer_and_its_worker_comes_back_whole() -> None:
    config = parse_config({**FAKE, "pools": {"decode": {"size": 2, "tp": 2}}})
    with ProcessCluster(config) as cluster:
        ranks = [ProcessRef.of(pid) for pid in (cluster.pid("decode-1"), *children_of(cluster.pid("decode-1")))]
        assert len(ranks) == 2
        with endless_streams(cluster.address, num_streams=4) as wait_for_all:
            wait_for_all()
            ranks[1].kill()
            assert replaced(cluster, "decode-1", ranks[0].pid, timeout_s=LONG_WAIT_S)
            wait_for_all()
        assert not [rank for rank in ranks if rank.is_alive()]
        record = cluster.state().workers[2]
        assert (record.worker_id, record.num_starts) == ("decode-1", 2)
        assert record.detail.startswith("exit status 3; the end of its log:")
        assert "decode-1.rank-1 ended: killed by SIGKILL" in record.detail
        assert len(children_of(cluster.pid("decode-1"))) == 1
    assert cluster.killed == []


def test_the_ranks_of_a_worker_that_is_killed_end_with_it() -> None:
    """Also one that is stopped, and cannot see that it is alone."""
    with Registry() as registry, tempfile.TemporaryDirectory() as logs:
        config = WorkerConfig(worker_id="w", roles=("decode",), model_path="fake", tp=3)
        child = start_child("w", WORKER_MODULE, config, registry.address, SECRET, Path(logs), {})
        try:
            registry.wait(["w"])
            ranks = [ProcessRef.of(pid) for pid in children_of(child.process.pid)]
            assert len(ranks) == 2
            os.kill(ranks[1].pid, signal.SIGSTOP)
            child.process.kill()
            assert wait_until(lambda: not any(rank.is_alive() for rank in ranks))
        finally:
            stop_children([child])


def test_ranks_that_cannot_share_the_model_are_an_error_before_anything_starts(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"^pools\.decode\.tp: tp is 3, .*`num_attention_heads`"):
        ProcessCluster(cluster_config(folders[WIDE], Pair(1, 3, WIDE)))
