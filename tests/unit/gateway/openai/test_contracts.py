"""What real clients send and how they read the answer: the traps that they set, each with the client's own payload.

The payloads are those of the `openai` package, aiperf, guidellm, inference-perf, `vllm bench serve` and SGLang's
bench_serving; the readers here do what these programs do with an answer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from disagg.gateway.text.tokenizer import ServedModel
from disagg.router.api import Completion
from tests.support.gateway import MODEL_NAME
from tests.support.http_app import TestApp, events_of

TEXTS = ["hello", " ", "the"]
USER = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture
def app(model: ServedModel) -> TestApp:
    """Answers `TEXTS`, one token each, as often as is asked."""
    app = TestApp(model)
    tokens = [model.tokenizer.encode_text(text, special=False) for text in TEXTS]
    assert {len(ids) for ids in tokens} == {1}

    def script(routed: Any) -> list[Any]:
        count = min(len(tokens), routed.sampling.max_tokens)
        return [*tokens[:count], Completion("length", count, 0)]

    app.router.script = script
    return app


VLLM_CHAT = {
    "model": MODEL_NAME,
    "messages": PARTS,
    "max_completion_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0.0,
}
VLLM_TEXT = {
    "model": MODEL_NAME,
    "prompt": "hi",
    "repetition_penalty": 1.0,
    "max_tokens": 3,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
SGLANG_CHAT = {
    "model": MODEL_NAME,
    "messages": USER,
    "max_completion_tokens": 3,
    "stream": True,
    "temperature": 0.0,
    "ignore_eos": True,
    "lora_path": None,
}
SGLANG_TEXT = {
    "model": MODEL_NAME,
    "prompt": "hi",
    "best_of": 1,
    "max_tokens": 3,
    "stream": True,
    "temperature": 0.0,
    "ignore_eos": True,
}
GUIDELLM_CHAT = {
    "model": MODEL_NAME,
    "messages": PARTS,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 3,
    "max_tokens": 3,
    "stop": None,
    "ignore_eos": True,
}
GUIDELLM_TEXT = {
    "model": MODEL_NAME,
    "prompt": "hi",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_tokens": 3,
    "stop": None,
    "ignore_eos": True,
}
AIPERF_CHAT = {
    "messages": USER,
    "model": MODEL_NAME,
    "stream": True,
    "max_completion_tokens": 3,
    "stream_options": {"include_usage": True},
    "min_tokens": 3,
    "ignore_eos": True,
}
AIPERF_TEXT = {"prompt": ["hi"], "model": MODEL_NAME, "stream": False, "max_tokens": 3}
INFERENCE_PERF_TEXT = {
    "model": MODEL_NAME,
    "prompt": "hi",
    "max_tokens": 3,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENAI_CHAT = {
    "messages": USER,
    "model": MODEL_NAME,
    "max_completion_tokens": 3,
    "n": 2,
    "stream": True,
    "store": False,
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "reasoning_effort": "low",
    "user": "someone",
}


async def send(app: TestApp, payload: dict[str, Any]) -> list[Any]:
    path = "/v1/chat/completions" if "messages" in payload else "/v1/completions"
    response = await app.client.post(path, json=payload)
    assert response.status_code == 200, response.text
    return events_of(response)


@pytest.mark.parametrize("payload", [VLLM_CHAT, VLLM_TEXT], ids=["chat", "text"])
async def test_vllm_bench_serve(app: TestApp, payload: dict[str, Any]) -> None:
    """It takes each chunk with choices for a token, and reads usage only from a chunk without."""
    num_chunks, text, usage = 0, "", None
    for event in await send(app, payload):
        if event == "[DONE]":
            break
        if choices := event.get("choices"):
            num_chunks += 1
            text += (choices[0]["delta"].get("content") if payload is VLLM_CHAT else choices[0].get("text")) or ""
        elif found := event.get("usage"):
            usage = found
    assert (num_chunks, text) == (3, "hello the")
    assert usage is not None
    assert usage["completion_tokens"] == 3
    assert usage["prompt_tokens"] == app.router.submitted[0][0].num_prompt_tokens


async def test_sglang_bench_serving_text(app: TestApp) -> None:
    """It reads `choices[0]["text"]` of every event: there must be no usage-only chunk unless it is asked for."""
    texts: list[str] = []
    for event in await send(app, SGLANG_TEXT):
        if event != "[DONE]":
            texts.append(event["choices"][0]["text"])
            assert (event.get("usage") or {}).get("completion_tokens", 3) == 3
    assert texts == TEXTS


async def test_sglang_bench_serving_chat(app: TestApp) -> None:
    contents = []
    for event in await send(app, SGLANG_CHAT):
        if event != "[DONE]":
            delta = event["choices"][0].get("delta") or {}
            contents.append((delta.get("reasoning_content") or "") + (delta.get("content") or ""))
    assert contents == TEXTS
    whole = await app.client.post("/v1/chat/completions", json={**SGLANG_CHAT, "stream": False})
    assert whole.json()["choices"][0]["message"]["content"] == "".join(contents)
    assert whole.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("payload", [GUIDELLM_CHAT, GUIDELLM_TEXT], ids=["chat", "text"])
async def test_guidellm(app: TestApp, payload: dict[str, Any]) -> None:
    """It counts by the usage of each chunk, and splits lines of text."""
    counts = [event["usage"]["completion_tokens"] for event in await send(app, payload) if event != "[DONE]"]
    assert counts == [1, 2, 3, 3]


async def test_aiperf(app: TestApp) -> None:
    """Its chat asks for usage in every stream; its completions send a list of prompts."""
    events = await send(app, AIPERF_CHAT)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    whole = await app.client.post("/v1/completions", json=AIPERF_TEXT)
    assert whole.json()["object"] == "text_completion"
    assert len(whole.json()["choices"]) == 1


async def test_inference_perf(app: TestApp) -> None:
    events = await send(app, INFERENCE_PERF_TEXT)
    assert {event["object"] for event in events[:-1]} == {"text_completion"}
    assert events[-2]["usage"]["total_tokens"] == events[-2]["usage"]["prompt_tokens"] + 3


async def test_the_openai_package(app: TestApp) -> None:
    """It builds each chunk from its fields, and ends at `[DONE]`."""
    events = await send(app, OPENAI_CHAT)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        assert event.keys() == {"id", "object", "created", "model", "service_tier", "choices"}
        assert event["object"] == "chat.completion.chunk"
        assert event["id"] == events[0]["id"]
        assert event["choices"][0].keys() == {"index", "delta", "logprobs", "finish_reason"}
    roles = [(e["choices"][0]["index"], e["choices"][0]["delta"].get("role")) for e in events[:-1]]
    assert [index for index, role in roles if role == "assistant"] == [0, 1]
    reasons = [(e["choices"][0]["index"], e["choices"][0]["finish_reason"]) for e in events[:-1]]
    assert sorted(pair for pair in reasons if pair[1]) == [(0, "length"), (1, "length")]


async def test_the_role_comes_with_the_first_token(app: TestApp) -> None:
    """A chunk with the role alone would be taken for the first token."""
    first = (await send(app, SGLANG_CHAT))[0]["choices"][0]["delta"]
    assert first == {"role": "assistant", "content": "hello"}


async def test_no_usage_unless_it_is_asked_for(app: TestApp) -> None:
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = await send(app, {**SGLANG_CHAT, **options})
        assert all(event["choices"] and "usage" not in event for event in events[:-1])


async def test_models_have_a_root(app: TestApp) -> None:
    """`vllm bench serve` and aiperf take the model from here."""
    entry = (await app.client.get("/v1/models")).json()["data"][0]
    assert entry["id"] == entry["root"] == MODEL_NAME


async def test_dashboards_probe_metrics_by_head(app: TestApp) -> None:
    response = await app.client.head("/metrics")
    assert response.status_code == 200
    assert int(response.headers["content-length"]) == len((await app.client.get("/metrics")).content)


async def test_every_line_of_a_stream_is_an_event_or_empty(app: TestApp) -> None:
    """Some readers split the text, not the bytes, and take U+2028 for the end of a line."""
    tokenizer = app.model.tokenizer
    app.router.script = lambda _: [tokenizer.encode_text("a\u2028b\u0085c\r\n", special=False)]
    response = await app.client.post("/v1/completions", json=SGLANG_TEXT)
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["text"] == "a\u2028b\u0085c\r\n"
