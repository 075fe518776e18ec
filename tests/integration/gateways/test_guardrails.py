"""Guardrails in a real gateway before real workers of the deterministic model: over both protocols, with a service in a
process of its own that is slow, broken and away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.fake_runner import fake_generate
from disagg.gateway.guardrails.config import GuardrailOptions, RuleOptions
from disagg.gateway.text.tokenizer import fake_model, load_model
from disagg.proto.errors import ContentFilterError, UnavailableError
from disagg.router.api import Completion
from tests.support.gateway import CONFIG, MODEL_NAME, FakeRouter, write_checkpoint
from tests.support.gateway_server import running
from tests.support.guard_service import guard_service
from tests.support.metrics import read_samples, value
from tests.support.waiting import LONG_WAIT_S, wait_until
from tests.support.workers import wait_until_workers_idle

MODEL = fake_model("fake", 512)
STOPPED, REPLACED, ASKED = "a", "hello there", "tell me"
LONG = 400
NUM_TOKENS = 12


def pieces_of(prompt: str, num_tokens: int = NUM_TOKENS) -> list[str]:
    """The text of each token of the answer, such as ` t11483`."""
    ids = fake_generate(MODEL.tokenizer.encode_text(prompt), num_tokens)
    return [MODEL.tokenizer.decode([token_id]) for token_id in ids]


STOP_AT, REPLACE_AT, ASK_AT = 5, 4, 6
"""The tokens of the answers that guardrails look for."""
ASKED_WORD = pieces_of(ASKED)[ASK_AT].strip()
PIECE_CHARS, CONTEXT_CHARS = 16, 8


def config(port: int) -> dict[str, Any]:
    found = {name: pieces_of(prompt)[at].strip() for name, prompt, at in PLACES}
    rules = [
        {"name": "end", "pattern": rf"\b{found['stop']}\b", "applies_to": "answers", "reason": "the end"},
        {"name": "swap", "pattern": found["replace"], "applies_to": "answers", "action": "replace", "replacement": "#"},
        {"name": "bombs", "pattern": "bomb", "ignore_case": True, "applies_to": "prompts", "reason": "no bombs"},
        {"name": "numbers", "pattern": "[0-9]{6}", "applies_to": "prompts", "action": "replace", "replacement": "n"},
    ]

    def service(name: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "service": {"url": f"http://127.0.0.1:{port}/{name}"}, "timeout_s": 0.5, **more}

    return {
        "model": {"path": "fake", "max_model_len": 512},
        "transfer": {"transport": "shm"},
        "gateway": {
            "port": 0,
            "guardrails": [
                {"name": "rules", "rules": rules},
                service("closed", applies_to="prompts"),
                service("open", applies_to="prompts", on_failure="allow"),
                service("pieces", applies_to="answers", piece_chars=PIECE_CHARS, context_chars=CONTEXT_CHARS),
            ],
        },
        "pools": {name: {"num_blocks": 256, "max_num_seqs": 8} for name in ("prefill", "decode")},
    }


PLACES = (("stop", STOPPED, STOP_AT), ("replace", REPLACED, REPLACE_AT))


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    with guard_service(ASKED_WORD) as port, ProcessCluster(parse_config(config(port))) as running:
        yield running
        asyncio.run(wait_until_workers_idle(running.workers, running.secret))
    assert running.killed == []


@pytest.fixture
def http(cluster: ProcessCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{cluster.http_address}", timeout=60, trust_env=False) as client:
        yield client


def complete(http: httpx.Client, prompt: Any, **more: Any) -> httpx.Response:
    body = {"model": "fake", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **more}
    return http.post("/v1/completions", json=body)


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream; with an error at its end, that too."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_an_answer_that_is_stopped_ends_everywhere(cluster: ProcessCluster, http: httpx.Client) -> None:
    text = "".join(pieces_of(STOPPED)[:STOP_AT]) + " "
    whole = complete(http, STOPPED, max_tokens=LONG)
    (choice,) = whole.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "content_filter")
    # One token more than the match: the word's end has to be seen.
    assert whole.json()["usage"]["completion_tokens"] == STOP_AT + 2
    streamed = events_of(complete(http, STOPPED, max_tokens=LONG, stream=True))
    choices = [choice for event in streamed for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["content_filter"]
    asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))

    with Client(cluster.address) as client:
        answer = client.generate(STOPPED, max_tokens=LONG, temperature=0.0)
        assert (answer.text, answer.reason) == (text, "content_filter")
        ids = fake_generate(MODEL.tokenizer.encode_text(STOPPED), NUM_TOKENS)
        assert list(answer.token_ids) == ids[:STOP_AT]
        found = client.explain(answer.request_id)
        assert found.outcome == "content_filter"
        (made,) = found.guardrails
        assert (made.guardrail, made.rule, made.subject, made.action, made.reason, made.count) == (
            *("rules", "end", "answer", "stop", "the end"),
            1,
        )
    asyncio.run(wait_until_workers_idle(cluster.workers, cluster.secret))


def test_a_replaced_text_takes_its_tokens_with_it(cluster: ProcessCluster, http: httpx.Client) -> None:
    pieces = pieces_of(REPLACED)
    shown = [*pieces[:REPLACE_AT], " #", *pieces[REPLACE_AT + 1 :]]
    (choice,) = complete(http, REPLACED, logprobs=0).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("".join(shown), "length")
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert tokens == [piece for piece in shown if piece != " #"]
    assert [choice["text"][at : at + len(token)] for token, at in zip(tokens, offsets, strict=True)] == tokens
    streamed = events_of(complete(http, REPLACED, logprobs=0, stream=True))
    choices = [choice for event in streamed for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "".join(shown)
    its_offsets = [at for one in choices if one["logprobs"] for at in one["logprobs"]["text_offset"]]
    assert its_offsets == offsets
    with Client(cluster.address) as client:
        deltas = list(client.stream(REPLACED, max_tokens=NUM_TOKENS, temperature=0.0))
    assert "".join(delta.text for delta in deltas) == "".join(shown)
    ids = fake_generate(MODEL.tokenizer.encode_text(REPLACED), NUM_TOKENS)
    assert [token for delta in deltas for token in delta.token_ids] == ids[:REPLACE_AT] + ids[REPLACE_AT + 1 :]


def test_a_stream_that_is_continued_has_the_same_text(http: httpx.Client) -> None:
    """After any of its events, by its id."""
    for prompt, num_tokens in ((STOPPED, LONG), (REPLACED, NUM_TOKENS)):
        body = {"model": "fake", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
        whole = http.post("/v1/completions", json=body, headers={"last-event-id": "0"})
        ids = [line.removeprefix("id: ") for line in whole.text.splitlines() if line.startswith("id: ")]
        texts = [event["choices"][0]["text"] for event in events_of(whole)]
        reason = events_of(whole)[-1]["choices"][0]["finish_reason"]
        assert len(ids) >= 3
        for i, event_id in enumerate(ids[:-1]):
            rest = events_of(http.post("/v1/completions", json=body, headers={"last-event-id": event_id}))
            assert "".join(event["choices"][0]["text"] for event in rest) == "".join(texts[i + 1 :])
            assert rest[-1]["choices"][0]["finish_reason"] == reason


def test_prompts_are_refused_or_replaced_over_both_protocols(cluster: ProcessCluster, http: httpx.Client) -> None:
    refused = complete(http, "How do I build a BOMB?")
    assert (refused.status_code, refused.json()["error"]) == (
        400,
        {
            "message": "prompt: the guardrail rules refuses it: no bombs",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "content_filter",
        },
    )
    several = complete(http, ["fine", "a bomb"], stream=True)
    assert (several.status_code, several.json()["error"]["param"]) == (400, "prompt[1]")
    ids = MODEL.tokenizer.encode_text("a bomb")
    assert complete(http, ids).json()["error"]["code"] == "content_filter"
    turns = [{"role": "user", "content": "a bomb"}]
    chat = http.post("/v1/chat/completions", json={"model": "fake", "messages": turns})
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "messages[0].content")
    message = http.post("/v1/messages", json={"model": "fake", "max_tokens": 9, "messages": turns})
    assert (message.status_code, message.json()["error"]["type"]) == (400, "invalid_request_error")
    assert message.json()["error"]["message"] == "messages: the guardrail rules refuses it: no bombs"
    response = http.post("/v1/responses", json={"model": "fake", "input": "a bomb", "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "content_filter")
    request_id = chat.headers["x-request-id"]
    with Client(cluster.address) as client:
        with pytest.raises(ContentFilterError, match="the guardrail rules refuses it: no bombs"):
            client.generate("a bomb")
        found = client.explain(request_id)
        assert (found.outcome, [(one.rule, one.action) for one in found.guardrails]) == (
            "content_filter",
            [("bombs", "stop")],
        )
        assert request_id in {one.request_id for one in client.requests()}
        same = client.generate("call n", max_tokens=NUM_TOKENS, temperature=0.0)
        answer = client.generate("call 123456", max_tokens=NUM_TOKENS, temperature=0.0)
        assert (answer.text, answer.usage.prompt_tokens) == (same.text, len("call n"))


def test_a_service_decides_about_prompts_and_pieces_of_answers(http: httpx.Client) -> None:
    refused = complete(http, "forbidden-closed").json()["error"]
    assert refused["message"] == "prompt: the guardrail closed refuses it: by the service"
    swapped, plain = complete(http, "an old-open thing"), complete(http, "an new thing")
    assert swapped.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]
    text = "".join(pieces_of(ASKED))
    ends = range(PIECE_CHARS, len(text) + PIECE_CHARS, PIECE_CHARS)
    passed = next(end for end in ends if ASKED_WORD in text[max(0, end - PIECE_CHARS - CONTEXT_CHARS) : end])
    (choice,) = complete(http, ASKED, max_tokens=LONG).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: passed - PIECE_CHARS], "content_filter")
    assert choice["text"]


def test_a_service_without_a_verdict(cluster: ProcessCluster, http: httpx.Client) -> None:
    for word in ("slow", "broken", "busy"):
        failed = complete(http, f"{word}-closed")
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "guardrail_unavailable")
        assert failed.json()["error"]["message"] == "the guardrail closed gives no verdict"
        failed = complete(http, f"{word}-open")  # `allow`, but there is no outage
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "guardrail_unavailable")
        with Client(cluster.address) as client:
            found = client.explain(failed.headers["x-request-id"])
        assert [(one.guardrail, one.action) for one in found.guardrails] == [("open", "failed")]
    with Client(cluster.address) as client, pytest.raises(UnavailableError) as caught:
        client.generate("slow-closed")
    assert caught.value.code == "guardrail_unavailable"


def test_metrics(cluster: ProcessCluster, http: httpx.Client) -> None:
    before = read_samples(http.get("/metrics").content)
    complete(http, "bomb")
    complete(http, REPLACED)
    found = read_samples(http.get("/metrics").content)

    def grew(**labels: str) -> float:
        name = "disagg_guardrail_decisions_total"
        return value(found, name, labels) - before[name].get(frozenset(labels.items()), 0)

    assert grew(guardrail="rules", subject="prompt", action="stop") == 1
    assert grew(guardrail="rules", subject="answer", action="replace") == 1
    assert grew(guardrail="closed", subject="prompt", action="allow") == 1
    assert value(found, "disagg_guardrail_suspended", guardrail="closed") == 0
    assert value(found, "disagg_guardrail_asked_seconds_total", guardrail="closed") > 0


def test_a_service_that_stays_away_is_not_asked_for_a_while(http: httpx.Client) -> None:
    """The last test here: it comes back only after some seconds."""
    assert complete(http, "fine-open").status_code == 200
    assert [complete(http, "busy-open").status_code for _ in range(5)] == [*[503] * 4, 200]

    def suspended() -> bool:
        return value(read_samples(http.get("/metrics").content), "disagg_guardrail_suspended", guardrail="open") == 1

    assert wait_until(suspended, LONG_WAIT_S)
    assert complete(http, "forbidden-open").status_code == 200


CALL = '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": FUNCTION}]}),
    "responses": ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
    "messages": (
        "/v1/messages",
        {**CHAT, "max_tokens": 90, "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "passes"),
    [(CALL % "\\u0073ecret", False), ("sec" + CALL % "c" + "ret", False), (CALL % "x</tool_call>y", True)],
)
async def test_what_leaves_is_what_was_looked_at(tmp_path: Path, text: str, passes: bool, stream: bool) -> None:
    """By a real gateway before a router that has the answer ready."""
    folder = write_checkpoint(tmp_path, config={**CONFIG, "max_position_embeddings": 600})
    ids = load_model(str(folder), MODEL_NAME).tokenizer.encode_text(text, special=False)
    router = FakeRouter([*([token_id] for token_id in ids), Completion("stop", len(ids), 0)])
    rules = GuardrailOptions(name="words", rules=(RuleOptions(pattern="secret"),))
    async with running(folder, router, http_port=0, guardrails=(rules,)) as server:
        base = f"http://{server.http_address}"
        async with httpx.AsyncClient(base_url=base, timeout=LONG_WAIT_S, trust_env=False) as client:
            for path, body in APIS.values():
                response = await client.post(path, json={"model": MODEL_NAME, "stream": stream, **body})
                assert response.status_code == 200, response.text
                assert "secret" not in response.text.encode().decode("unicode_escape")
                ends = ("content_filter", "refusal") if not passes else ("tool_calls", "function_call", "tool_use")
                assert any(f'"{end}"' in response.text for end in ends)
                assert ("x</tool_call>y" in response.text) == passes
