"""Calls of tools that must happen, by the default model through both pools, as a client of the HTTP API sees them."""

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
