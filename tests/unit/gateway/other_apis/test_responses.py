"""`/v1/responses`: what its bodies become, and every event of its streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.openai.schema import decoded
from disagg.gateway.other_apis.responses.answer import ResponseWriter
from disagg.gateway.other_apis.responses.schema import ResponsesBody
from disagg.gateway.other_apis.responses.to_input import ParsedResponse, read_response
from disagg.gateway.other_apis.shared.answers import PartReader
from disagg.gateway.requests.part_counts import MAX_JSON_PARTS
from disagg.gateway.requests.request import ChatPrompt
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import fake_model
from disagg.proto.errors import InvalidRequestError, UnavailableError
from disagg.router.api import Completion
from tests.support.gateway import FakeRouter, Wait
from tests.support.http_app import NOW, AsgiCall, TestApp, error_of

MODEL = "m"
PATH = "/v1/responses"
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
SAID: dict[str, Any] = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RETURNED: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "2"}


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


async def read(**body: Any) -> ParsedResponse:
    raw = json.dumps({"model": MODEL, "input": "hi", **body}).encode()
    return await run_cooperatively(decoded(raw, msgspec.json.Decoder(ResponsesBody), read_response))


async def turns_of(items: list[Any], **body: Any) -> tuple[ChatTurn, ...]:
    prompt = (await read(input=items, **body)).inputs[0].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.turns


def app_of(*texts: str, end: Any = None) -> TestApp:
    """Answers these texts, one in a batch of tokens, of which 3 of the prompt were cached."""
    steps = [*(list(text.encode()) for text in texts), end or Completion("stop", 0, 3)]
    return TestApp(fake_model(MODEL, 4096), FakeRouter(lambda _: steps))


async def post(app: TestApp, **body: Any) -> httpx.Response:
    return await app.client.post(PATH, json={"model": MODEL, "input": "hi", **body})


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The data of all events, whose names and numbers are those in it."""
    events = []
    for number, block in enumerate(raw.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event.pop("sequence_number") == number
        events.append(event)
    return events


# ---------------------------------------------------------------- bodies


async def test_a_text_with_instructions() -> None:
    parsed = await read(instructions="be brief", max_output_tokens=5, temperature=0, top_p=0.5, seed=3, stream=True)
    [given] = parsed.inputs
    assert given.prompt == ChatPrompt((ChatTurn("system", "be brief"), ChatTurn("user", "hi")))
    assert (given.model, given.max_tokens, given.temperature, given.top_p, given.seed) == (MODEL, 5, 0, 0.5, 3)
    assert parsed.stream


async def test_items_are_turns() -> None:
    items = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        SAID,
        CALLED,
        {**CALLED, "call_id": "c2", "arguments": ""},
        RETURNED,
        {**RETURNED, "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        CALLED,
    ]
    first = '{"id":"c1","type":"function","function":{"name":"add","arguments":{"a":1}}}'
    second = '{"id":"c2","type":"function","function":{"name":"add","arguments":{}}}'
    assert await turns_of(items, instructions="be brief") == (
        ChatTurn("system", "be brief\nbe kind"),
        ChatTurn("user", "a\nb"),
        ChatTurn("assistant", "one", f'{{"tool_calls":[{first},{second}]}}'),
        ChatTurn("tool", "2", '{"tool_call_id":"c1"}'),
        ChatTurn("tool", "3", '{"tool_call_id":"c2"}'),
        ChatTurn("assistant", "", f'{{"tool_calls":[{first}]}}'),
    )


async def test_tools_are_those_of_a_chat() -> None:
    parsed = await read(tools=[ADD], tool_choice={"type": "function", "name": "add"}, text={"format": FORMAT})
    assert parsed.tools is not None
    assert json.loads(parsed.tools.source) == [
        {"type": "function", "function": {key: ADD[key] for key in ("name", "description", "parameters")}}
    ]
    assert (parsed.tools.forced_field, parsed.tools.parallel) == ("tools[0].parameters", False)
    assert parsed.inputs[0].structured is None, "the format is that of a text"
    assert (await read(tools=[ADD], tool_choice="none")).tools is None


async def test_a_format_is_structured_output() -> None:
    structured = (await read(text={"format": FORMAT})).inputs[0].structured
    assert structured == StructuredOutput("json_schema", json.dumps(SCHEMA), "text.format.schema")
    structured = (await read(text={"format": {"type": "json_object"}})).inputs[0].structured
    assert structured == StructuredOutput("json_object", field="text.format")
    assert (await read(text={"verbosity": "low"})).inputs[0].structured is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (
            {"input": [{"type": "reasoning", "content": [{"type": "summary_text", "text": "a"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{**CALLED, "call_id": None}]}, "input[0].call_id"),
        ({"input": [{**CALLED, "arguments": "[1]"}]}, "input[0].arguments"),
        ({"input": [{**CALLED, "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{**CALLED, "arguments": json.dumps(deep(40))}]}, "input[0].arguments"),
        ({"input": [{**CALLED, "arguments": "[" * 5000}]}, "input[0].arguments"),
        ({"input": [CALLED] * 129}, "input[128].arguments"),
        ({"input": [{**RETURNED, "output": None}]}, "input[0].output"),
        ({"input": [SAID] * 4097}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [ADD, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [ADD, {**ADD, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{**ADD, "parameters": deep(33)}]}, "tools[0].parameters"),
        ({"tools": [{**ADD, "name": f"t{i}"} for i in range(129)]}, "tools"),
        ({"tools": [{**ADD, "description": "x" * (256 << 10)}]}, "tools"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": deep(65)}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "description": "x" * (64 << 10)}}}, "text"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
    ],
)
async def test_errors_name_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await read(**body)
    assert caught.value.field == field


async def test_what_means_nothing_is_taken() -> None:
    for store in (True, False, None):
        await read(store=store, background=False, truncation="disabled", include=["reasoning.encrypted_content"])
    await read(reasoning={"effort": "low"}, user="u", prompt_cache_key="k", service_tier="auto", max_tool_calls=3)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"top_p": 7}, "top_p"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"input": []}, "input"),
        ({"stop": ["a", ""]}, "stop[1]"),
    ],
)
async def test_errors_of_what_all_requests_have_are_in_its_words(body: dict[str, Any], field: str) -> None:
    assert error_of(await post(app_of("a"), **body))[:2] == (400, field)


# ---------------------------------------------------------------- answers


def usage(prompt: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message(text: str, status: str = "completed", index: int = 0) -> dict[str, Any]:
    content = [] if status == "in_progress" else [part(text)]
    named = {"id": f"msg_r0_{index}", "type": "message", "role": "assistant"}
    return {**named, "status": status, "content": content}


def call(index: int, status: str = "completed") -> dict[str, Any]:
    arguments = "" if status == "in_progress" else '{"a":1}'
    named = {"id": f"fc_r0_{index}", "type": "function_call", "call_id": f"call_r0_{index}", "name": "add"}
    return {**named, "arguments": arguments, "status": status}


PROMPT = len("user: hi\nassistant: ")
BASE: dict[str, Any] = {
    "id": "resp_r0",
    "object": "response",
    "created_at": int(NOW),
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "model": MODEL,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": None,
    "output": [],
}
AT = {"item_id": "msg_r0_0", "output_index": 0, "content_index": 0}


async def test_a_stream_of_text() -> None:
    response = await post(app_of("hel", "lo"), stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events_of(response.content) == [
        {"type": "response.created", "response": BASE},
        {"type": "response.in_progress", "response": BASE},
        {"type": "response.output_item.added", "output_index": 0, "item": message("", "in_progress")},
        {"type": "response.content_part.added", **AT, "part": part("")},
        {"type": "response.output_text.delta", **AT, "logprobs": [], "delta": "hel"},
        {"type": "response.output_text.delta", **AT, "logprobs": [], "delta": "lo"},
        {"type": "response.output_text.done", **AT, "text": "hello", "logprobs": []},
        {"type": "response.content_part.done", **AT, "part": part("hello")},
        {"type": "response.output_item.done", "output_index": 0, "item": message("hello")},
        {
            "type": "response.completed",
            "response": {**BASE, "status": "completed", "output": [message("hello")], "usage": usage(PROMPT, 5)},
        },
    ]


async def test_a_stream_of_text_and_a_call() -> None:
    response = await post(app_of("so " + CALL[:9], CALL[9:]), stream=True, tools=[ADD])
    events = events_of(response.content)
    at = {"item_id": "fc_r0_1", "output_index": 1}
    assert [event["type"].removeprefix("response.") for event in events[:5]] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
    ]
    assert events[5:-1] == [
        {"type": "response.output_text.done", **AT, "text": "so ", "logprobs": []},
        {"type": "response.content_part.done", **AT, "part": part("so ")},
        {"type": "response.output_item.done", "output_index": 0, "item": message("so ")},
        {"type": "response.output_item.added", "output_index": 1, "item": call(1, "in_progress")},
        {"type": "response.function_call_arguments.delta", **at, "delta": '{"a":1}'},
        {"type": "response.function_call_arguments.done", **at, "name": "add", "arguments": '{"a":1}'},
        {"type": "response.output_item.done", "output_index": 1, "item": call(1)},
    ]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == [message("so "), call(1)]
    assert events[-1]["response"]["tools"] == [{**ADD, "strict": False}]


async def test_a_complete_answer_is_that_of_the_stream() -> None:
    whole = await post(app_of("so ", CALL + CALL), tools=[ADD])
    streamed = await post(app_of("so ", CALL + CALL), tools=[ADD], stream=True)
    assert whole.json() == events_of(streamed.content)[-1]["response"]
    assert [item["type"] for item in whole.json()["output"]] == ["message", "function_call", "function_call"]
    single = await post(app_of("so ", CALL + CALL), tools=[ADD], parallel_tool_calls=False)
    assert [item["type"] for item in single.json()["output"]] == ["message", "function_call"]


async def test_an_answer_that_ended_by_its_length() -> None:
    app = app_of("hel", end=Completion("length", 3, 3))
    answer = (await post(app, max_output_tokens=3)).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"] == [message("hel", "incomplete")]
    app = app_of("hel", end=Completion("length", 3, 3))
    events = events_of((await post(app, max_output_tokens=3, stream=True)).content)
    assert events[-1]["type"] == "response.incomplete"


async def test_an_answer_without_text_is_an_empty_message() -> None:
    answer = (await post(app_of())).json()
    assert (answer["status"], answer["output"]) == ("completed", [message("")])


async def test_what_is_repeated_of_the_request() -> None:
    shown = {"metadata": {"a": "b"}, "instructions": "i", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9}
    named = {"type": "function", "name": "add"}
    more = {"parallel_tool_calls": False, "tool_choice": named}
    parsed = await read(**shown, **more, text={"format": FORMAT}, tools=[ADD])
    reader = PartReader()
    assert json.loads(ResponseWriter(parsed, "r0", int(NOW), reader).whole()) == {
        **BASE,
        **shown,
        **more,
        "text": {"format": {**FORMAT, "description": None, "strict": False}},
        "tools": [{**ADD, "strict": False}],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_answer_has_a_status(stream: bool) -> None:
    app = TestApp(fake_model(MODEL, 4096), FakeRouter(refusal=UnavailableError("no worker")))
    assert error_of(await post(app, stream=stream)) == (503, None, "no_decode_capacity")
    assert app.outcomes() == {"no_decode_capacity": 1.0}


async def test_an_error_in_the_stream_is_its_last_event() -> None:
    app = app_of("hel", end=UnavailableError("lost", "decode_lost"))
    events = events_of((await post(app, stream=True)).content)
    assert [event["type"] for event in events[-2:]] == ["response.output_text.delta", "response.failed"]
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"] == {"code": "decode_lost", "message": "lost"}
    assert app.outcomes() == {"decode_lost": 1.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(stream: bool) -> None:
    router = FakeRouter([[104], Wait()])
    app = TestApp(fake_model(MODEL, 4096), router)
    asked = AsgiCall(app.app, PATH, json.dumps({"model": MODEL, "input": "hi", "stream": stream}).encode())
    await router.arrived.wait()
    await router.handles[0].waiting.wait()
    asked.leave()
    await asyncio.wait_for(asked.task, 5)
    assert router.handles[0].num_cancels == 1
    assert app.outcomes() == {"cancelled": 1.0}


async def test_lines_of_an_event_are_not_cut_by_text() -> None:
    response = await post(app_of("a\u2028b"), stream=True, instructions="c\u2029\u0085")
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith(("event: ", "data: ")) for line in lines)
    assert json.loads(lines[-1].removeprefix("data: "))["response"]["output"] == [message("a\u2028b")]


async def test_a_stream_cannot_be_resumed() -> None:
    response = await app_of("a").client.post(
        PATH, json={"model": MODEL, "input": "hi", "stream": True}, headers={"last-event-id": "0"}
    )
    assert error_of(response) == (400, "last-event-id", "invalid_value")


async def test_arguments_of_calls_are_counted_and_read_one_by_one() -> None:
    many = {**CALLED, "arguments": '{"a":[%s1]}' % ("[]," * MAX_JSON_PARTS)}
    with pytest.raises(InvalidRequestError, match="arguments have more than 32768 values") as caught:
        await read(input=[SAID, many])
    assert caught.value.field == "input[1].arguments"
    some = {**CALLED, "arguments": '{"a":[%s1]}' % ("1," * 2000)}
    pieces = list(
        read_response(msgspec.json.decode(json.dumps({"model": MODEL, "input": [some] * 5}), type=ResponsesBody))
    )
    assert len(pieces) == 5
