"""Calls of tools that must happen, by the default model through both pools, as clients of the HTTP APIs see them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.support.workers import wait_until_workers_idle

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
CONFIG = {
    "model": {"name": MODEL},
    "gateway": {"port": 0, "http_port": 0},
    "placement": {"local_prefill": "never"},
    "transfer": {"transport": "shm"},
    "pools": {name: {"kv_cache_bytes": 128 << 20} for name in ("prefill", "decode")},
}
UNITS = ["celsius", "fahrenheit"]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": UNITS},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
QUESTION = {"role": "user", "content": "What will the weather be like in Paris?"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(parse_config(CONFIG)) as running:
        yield running
        asyncio.run(wait_until_workers_idle(running.workers, running.secret))
    assert running.killed == []


def ask(cluster: ProcessCluster, choice: Any, **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [QUESTION], "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
    url = f"http://{cluster.http_address}/v1/chat/completions"
    return httpx.post(url, json={**body, "temperature": 0, **more}, timeout=120, trust_env=False)


def check(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    arguments = msgspec.json.decode(call["function"]["arguments"])
    if call["function"]["name"] == "now":
        assert arguments == {}
        return
    assert call["function"]["name"] == "weather"
    assert set(arguments) == {"city", "days", "unit"}
    assert isinstance(arguments["city"], str)
    assert len(arguments["city"]) <= 24
    assert arguments["days"] in range(1, 10)
    assert arguments["unit"] in UNITS


def streamed(text: str) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The calls, the texts and the reasons of a stream."""
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    texts = [choice["delta"]["content"] for choice in choices if choice["delta"].get("content")]
    return calls, texts, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_an_answer_is_a_call_whole_and_streamed_and_its_result_is_the_next_turn(
    cluster: ProcessCluster, choice: Any
) -> None:
    whole = ask(cluster, choice, parallel_tool_calls=False)
    assert whole.status_code == 200, whole.text
    [answer] = whole.json()["choices"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    [call] = answer["message"]["tool_calls"]
    check(call)
    if choice is NAMED:
        assert call["function"]["name"] == "weather"

    calls, texts, reasons = streamed(ask(cluster, choice, parallel_tool_calls=False, stream=True).text)
    assert (texts, reasons) == ([], ["tool_calls"])
    assert [(one["index"], one["function"]) for one in calls] == [(0, call["function"])]

    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny, 21 degrees."}
    answered = ask(cluster, "none", messages=[QUESTION, answer["message"], result], max_tokens=16)
    assert answered.status_code == 200, answered.text
    [last] = answered.json()["choices"]
    assert last["message"]["content"]
    assert "tool_calls" not in last["message"]


def test_a_schema_that_no_grammar_can_be_made_of_is_refused_by_name(cluster: ProcessCluster) -> None:
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "not": {"type": "string"}}}
    refused = ask(cluster, "required", tools=[{"type": "function", "function": function}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].function.parameters")


def post(cluster: ProcessCluster, path: str, **body: Any) -> httpx.Response:
    shared = {"model": MODEL, "temperature": 0}
    url = f"http://{cluster.http_address}/v1/{path}"
    response = httpx.post(url, json={**shared, **body}, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return response


def typed(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events."""
    lines = (line for line in response.text.splitlines() if line.startswith("data: "))
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


def test_all_apis_answer_alike(cluster: ProcessCluster) -> None:
    """The same prompt, greedy: one text and one count of tokens, whole and streamed."""
    text = str(QUESTION["content"])
    chat = post(cluster, "chat/completions", messages=[QUESTION], max_tokens=12).json()
    response = {"input": text, "max_output_tokens": 12}
    message = {"messages": [QUESTION], "max_tokens": 12}
    whole, events = post(cluster, "responses", **response), typed(post(cluster, "responses", **response, stream=True))
    expected, counts = chat["choices"][0]["message"]["content"], chat["usage"]
    assert whole.json()["output"][0]["content"][0]["text"] == expected
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == expected
    for usage in (whole.json()["usage"], events[-1]["response"]["usage"]):
        assert (usage["input_tokens"], usage["output_tokens"]) == (counts["prompt_tokens"], counts["completion_tokens"])

    answer = post(cluster, "messages", **message).json()
    events = typed(post(cluster, "messages", **message, stream=True))
    assert answer["content"] == [{"type": "text", "text": expected}]
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == expected
    for usage in (answer["usage"], events[-2]["usage"]):
        assert usage["output_tokens"] == counts["completion_tokens"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counts["prompt_tokens"]
    counted = post(cluster, "messages/count_tokens", messages=[QUESTION]).json()
    assert counted == {"input_tokens": counts["prompt_tokens"]}


def test_all_apis_call_alike(cluster: ProcessCluster) -> None:
    chat = ask(cluster, NAMED).json()["choices"][0]["message"]["tool_calls"][0]["function"]
    named = {"type": "function", "name": "weather"}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    response = {"input": QUESTION["content"], "tools": flat, "tool_choice": named, "max_output_tokens": 200}
    [call] = post(cluster, "responses", **response).json()["output"]
    done = typed(post(cluster, "responses", **response, stream=True))[-1]["response"]["output"][0]
    assert [(one["name"], one["arguments"]) for one in (call, done)] == [("weather", chat["arguments"])] * 2

    own = [
        {"name": "weather", "input_schema": PARAMETERS, "strict": True},
        {"name": "now", "input_schema": {"type": "object", "properties": {}}},
    ]
    message = {"messages": [QUESTION], "tools": own, "max_tokens": 200}
    used = post(cluster, "messages", **message, tool_choice={"type": "tool", "name": "weather"}).json()
    events = typed(post(cluster, "messages", **message, tool_choice={"type": "tool", "name": "weather"}, stream=True))
    [block] = used["content"]
    assert (used["stop_reason"], block["name"]) == ("tool_use", "weather")
    check({"type": "function", "function": {**block, "arguments": msgspec.json.encode(block["input"])}})
    [delta] = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert msgspec.json.decode(delta["partial_json"]) == block["input"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "Sunny, 21 degrees."}
    turns = [QUESTION, {"role": "assistant", "content": used["content"]}, {"role": "user", "content": [result]}]
    last = post(cluster, "messages", **{**message, "messages": turns, "max_tokens": 16}, tool_choice={"type": "none"})
    assert last.json()["content"][0]["text"]
