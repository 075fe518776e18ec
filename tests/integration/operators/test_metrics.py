"""`/metrics` of a whole cluster agrees with what its clients counted: exactly, under both protocols."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from disagg.client import AsyncClient, Options, Targets
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.proto.errors import InvalidRequestError
from tests.support.metrics import Samples, scrape, value

CONFIG = {
    "model": {"path": "fake"},
    "transfer": {"transport": "shm"},
    "gateway": {"port": 0, "http_port": 0},
    "placement": {"local_prefill": "never", "admission": False},
    "logging": {"format": "json", "level": "debug"},
    "pools": {
        "prefill": {"size": 2, "token_budget": 64, "num_blocks": 256},
        "decode": {"size": 1, "num_blocks": 256},
    },
}
PROMPT_TOKENS = 64
CUT_PROMPT_TOKENS = 20
"""Of the request whose client leaves."""
BYTES_PER_TOKEN = 8
"""Of the fake model's KV."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(parse_config(CONFIG), log_dir=tmp_path) as running:
        yield running
    assert running.killed == []


def total(samples: Samples, name: str) -> float:
    return sum(samples.get(name, {}).values())


async def test_metrics_agree_with_what_the_clients_counted(cluster: ProcessCluster, tmp_path: Path) -> None:
    dice = random.Random(7)
    prompts = [[dice.randrange(250) for _ in range(PROMPT_TOKENS)] for _ in range(24)]
    lengths = [dice.randrange(2, 40) for _ in prompts]
    async with AsyncClient(cluster.address) as client:
        address = (await client.cluster_state()).http_address
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=30.0) as http:
            await run_grpc(client, prompts[:16], lengths[:16])
            await run_http(http, prompts[16:], lengths[16:])
            await fail_some(client)
            found = await scrape(http, lambda samples: is_all_there(samples, len(prompts) + 1))
            check_requests(found, len(prompts))
            check_workers(found, len(prompts), lengths)
            check_aliases(found, len(prompts), lengths)
    check_logs(tmp_path / "gateway.log", len(prompts) + 1)


def check_logs(path: Path, num_requests: int) -> None:
    """One JSON object a line (but for what libraries in C write), and one line a request."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    ended = [line for line in lines if line["logger"] == "disagg.router.telemetry.telemetry"]
    assert len({line["request_id"] for line in ended}) == len(ended) == num_requests
    assert {line["level"] for line in ended} == {"debug"}


def is_all_there(found: Samples, num_requests: int) -> bool:
    """Whether every request has ended everywhere, by the reports of the workers."""
    names = ("disagg_requests_total", "disagg_kv_transfers_total")
    return all(total(found, name) == num_requests for name in names) and total(found, "disagg_requests_in_flight") == 0


def plain(num_tokens: int) -> Options:
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": num_tokens}


async def run_grpc(client: AsyncClient, prompts: list[list[int]], lengths: list[int]) -> None:
    """Half of them with a target that is met, half with one that cannot be."""
    jobs = [
        client.generate(prompt, targets=Targets(ttft_ms=60_000 if i % 2 else 1e-3), **plain(length))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    answers = await asyncio.gather(*jobs)
    assert [answer.usage.completion_tokens for answer in answers] == lengths


async def run_http(http: httpx.AsyncClient, prompts: list[list[int]], lengths: list[int]) -> None:
    """Without targets."""
    bodies = [
        {"model": "fake", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == lengths


async def fail_some(client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError):
        await client.generate([1], max_tokens=0)
    num_tokens = 0
    async with contextlib.aclosing(client.stream([1] * CUT_PROMPT_TOKENS, **plain(4000))) as stream:
        async for delta in stream:
            num_tokens += len(delta.token_ids)
            if num_tokens > 50:  # So that its KV was handed over.
                break


def check_requests(found: Samples, num_answered: int) -> None:
    assert value(found, "disagg_requests_total", outcome="length") == num_answered
    assert value(found, "disagg_requests_total", outcome="cancelled") == 1
    assert value(found, "disagg_calls_total", protocol="grpc", outcome="ok") == 16
    assert value(found, "disagg_calls_total", protocol="http", outcome="ok") == 8
    assert value(found, "disagg_calls_total", protocol="grpc", outcome="invalid_value") == 1
    assert value(found, "disagg_calls_total", protocol="grpc", outcome="cancelled") == 1
    assert value(found, "disagg_prompt_tokens_total") == num_answered * PROMPT_TOKENS
    assert value(found, "disagg_request_duration_seconds_count") == num_answered
    for slo in ("ttft", "both"):
        assert value(found, "disagg_slo_requests_total", slo=slo, met="true") == 8
        assert value(found, "disagg_slo_requests_total", slo=slo, met="false") == 8
    assert value(found, "disagg_slo_requests_total", slo="tpot", met="true") == 0
    for stage in ("tokenize", "route", "prefill_queue", "kv_alloc_wait", "kv_transfer", "decode_queue"):
        assert value(found, "disagg_request_stage_seconds_count", stage=stage) >= num_answered, stage


def check_workers(found: Samples, num_answered: int, lengths: list[int]) -> None:
    num_tokens = num_answered * PROMPT_TOKENS + CUT_PROMPT_TOKENS
    assert total(found, "disagg_kv_transfer_bytes_total") == num_tokens * BYTES_PER_TOKEN
    assert total(found, "disagg_kv_transfers_total") == num_answered + 1
    assert total(found, "disagg_kv_transfer_failures_total") == 0
    computed = {dict(labels)["instance"]: count for labels, count in found["disagg_engine_prompt_tokens_total"].items()}
    assert computed["decode-0"] == 0
    assert sum(computed.values()) == num_tokens
    assert total(found, "disagg_engine_step_seconds_count") >= max(lengths)


def check_aliases(found: Samples, num_answered: int, lengths: list[int]) -> None:
    success = "vllm:request_success_total"
    assert value(found, success, model_name="fake", finished_reason="length") == num_answered
    assert value(found, "vllm:request_generation_tokens_sum", model_name="fake") == sum(lengths)
    assert value(found, "vllm:prompt_tokens_total", model_name="fake") == num_answered * PROMPT_TOKENS
    same = value(found, "disagg_output_tokens_total")
    assert value(found, "vllm:generation_tokens_total", model_name="fake") == same >= sum(lengths)
