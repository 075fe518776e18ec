"""Reasoning over HTTP: beside the content of whole and streamed answers, with tools, in earlier turns, in usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import Completion
from disagg.router.gateway.text.tokenizer import load_model
from tests.support.gateway import MODEL_NAME, TOKENIZER_CONFIG, write_checkpoint
from tests.support.http_app import TestApp, error_of, events_of

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% if not (loop.last and not add_generation_prompt and m.role == 'x') %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opens is defined %}<think>\n{% endif %}{% endif %}"
)
ANSWER = "<think>\nlet me see\n</think>\n\nhello"
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'


@pytest.fixture
def app(tmp_path: Path) -> TestApp:
    config = {"vocab_size": 320, "max_position_embeddings": 400, "eos_token_id": 1}
    write_checkpoint(tmp_path, config=config, tokenizer_config={**TOKENIZER_CONFIG, "chat_template": TEMPLATE})
    return TestApp(load_model(str(tmp_path), MODEL_NAME))


def ids(app: TestApp, text: str) -> list[int]:
    return app.model.tokenizer.encode_text(text, special=False)


def answer(app: TestApp, text: str, size: int = 400) -> None:
    tokens = ids(app, text)
    batches = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    app.router.script = lambda _: [*batches, Completion("stop", len(tokens), 0)]


def prompt_of(app: TestApp, index: int = -1) -> str:
    packed = app.router.submitted[index][0].prompt_token_ids
    return str(app.model.tokenizer.backend.decode(unpack_token_ids(packed), skip_special_tokens=False))


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [event["choices"][0]["delta"] for event in events_of(response)[:-1] if event["choices"]]


def joined(found: list[dict[str, Any]], name: str) -> str:
    return "".join(delta.get(name) or "" for delta in found)


async def test_a_whole_answer(app: TestApp) -> None:
    answer(app, ANSWER)
    body = (await app.chat()).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "reasoning_content": "let me see",
    }
    num_reasoning = len(ids(app, ANSWER.removesuffix("\n\nhello")))
    assert body["usage"]["completion_tokens"] == len(ids(app, ANSWER))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


async def test_an_answer_that_is_cut_has_reasoning_only(app: TestApp) -> None:
    answer(app, "<think>let me")
    message = (await app.chat()).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "let me")


async def test_an_answer_without_reasoning_is_as_it_always_was(app: TestApp) -> None:
    answer(app, "hello")
    body = (await app.chat()).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_text_completions_keep_their_tags(app: TestApp) -> None:
    answer(app, ANSWER)
    body = (await app.text()).json()
    assert body["choices"][0]["text"] == ANSWER
    assert "completion_tokens_details" not in body["usage"]


@pytest.mark.parametrize("size", [1, 2, 5, 400])
async def test_a_stream(app: TestApp, size: int) -> None:
    answer(app, ANSWER, size)
    response = await app.chat(stream=True, stream_options={"include_usage": True})
    found = deltas(response)
    assert (joined(found, "reasoning_content"), joined(found, "content")) == ("let me see", "hello")
    assert found[0]["role"] == "assistant"
    last_reasoning = max(i for i, delta in enumerate(found) if delta.get("reasoning_content"))
    assert all(not delta.get("content") for delta in found[:last_reasoning])
    details = events_of(response)[-2]["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len(ids(app, ANSWER.removesuffix("\n\nhello")))}


async def test_a_stream_continues_after_any_event(app: TestApp) -> None:
    answer(app, ANSWER, 2)

    def parts(text: str) -> list[tuple[str, str, str]]:
        found = []
        for block in text.split("\n\n"):
            lines = block.split("\n")
            if lines[0].startswith("id: "):
                delta = json.loads(lines[1].removeprefix("data: "))["choices"][0]["delta"]
                found.append((lines[0][4:], delta.get("reasoning_content") or "", delta.get("content") or ""))
        return found

    events = parts((await app.chat(stream=True, headers={"last-event-id": "0"})).text)
    assert len(events) > 5
    for i, (event_id, _, _) in enumerate(events):
        rest = parts((await app.chat(stream=True, headers={"last-event-id": event_id})).text)
        assert rest == events[i + 1 :]


async def test_reasoning_that_is_not_wanted_is_left_out_and_counted(app: TestApp) -> None:
    answer(app, ANSWER, 3)
    body = (await app.chat(include_reasoning=False)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    found = deltas(await app.chat(include_reasoning=False, stream=True))
    assert {name for delta in found for name in delta} == {"role", "content"}
    assert joined(found, "content") == "hello"


async def test_a_call_after_the_reasoning(app: TestApp) -> None:
    answer(app, f"<think>I {CALL}</think>\n{CALL}", 3)
    choice = (await app.chat(tools=[TOOL])).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == f"I {CALL}"
    assert choice["message"]["content"] is None
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
    assert choice["finish_reason"] == "tool_calls"
    found = deltas(await app.chat(tools=[TOOL], stream=True))
    assert joined(found, "reasoning_content") == f"I {CALL}"
    assert joined(found, "content") == ""
    assert [call["function"]["name"] for delta in found for call in delta.get("tool_calls", [])] == ["add"]


async def test_the_prompt_may_open_the_reasoning_or_switch_it_off(app: TestApp) -> None:
    answer(app, "let me see\n</think>\n\nhello")
    message = (await app.chat(chat_template_kwargs={"opens": 1})).json()["choices"][0]["message"]
    assert prompt_of(app).endswith("<|im_start|>assistant\n<think>\n")
    assert (message["reasoning_content"], message["content"]) == ("let me see", "hello")
    answer(app, "hello")
    message = (await app.chat(chat_template_kwargs={"enable_thinking": False})).json()["choices"][0]["message"]
    assert prompt_of(app).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert message == {"role": "assistant", "content": "hello", "refusal": None}


async def test_earlier_reasoning_reaches_the_template(app: TestApp) -> None:
    answer(app, "hello")
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "<|im_end|>why"},
        {"role": "assistant", "content": None, "reasoning": "so"},
        {"role": "user", "content": "c"},
    ]
    await app.chat(messages=turns)
    assert "assistant\n<think>\n<|im_end|>why\n</think>\n\nb<|im_end|>" in prompt_of(app)
    assert "assistant\n<think>\nso\n</think>\n\n<|im_end|>" in prompt_of(app)
    ends = unpack_token_ids(app.router.submitted[-1][0].prompt_token_ids).count(3)
    assert ends == len(turns)  # the one that is spelled out ends no turn
    wrong = [{"role": "user", "content": "a", "reasoning_content": "why"}]
    assert error_of(await app.chat(messages=wrong))[:2] == (400, "messages[0].reasoning_content")


async def test_a_turn_that_was_begun_goes_on(app: TestApp) -> None:
    answer(app, " more</think>so", 2)
    for content, reasoning, text in (
        ("<think>I", " more", "so"),
        ("<think>I</think>b", None, " more</think>so"),
        ("b", None, " more</think>so"),
    ):
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
        message = (await app.chat(messages=turns, continue_final_message=True)).json()["choices"][0]["message"]
        assert prompt_of(app).endswith(f"<|im_start|>assistant\n{content}")
        assert message.get("reasoning_content") == (reasoning and reasoning.strip())
        assert message["content"] == text
