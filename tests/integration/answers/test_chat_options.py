"""Fields of requests that a real cluster answers: reasoning, turns that go on, the best of several, shorter prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from tests.support.workers import wait_until_workers_idle

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
CONFIG = {
    "model": {"name": MODEL},
    "gateway": {"port": 0, "http_port": 0, "reasoning_parser": "think"},
    "placement": {"local_prefill": "never"},
    "transfer": {"transport": "shm"},
    "pools": {name: {"kv_cache_bytes": 128 << 20} for name in ("prefill", "decode")},
}
QUESTION = {"role": "user", "content": "Name a colour."}
THOUGHT = "<think>\nThe user wants"
BEGUN = [QUESTION, {"role": "assistant", "content": THOUGHT}]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with ProcessCluster(parse_config(CONFIG)) as running:
        yield running
        asyncio.run(wait_until_workers_idle(running.workers, running.secret))
    assert running.killed == []


def post(cluster: ProcessCluster, path: str, **body: Any) -> Any:
    url = f"http://{cluster.http_address}{path}"
    answer = httpx.post(url, json={"model": MODEL, **body}, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json() if not body.get("stream") else answer.text


def test_a_turn_that_goes_on_inside_its_reasoning(cluster: ProcessCluster) -> None:
    """The answer is that to the same ids; all of it is reasoning, as the model does not write the close tag."""
    ids = post(cluster, "/tokenize", messages=BEGUN, continue_final_message=True)["tokens"]
    assert post(cluster, "/detokenize", tokens=ids)["prompt"].endswith(THOUGHT)
    plain = post(cluster, "/v1/completions", prompt=ids, max_tokens=24, temperature=0)["choices"][0]
    assert "</think>" not in plain["text"]
    body = {"messages": BEGUN, "continue_final_message": True, "max_tokens": 24, "temperature": 0}
    whole = post(cluster, "/v1/chat/completions", **body)
    message = whole["choices"][0]["message"]
    assert message["content"] is None
    assert message["reasoning_content"] == plain["text"].lstrip()
    assert whole["usage"]["prompt_tokens"] == len(ids)
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == whole["usage"]["completion_tokens"]

    streamed = post(cluster, "/v1/chat/completions", **body, stream=True)
    *events, done = [line.removeprefix("data: ") for line in streamed.splitlines() if line]
    assert done == "[DONE]"
    deltas = [msgspec.json.decode(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""


def test_the_reasoning_ends_where_the_answer_has_the_close_tag(cluster: ProcessCluster) -> None:
    """A bias makes the model write it: its tokens are likelier than all others, one after the other."""
    end = post(cluster, "/tokenize", prompt="</think>", add_special_tokens=False)["tokens"]
    body = {"messages": BEGUN, "continue_final_message": True, "temperature": 0, "max_tokens": 1}
    told = post(cluster, "/v1/chat/completions", **body, logit_bias={str(end[0]): 100})
    assert told["choices"][0]["message"]["reasoning_content"] == post(cluster, "/detokenize", tokens=end[:1])["prompt"]
    closed = [QUESTION, {"role": "assistant", "content": f"{THOUGHT} one.\n</think>\n\n"}]
    message = post(cluster, "/v1/chat/completions", **{**body, "messages": closed, "max_tokens": 8})["choices"][0][
        "message"
    ]
    assert "reasoning_content" not in message
    assert message["content"]


def test_grpc_separates_the_same_reasoning(cluster: ProcessCluster) -> None:
    with Client(cluster.address) as client:
        answer = client.generate([QUESTION], max_tokens=8, temperature=0.0, split_reasoning=True)
        plain = client.generate([QUESTION], max_tokens=8, temperature=0.0)
        assert (answer.text, answer.reasoning, answer.usage.reasoning_tokens) == (plain.text, "", 0)
        short = client.generate("One two three four five six seven", max_tokens=2, truncate_prompt_tokens=3)
        assert short.usage.prompt_tokens == 3


def test_the_best_of_several_is_the_likeliest_of_them(cluster: ProcessCluster) -> None:
    body = {"prompt": "The sky is", "max_tokens": 6, "seed": 5, "temperature": 1.5, "ignore_eos": True}
    made = post(cluster, "/v1/completions", **body, n=4, logprobs=0)["choices"]
    means = {one["text"]: math.fsum(one["logprobs"]["token_logprobs"]) / 6 for one in made}
    best = sorted(made, key=lambda one: -means[one["text"]])[:2]
    shown = post(cluster, "/v1/completions", **body, n=2, best_of=4)
    assert [one["text"] for one in shown["choices"]] == [one["text"] for one in best]
    assert shown["usage"]["completion_tokens"] == 24


def test_a_shorter_prompt_is_answered_as_its_last_tokens_are(cluster: ProcessCluster) -> None:
    ids = post(cluster, "/tokenize", prompt="One two three four five six seven eight nine ten")["tokens"]
    body = {"max_tokens": 8, "temperature": 0, "service_tier": "flex"}
    short = post(cluster, "/v1/completions", prompt=ids, truncate_prompt_tokens=6, **body)
    assert short["usage"]["prompt_tokens"] == 6
    assert short["service_tier"] == "flex"
    assert short["choices"] == post(cluster, "/v1/completions", prompt=ids[-6:], **body)["choices"]
