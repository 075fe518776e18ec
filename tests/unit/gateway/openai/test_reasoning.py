"""Reasoning over HTTP: beside the content of whole and streamed answers, with tools, in earlier turns, in usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from disagg.gateway.text.tokenizer import load_model
from disagg.proto.token_ids import unpack_token_ids
from disagg.router.api import Completion
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


# ---------------------------------------------------------------- /v1/responses


RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FUNCTION = {"type": "function", "name": "add"}


async def respond(app: TestApp, **body: Any) -> httpx.Response:
    response = await app.client.post(RESPONSES, json={"model": MODEL_NAME, "input": "hi", **body})
    assert response.status_code == 200, response.text
    return response


def thought(text: str, status: str = "completed") -> dict[str, Any]:
    content = [] if status == "in_progress" else [{"type": "reasoning_text", "text": text}]
    return {"id": "rs_r0_0", "type": "reasoning", "summary": [], "status": status, "content": content}


def said(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events, without their numbers."""
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in blocks]
    return [{name: value for name, value in event.items() if name != "sequence_number"} for event in events]


async def test_a_response_has_an_item_of_reasoning(app: TestApp) -> None:
    answer(app, ANSWER)
    body = (await respond(app)).json()
    reasoning, message = body["output"]
    assert reasoning == thought("let me see")
    assert (message["id"], message["content"][0]["text"]) == ("msg_r0_1", "hello")
    num_reasoning = len(ids(app, ANSWER.removesuffix("\n\nhello")))
    assert body["usage"]["output_tokens"] == len(ids(app, ANSWER))
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": num_reasoning}


@pytest.mark.parametrize("size", [1, 3, 400])
async def test_the_stream_of_a_response_has_its_reasoning_first(app: TestApp, size: int) -> None:
    answer(app, ANSWER, size)
    events = said(await respond(app, stream=True))
    at = {"item_id": "rs_r0_0", "output_index": 0, "content_index": 0}
    part = {"type": "reasoning_text", "text": "let me see"}
    assert events[2:4] == [
        {"type": "response.output_item.added", "output_index": 0, "item": thought("", "in_progress")},
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
    ]
    given = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event.pop("delta") for event in given) == "let me see"
    assert all(event == {"type": "response.reasoning_text.delta", **at} for event in given)
    done = 4 + len(given)
    assert events[done : done + 3] == [
        {"type": "response.reasoning_text.done", **at, "text": "let me see"},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": thought("let me see")},
    ]
    assert (events[done + 3]["output_index"], events[done + 3]["item"]["type"]) == (1, "message")
    answer(app, ANSWER, size)
    whole = (await respond(app)).json()
    assert events[-1]["type"] == "response.completed"
    assert [item["content"] for item in events[-1]["response"]["output"]] == [
        item["content"] for item in whole["output"]
    ]


async def test_a_response_that_is_cut_in_its_reasoning(app: TestApp) -> None:
    tokens = ids(app, "<think>let me")
    app.router.script = lambda _: [tokens, Completion("length", len(tokens), 0)]
    body = (await respond(app)).json()
    assert (body["status"], body["output"]) == ("incomplete", [thought("let me", "incomplete")])


async def test_a_response_without_reasoning_has_no_item(app: TestApp) -> None:
    answer(app, "hello")
    assert [item["type"] for item in (await respond(app)).json()["output"]] == ["message"]


async def test_a_call_of_a_response_after_its_reasoning(app: TestApp) -> None:
    answer(app, f"<think>I {CALL}</think>\n{CALL}", 3)
    reasoning, call = (await respond(app, tools=[FUNCTION])).json()["output"]
    assert reasoning == thought(f"I {CALL}")
    assert (call["id"], call["type"], call["arguments"]) == ("fc_r0_1", "function_call", '{"a":1}')


