"""Drafts by lookup through real processes: a request's choice, the same tokens with and without, what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.client import AsyncClient, Options
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.support.metrics import Samples, scrape, value
from tests.support.tiny_models import make_checkpoint

NUM_TOKENS, REPEATED = 300, 40
PROMPT = list(range(60, 90))
ANSWER: Options = {
    "temperature": 0.0,
    "ignore_eos": True,
    "max_tokens": NUM_TOKENS,
    "logit_bias": {REPEATED: 100.0},
}
"""A bias makes the tiny model repeat a token."""
PLAIN: Options = {**ANSWER, "speculation": "off"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    folder = make_checkpoint("llama3_rope", tmp_path / "tiny")
    config = {
        "model": {"path": str(folder), "name": "tiny", "dtype": "float32"},
        "gateway": {"port": 0},
        "placement": {"local_prefill": "never"},
        "transfer": {"transport": "shm"},
        "pools": {"decode": {"speculation": {"method": "lookup", "max_draft": 4}}},
    }
    with ProcessCluster(parse_config(config)) as running:
        yield running
    assert running.killed == []


def counted(samples: Samples, name: str) -> float:
    return value(samples, f"disagg_engine_{name}_tokens_total", instance="decode-0")


async def test_drafts_are_accepted_counted_and_refused_by_a_request(cluster: ProcessCluster) -> None:
    async with (
        AsyncClient(cluster.address) as client,
        httpx.AsyncClient(base_url=f"http://{cluster.http_address}") as http,
    ):
        first = await scrape(http, lambda samples: True)
        num_sampled = counted(first, "output")

        async def answered(num_answers: int) -> Samples:
            """The metrics once the decode worker reported all tokens; the first of each answer is the prefill
            worker's."""
            wanted = num_sampled + num_answers * (NUM_TOKENS - 1)
            return await scrape(http, lambda samples: counted(samples, "output") == wanted)

        drafted = await client.generate(PROMPT, **ANSWER)
        with_drafts = await answered(1)
        made = await client.explain(drafted.request_id)
        assert list(drafted.token_ids) == [REPEATED] * NUM_TOKENS
        assert made.drafted_tokens >= made.accepted_tokens > 0
        assert counted(with_drafts, "drafted") - counted(first, "drafted") == made.drafted_tokens
        assert counted(with_drafts, "accepted") - counted(first, "accepted") == made.accepted_tokens
        lengths = with_drafts["disagg_engine_accepted_length_sum"]
        assert lengths[frozenset({("instance", "decode-0")})] == counted(with_drafts, "accepted")
        [decode] = [each for each in (await client.cluster_state()).workers if each.worker_id == "decode-0"]
        assert decode.tokens_per_step > 1.0
        assert decode.accepted_tokens == counted(with_drafts, "accepted")

        plain = await client.generate(PROMPT, **PLAIN)
        without = await answered(2)
        assert plain.token_ids == drafted.token_ids
        assert [counted(without, name) for name in ("drafted", "accepted")] == [
            counted(with_drafts, name) for name in ("drafted", "accepted")
        ]
        assert (await client.explain(plain.request_id)).drafted_tokens == 0
