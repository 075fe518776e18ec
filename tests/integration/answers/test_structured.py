"""Structured output in fp32 through real processes: the same tokens alone, in a batch, through a hand-over, with a step
for each forced token and without, and after a worker was killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.models.catalog import resolve_model
from disagg.engine.config import WorkerConfig
from disagg.proto.messages import RoleName, Sampling
from tests.integration.scaling.test_scaling import replaced
from tests.support.tiny_models import END_OF_TEXT_ID, make_checkpoint
from tests.support.waiting import LONG_WAIT_S
from tests.support.workers import open_gateway, running_workers, wait_until_workers_idle

pytestmark = pytest.mark.slow

KINDS = ["small", "large"]
DENSE = {"whitespace_flexible": False}
"""For grammars that no gateway made: the tiny model draws white space without end where it may."""
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": KINDS}, "many": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["kind", "many"],
    "additionalProperties": False,
    "x-guidance": DENSE,
}
LONG = {"x-guidance": DENSE, "type": "array", "items": {"enum": KINDS}, "minItems": 60, "maxItems": 60}
MAX_TOKENS = 900
PRODUCT: dict[str, Any] = {
    "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(12)]
}


def worker(name: str, roles: tuple[RoleName, ...], folder: Path, **options: Any) -> WorkerConfig:
    return WorkerConfig(
        worker_id=name,
        roles=roles,
        model_path=str(folder),
        dtype="float32",
        transport="shm",
        num_blocks=256,
        max_model_len=1024,
        token_budget=64,
        **options,
    )


def grammar(schema: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"kind", "many"} and value["kind"] in KINDS and 10 <= value["many"] <= 99


@pytest.mark.parametrize("kind", ["llama3_rope", pytest.param("smollm2-135m", marks=pytest.mark.model)])
async def test_tokens_are_the_same_wherever_they_are_chosen(kind: str, tmp_path: Path) -> None:
    import tokenizers

    is_tiny = kind == "llama3_rope"
    folder = make_checkpoint(kind, tmp_path / kind) if is_tiny else resolve_model(kind)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = (END_OF_TEXT_ID,) if is_tiny else (0, 2)
    drawn: list[dict[str, Any]] = [{"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6}]
    hows = [
        Sampling(grammar=grammar(SCHEMA), max_tokens=64, stop_token_ids=ends, **how)
        for how in ({"temperature": 0.0, "logprobs": 2}, *drawn)
    ]
    hows.append(Sampling(temperature=0.9, seed=7, max_tokens=24))  # a row without a grammar
    prompts = [[i + 1] * 70 for i in range(len(hows))]
    pair: dict[str, Any] = {"worker": "prefill-0", "to": "decode-0"}
    configs = [
        worker("prefill-0", ("prefill",), folder),
        worker("decode-0", ("decode",), folder),
        worker("colocated-0", ("prefill", "decode"), folder, skip_forced=False),
    ]
    with running_workers(*configs) as infos:
        async with open_gateway(infos) as gateway:
            each = list(zip(prompts, hows, strict=True))
            alone = [await gateway.run(prompt, sampling=how, **pair) for prompt, how in each]
            for answer in alone[:-1]:
                assert answer.reason == "stop"
                assert is_valid(backend.decode(answer.token_ids))
            assert sorted(alone[0].logprobs) == list(range(len(alone[0].token_ids)))
            expected = [answer.token_ids for answer in alone]
            batch = await asyncio.gather(*(gateway.run(prompt, sampling=how, **pair) for prompt, how in each))
            assert [answer.token_ids for answer in batch] == expected
            colocated = [gateway.run(prompt, sampling=how, worker="colocated-0") for prompt, how in each]
            assert [answer.token_ids for answer in await asyncio.gather(*colocated)] == expected
            # Another attempt, which knows the first five tokens.
            again = [
                await gateway.run(prompt, sampling=how, emitted=ids[:5], attempt=2, **pair)
                for (prompt, how), ids in zip(each, expected, strict=True)
            ]
            assert [[answer.tokens[i] for i in sorted(answer.tokens)] for answer in again] == [e[5:] for e in expected]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    folder = make_checkpoint("llama3_rope", tmp_path / "tiny")
    config = {
        "model": {"path": str(folder), "name": "tiny", "dtype": "float32"},
        "gateway": {"port": 0, "http_port": 0},
        "placement": {"local_prefill": "never", "policy": "round_robin"},
        "transfer": {"transport": "shm"},
        "pools": {"prefill": {"size": 1}, "decode": {"size": 2}},
    }
    with ProcessCluster(parse_config(config)) as running:
        yield running
    assert running.killed == []


def body(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    given = {key: value for key, value in schema.items() if key != "x-guidance"}  # the gateway bounds white space
    asked = {"type": "json_schema", "json_schema": {"name": "s", "schema": given}}
    message = {"role": "user", "content": "hello"}
    return {"model": "tiny", "messages": [message], "max_tokens": MAX_TOKENS, "response_format": asked, **fields}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> Any:
    reply = await http.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts(reply: Any) -> list[str]:
    return [choice["message"]["content"] for choice in reply["choices"]]


def connect(cluster: ProcessCluster) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=60.0)


async def test_http_answers_are_valid_and_a_stop_string_ends_them(cluster: ProcessCluster) -> None:
    async with connect(cluster) as http:
        asked = body(SCHEMA, temperature=1.0, seed=3)
        two = await ask(http, {**asked, "n": 2, "logprobs": True, "top_logprobs": 1})
        assert [choice["finish_reason"] for choice in two["choices"]] == ["stop", "stop"]
        assert all(map(is_valid, texts(two)))
        assert texts(await ask(http, asked)) == texts(two)[:1]
        (whole,) = texts(two)[:1]
        (cut,) = texts(await ask(http, {**asked, "stop": '"many"'}))
        assert cut == whole[: whole.index('"many"')]
    await wait_until_workers_idle(cluster.workers, cluster.secret)


async def test_a_hostile_schema_is_refused_while_a_stream_runs_and_a_killed_worker_changes_nothing(
    cluster: ProcessCluster,
) -> None:
    prompt = list(range(40))
    asked: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "seed": 9}
    async with connect(cluster) as http, AsyncClient(cluster.address) as client:
        long = body(LONG, temperature=1.0, seed=9)
        expected = texts(await ask(http, long))
        plain = await client.generate(prompt, ignore_eos=True, **asked)
        running = asyncio.create_task(ask(http, long))
        got: list[int] = []
        async for delta in client.stream(prompt, ignore_eos=True, **asked):
            got += delta.token_ids
            if len(got) == 1 or (len(got) < 40 and len(got) % 10 == 0):
                refused = await http.post("/v1/chat/completions", json=body({**PRODUCT, "$comment": str(len(got))}))
                assert refused.status_code == 400
                assert "combinations of anyOf and oneOf" in refused.json()["error"]["message"]
        assert got == list(plain.token_ids)
        assert texts(await running) == expected
        assert len(json.loads(expected[0])) == 60
        await killed_in_the_middle(cluster, http, long, expected)
    await wait_until_workers_idle(cluster.workers, cluster.secret)


async def killed_in_the_middle(
    cluster: ProcessCluster, http: httpx.AsyncClient, asked: dict[str, Any], expected: list[str]
) -> None:
    """A decode worker is killed while four streams with the schema run on two."""
    victim, num_streams, began = cluster.pid("decode-0"), 4, set[int]()

    async def stream(number: int) -> str:
        text = ""
        async with http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["delta"].get("content") or ""
                if len(text) > 30 and number not in began:
                    began.add(number)
                    if len(began) == num_streams:
                        os.kill(victim, signal.SIGKILL)
        return text

    answers = await asyncio.gather(*(stream(number) for number in range(num_streams)))
    assert answers == expected * num_streams
    assert await asyncio.to_thread(replaced, cluster, "decode-0", victim, LONG_WAIT_S)