async def test_items_of_reasoning_reach_the_template(app: TestApp) -> None:
    """By the turn of the text or call that follows; what other servers encrypted is left out."""
    answer(app, "hello")
    content = [{"type": "reasoning_text", "text": "why"}]
    given = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, "status": "completed"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {
            "type": "reasoning",
            "id": "rs_2",
            "summary": [{"type": "summary_text", "text": "x"}],
            "encrypted_content": "e",
        },
        {"type": "message", "role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    await respond(app, input=given)
    assert prompt_of(app) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nwhy\n</think>\n\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


# ---------------------------------------------------------------- /v1/messages


async def ask(app: TestApp, **body: Any) -> httpx.Response:
    asked = {"model": MODEL_NAME, "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}], **body}
    response = await app.client.post(MESSAGES, json=asked)
    assert response.status_code == 200, response.text
    return response


THINKING = {"type": "thinking", "thinking": "let me see", "signature": ""}
HELLO = {"type": "text", "text": "hello"}


@pytest.mark.parametrize(
    "thinking", [None, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "display": "summarized"}]
)
async def test_a_message_has_a_block_of_thinking(app: TestApp, thinking: dict[str, Any] | None) -> None:
    answer(app, ANSWER)
    body = (await ask(app, thinking=thinking)).json()
    assert body["content"] == [THINKING, HELLO]
    num_reasoning = len(ids(app, ANSWER.removesuffix("\n\nhello")))
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": num_reasoning}
    assert prompt_of(app).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("size", [1, 3, 400])
async def test_the_stream_of_a_message_has_its_thinking_first(app: TestApp, size: int) -> None:
    answer(app, ANSWER, size)
    events = said(await ask(app, stream=True))
    given = [event["delta"] for event in events if event["type"] == "content_block_delta" and event["index"] == 0]
    assert "".join(delta["thinking"] for delta in given) == "let me see"
    assert {delta["type"] for delta in given} == {"thinking_delta"}
    ends = 3 + len(given)
    assert events[2] == {"type": "content_block_start", "index": 0, "content_block": {**THINKING, "thinking": ""}}
    assert events[ends] == {"type": "content_block_stop", "index": 0}
    assert events[ends + 1] == {"type": "content_block_start", "index": 1, "content_block": {**HELLO, "text": ""}}
    texts = [
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta" and event["index"] == 1
    ]
    assert "".join(texts) == "hello"
    assert events[-2]["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize(
    ("thinking", "ends"),
    [
        ({"type": "disabled"}, "assistant\n<think>\n\n</think>\n\n"),
        ({"type": "adaptive", "display": "omitted"}, "<|im_start|>assistant\n"),
    ],
)
async def test_thinking_that_is_not_wanted(app: TestApp, thinking: dict[str, Any], ends: str) -> None:
    """Templates that know how tell the model; what it reasons nevertheless is left out, and counted."""
    answer(app, ANSWER, 3)
    body = (await ask(app, thinking=thinking)).json()
    assert prompt_of(app).endswith(ends)
    assert body["content"] == [HELLO]
    assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    types = {
        event["content_block"]["type"]
        for event in said(await ask(app, thinking=thinking, stream=True))
        if "content_block" in event
    }
    assert types == {"text"}


async def test_blocks_of_thinking_reach_the_template(app: TestApp) -> None:
    answer(app, "hello")
    blocks = [{"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "b"}]
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "c"},
    ]
    await ask(app, messages=turns)
    assert "assistant\n<think>\nwhy\n</think>\n\nb<|im_end|>" in prompt_of(app)


async def test_tokens_are_counted_as_the_template_makes_them(app: TestApp) -> None:
    """Also where it is told not to think."""
    answer(app, "hello")
    asked = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    counted = (await app.client.post(f"{MESSAGES}/count_tokens", json=asked)).json()["input_tokens"]
    await ask(app, thinking={"type": "disabled"})
    assert len(unpack_token_ids(app.router.submitted[-1][0].prompt_token_ids)) == counted
