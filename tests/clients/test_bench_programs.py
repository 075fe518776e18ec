"""What `vllm bench serve` and SGLang's bench_serving send, and how they read the answer; neither installs without a
GPU's worth of packages, so their payloads are sent from here.

Both read line by line, take `data:` off, parse JSON, and look into `choices[0]` of every chunk: one without choices
would end SGLang's run unless it was asked for. Token counts come from `usage`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.clients.serving import Served

NUM_AT_ONCE = 8
OUTPUT_TOKENS = 16
PROMPT = "The quick brown fox jumps over the lazy dog. " * 5

VLLM_COMPLETION: dict[str, Any] = {
    "prompt": PROMPT,
    "repetition_penalty": 1.0,
    "max_tokens": OUTPUT_TOKENS,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
VLLM_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
    "max_completion_tokens": OUTPUT_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
SGLANG_COMPLETION: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0.0,
    "best_of": 1,
    "max_tokens": OUTPUT_TOKENS,
    "stream": True,
    "ignore_eos": True,
}
SGLANG_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0.0,
    "max_tokens": OUTPUT_TOKENS,
    "stream": True,
    "ignore_eos": True,
}


@dataclass
class Read:
    """What a benchmark would have noted."""

    text: str = ""
    num_chunks: int = 0
    usage_tokens: int | None = None
    done: bool = False
    finish_reasons: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("route", "payload"),
    [("completions", VLLM_COMPLETION), ("chat/completions", VLLM_CHAT)],
    ids=["completions", "chat"],
)
async def test_vllm_bench_serve(served: Served, route: str, payload: dict[str, Any]) -> None:
    for read in await many(served, route, payload):
        assert (read.done, read.usage_tokens, read.finish_reasons) == (True, OUTPUT_TOKENS, ["length"])
        assert read.num_chunks >= 2, "no inter-token latency without a second chunk"
        assert read.text


@pytest.mark.parametrize(
    ("route", "payload"),
    [("completions", SGLANG_COMPLETION), ("chat/completions", SGLANG_CHAT)],
    ids=["completions", "chat"],
)
async def test_sglang_bench_serving(served: Served, route: str, payload: dict[str, Any]) -> None:
    for read in await many(served, route, payload):
        assert (read.done, read.usage_tokens, read.finish_reasons) == (True, None, ["length"])
        assert read.num_chunks >= 2
        assert read.text


async def many(served: Served, route: str, payload: dict[str, Any]) -> list[Read]:
    """The same request several times at once."""
    async with httpx.AsyncClient(base_url=f"{served.url}/v1/", trust_env=False, timeout=120.0) as client:
        body = {"model": served.model, **payload}
        return list(await asyncio.gather(*(read_stream(client, route, body) for _ in range(NUM_AT_ONCE))))


async def read_stream(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> Read:
    """Line by line, as these programs do."""
    read = Read()
    async with client.stream("POST", route, json=body, headers={"x-request-id": "bench-0"}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.strip():
                continue
            chunk = line.removeprefix("data:").strip()
            if chunk == "[DONE]":
                read.done = True
                continue
            note(read, json.loads(chunk), "stream_options" in body)
    return read


def note(read: Read, chunk: dict[str, Any], asked_for_usage: bool) -> None:
    """One chunk. Fails for one without choices that nobody asked for."""
    if asked_for_usage and not chunk["choices"]:
        read.usage_tokens = chunk["usage"]["completion_tokens"]
        return
    choice = chunk["choices"][0]
    text = choice["text"] if "text" in choice else choice["delta"].get("content")
    if text:
        read.num_chunks += 1
        read.text += text
    if choice["finish_reason"]:
        read.finish_reasons.append(choice["finish_reason"])
