"""`/v1/messages`: what its bodies become, every event of its streams, and the form of its errors."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import msgspec
import pytest

from disagg.gateway.auth.auth import AnonymousAccess, ApiKey, ApiKeys, Caller, digest_of
from disagg.gateway.event_loop.shell.turns import run_cooperatively
from disagg.gateway.openai.schema import decoded
from disagg.gateway.openai.to_input import ParsedCall
from disagg.gateway.other_apis.messages.answer import MessageWriter
from disagg.gateway.other_apis.messages.schema import MessagesBody
from disagg.gateway.other_apis.messages.to_input import read_messages
from disagg.gateway.other_apis.shared.answers import PartReader
from disagg.gateway.requests.answer_events import Finish
from disagg.gateway.requests.request import ChatPrompt
from disagg.gateway.requests.structured import StructuredOutput
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import fake_model
from disagg.proto.errors import InvalidRequestError, OverloadedError, UnavailableError
from disagg.proto.ids import RequestId
from disagg.router.api import Completion
from tests.acceptance.bad_input.generated_http import Bodies
from tests.support.gateway import FakeRouter, Wait
from tests.support.http_app import AsgiCall, TestApp, error_of

MODEL = "m"
PATH = "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "max_tokens": 9, "messages": USER}
PROMPT = len("user: hi\nassistant: ")
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
USED: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}


def deep(levels: int) -> dict[str, Any]:
    return {"a": deep(levels - 1)} if levels else {}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


async def read(**body: Any) -> ParsedCall:
    raw = json.dumps({**BODY, **body}).encode()
    return await run_cooperatively(decoded(raw, msgspec.json.Decoder(MessagesBody), read_messages))


def app_of(*texts: str, end: Any = None) -> TestApp:
    """Answers these texts, one in a batch of tokens, of which 3 of the prompt were cached."""
    steps = [*(list(text.encode()) for text in texts), end or Completion("stop", 0, 3)]
    return TestApp(fake_model(MODEL, 4096), FakeRouter(lambda _: steps))


async def post(app: TestApp, **body: Any) -> httpx.Response:
    return await app.client.post(PATH, json={**BODY, "max_tokens": 200, **body})


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The data of all events, whose names are those in it."""
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def failure_of(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of an error in its only form."""
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-disagg-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


# ---------------------------------------------------------------- bodies


async def test_a_body_is_a_request() -> None:
    parsed = await read(system="be brief", temperature=0, top_k=4, top_p=0.5, stop_sequences=["a", "b"], stream=True)
    [given] = parsed.inputs
    assert given.prompt == ChatPrompt((ChatTurn("system", "be brief"), ChatTurn("user", "hi")))
    assert (given.max_tokens, given.temperature, given.top_k, given.top_p, given.stop) == (9, 0, 4, 0.5, ("a", "b"))
    assert parsed.stream


async def test_blocks_are_turns() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "a", **mark}
    messages = [
        turn(text, {"type": "text", "text": "b"}),
        {"role": "user", "content": "c"},
        turn({"type": "text", "text": "one"}, USED, {**USED, "id": "t2", "input": {}}, role="assistant"),
        turn(
            RESULT, {**RESULT, "tool_use_id": "t2", "content": [text], "is_error": True}, {"type": "text", "text": "d"}
        ),
        turn(USED, role="assistant"),
        turn({"type": "tool_result", "tool_use_id": "t1"}),
    ]
    prompt = (await read(system=[text, text], messages=messages)).inputs[0].prompt
    first = '{"id":"t1","type":"function","function":{"name":"add","arguments":{"a":1}}}'
    second = '{"id":"t2","type":"function","function":{"name":"add","arguments":{}}}'
    assert isinstance(prompt, ChatPrompt)
    assert prompt.turns == (
        ChatTurn("system", "a\na"),
        ChatTurn("user", "a\nb\nc"),
        ChatTurn("assistant", "one", f'{{"tool_calls":[{first},{second}]}}'),
        ChatTurn("tool", "2", '{"tool_call_id":"t1"}'),
        ChatTurn("tool", "Error: a", '{"tool_call_id":"t2"}'),
        ChatTurn("user", "d"),
        ChatTurn("assistant", "", f'{{"tool_calls":[{first}]}}'),
        ChatTurn("tool", "", '{"tool_call_id":"t1"}'),
    )


async def test_numbers_of_earlier_calls_stay_as_they_are_written() -> None:
    body = json.dumps({**BODY, "messages": [turn({**USED, "input": 5}, role="assistant"), turn(RESULT)]})
    written = '{"x": 1.10, "y": 1e400}'
    raw = body.replace('"input": 5', f'"input": {written}').encode()
    parsed = await run_cooperatively(decoded(raw, msgspec.json.Decoder(MessagesBody), read_messages))
    prompt = parsed.inputs[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert '"arguments":{"x":1.10,"y":1e400}' in prompt.turns[0].extra


@pytest.mark.parametrize(
    ("choice", "forced", "parallel"),
    [
        (None, False, True),
        ({"type": "auto"}, False, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, False),
        ({"type": "any"}, True, True),
        ({"type": "tool", "name": "add"}, True, False),
    ],
)
async def test_tools_are_those_of_a_chat(choice: Any, forced: bool, parallel: bool) -> None:
    parsed = await read(tools=[{**ADD, "type": "custom"}], tool_choice=choice)
    assert parsed.tools is not None
    function = {"name": "add", "description": "Adds.", "parameters": ADD["input_schema"]}
    assert json.loads(parsed.tools.source) == [{"type": "function", "function": function}]
    assert (bool(parsed.tools.forced), parsed.tools.parallel) == (forced, parallel)
    assert parsed.tools.forced_field == ("tools[0].input_schema" if forced else "tools")


async def test_no_tool_may_be_called() -> None:
    assert (await read(tools=[ADD], tool_choice={"type": "none"})).tools is None


async def test_a_format_is_structured_output() -> None:
    config = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    structured = (await read(output_config=config)).inputs[0].structured
    assert structured == StructuredOutput("json_schema", json.dumps(SCHEMA), "output_config.format.schema")
    forced = await read(output_config=config, tools=[ADD], tool_choice={"type": "any"})
    assert forced.inputs[0].structured is None, "the format is that of a text"
    assert (await read(output_config={"effort": "low"})).inputs[0].structured is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": USER * 4097}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "assistant", "content": "The"}]}, "messages[1].role"),
        ({"messages": [turn({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [turn({"type": "document", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [*USER, turn({"type": "thinking"}, role="assistant")]}, "messages[1].content[0].thinking"),
        ({"messages": [turn({"type": "thinking", "thinking": "a"})]}, "messages[0].content[0].type"),
        ({"messages": [*USER, turn({"type": "redacted_thinking"}, role="assistant")]}, "messages[1].content[0].type"),
        ({"messages": [turn(USED)]}, "messages[0].content[0].type"),
        ({"messages": [turn(RESULT, role="assistant")]}, "messages[0].content[0].type"),
        ({"messages": [turn({"type": "text"})]}, "messages[0].content[0].text"),
        ({"messages": [turn({**USED, "id": None}, role="assistant")]}, "messages[0].content[0].id"),
        ({"messages": [turn({**USED, "input": [1]}, role="assistant")]}, "messages[0].content[0].input"),
        ({"messages": [turn({**USED, "input": deep(33)}, role="assistant")]}, "messages[0].content[0].input"),
        ({"messages": [turn(*[USED] * 129, role="assistant")]}, "messages[0].content[128].input"),
        ({"messages": [turn({**RESULT, "tool_use_id": None})]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [turn({**RESULT, "content": [{"type": "image"}]})]},
            "messages[0].content[0].content[0].type",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display"),
        ({"thinking": {"type": "x" * 5000}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"name": "s"}]}, "mcp_servers"),
        ({"context_management": {"edits": [1]}}, "context_management"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [ADD, {**ADD, "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{**ADD, "input_schema": deep(33)}]}, "tools[0].input_schema"),
        ({"tools": [{**ADD, "name": f"t{i}"} for i in range(129)]}, "tools"),
        ({"tools": [ADD], "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
async def test_errors_name_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await read(**body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"top_p": 7}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)
async def test_errors_of_what_all_requests_have_are_in_its_words(body: dict[str, Any], field: str) -> None:
    status, kind, text = failure_of(await post(app_of("a"), **body))
    assert (status, kind, text.split(": ")[0]) == (400, "invalid_request_error", field)


async def test_what_means_nothing_is_taken() -> None:
    await read(thinking={"type": "disabled"}, metadata={"user_id": "u"}, service_tier="auto", inference_geo="eu")


# ---------------------------------------------------------------- answers


def usage(fresh: int, cached: int, output: int) -> dict[str, int]:
    named = {"input_tokens": fresh, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {**named, "output_tokens": output}


HEAD = {"id": "msg_r0", "type": "message", "role": "assistant", "model": MODEL}
STARTED: dict[str, Any] = {
    **HEAD,
    "content": [],
    "stop_reason": None,
    "stop_sequence": None,
    "usage": usage(PROMPT, 0, 0),
}
ENDED = {"stop_reason": "end_turn", "stop_sequence": None}


async def test_a_stream_of_text() -> None:
    response = await app_of("hel", "lo").client.post(
        PATH, json={**BODY, "stream": True}, headers={"anthropic-version": "2023-06-01", "x-api-key": "any"}
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["request-id"] == "r0"
    assert events_of(response.content) == [
        {"type": "message_start", "message": STARTED},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ENDED, "usage": usage(PROMPT - 3, 3, 5)},
        {"type": "message_stop"},
    ]


async def test_a_stream_of_text_and_a_call() -> None:
    events = events_of((await post(app_of("so " + CALL[:9], CALL[9:] + "!"), stream=True, tools=[ADD])).content)
    block = {"type": "tool_use", "id": "toolu_r0_1", "name": "add", "input": {}}
    assert events[2:-2] == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "so "}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": block},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":1}'}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": "!"}},
        {"type": "content_block_stop", "index": 2},
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_a_complete_answer() -> None:
    answer = await post(app_of("so ", CALL, CALL), tools=[ADD])
    used = {"type": "tool_use", "name": "add", "input": {"a": 1}}
    assert answer.json() == {
        **HEAD,
        "content": [
            {"type": "text", "text": "so "},
            {**used, "id": "toolu_r0_1"},
            {**used, "id": "toolu_r0_2"},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": answer.json()["usage"],
    }
    assert answer.json()["usage"]["output_tokens"] == 3 + 2 * len(CALL)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    single = (await post(app_of("so ", CALL, CALL), tools=[ADD], tool_choice=choice)).json()
    assert [block["type"] for block in single["content"]] == ["text", "tool_use"]


def test_an_answer_that_a_guardrail_ended_is_refused() -> None:
    reader = PartReader()
    writer = MessageWriter("m", "r", reader, lambda _: b"")
    end = json.loads(
        writer.finish(Finish(RequestId("r"), "content_filter", 3, 0, 2)).splitlines()[1].removeprefix(b"data: ")
    )
    assert end["delta"] == {"stop_reason": "refusal", "stop_sequence": None}


async def test_why_an_answer_ended() -> None:
    async def end(app: TestApp, **body: Any) -> tuple[str, str | None]:
        whole, streamed = await post(app, **body), await post(app, **body, stream=True)
        delta = events_of(streamed.content)[-2]["delta"]
        assert {key: whole.json()[key] for key in delta} == delta
        return delta["stop_reason"], delta["stop_sequence"]

    assert await end(app_of("hello")) == ("end_turn", None)
    assert await end(app_of("hello", end=Completion("length", 5, 0)), max_tokens=5) == ("max_tokens", None)
    assert await end(app_of("hello, you"), stop_sequences=["you", ", "]) == ("stop_sequence", ", ")
    assert await end(app_of(CALL), tools=[ADD]) == ("tool_use", None)
    assert (await post(app_of())).json()["content"] == []


async def test_tokens_of_a_prompt_are_counted() -> None:
    app = app_of("a")
    asked = {"model": MODEL, "messages": USER}
    response = await app.client.post(f"{PATH}/count_tokens", json=asked)
    assert (response.status_code, response.json()) == (200, {"input_tokens": PROMPT})
    with_tools = await app.client.post(f"{PATH}/count_tokens", json={**asked, "tools": [ADD], "system": "s"})
    assert with_tools.json()["input_tokens"] > PROMPT
    assert app.router.submitted == []
    for wrong, status, field in (
        ({"messages": []}, 400, "messages"),
        ({"messages": [turn({"type": "image"})]}, 400, "messages[0].content[0].type"),
        ({"model": "other"}, 404, "model"),
    ):
        failed = failure_of(await app.client.post(f"{PATH}/count_tokens", json={**asked, **wrong}))
        assert (failed[0], failed[2].split(": ")[0]) == (status, field)


# ---------------------------------------------------------------- errors, keys, clients that leave


async def test_errors_have_the_form_of_its_paths() -> None:
    app = app_of("a")
    assert failure_of(await post(app, model="other"))[:2] == (404, "not_found_error")
    assert failure_of(await app.client.get(PATH))[:2] == (405, "invalid_request_error")
    assert failure_of(await app.client.post(f"{PATH}/batches", json={}))[:2] == (404, "not_found_error")
    assert failure_of(await app.client.post(PATH, content=b"no JSON"))[:2] == (400, "invalid_request_error")
    assert error_of(await app.client.get("/v1/none"))[0] == 404
    app.router.refusal = OverloadedError("full", 1.5)
    refused = await post(app)
    assert failure_of(refused)[:2] == (429, "rate_limit_error")
    assert refused.headers["retry-after-ms"] == "1500"
    app.router.refusal = UnavailableError("none")
    assert failure_of(await post(app, stream=True))[:2] == (503, "overloaded_error")


async def test_an_error_in_the_stream_is_its_last_event() -> None:
    app = app_of("hel", end=UnavailableError("lost", "decode_lost"))
    events = events_of((await post(app, stream=True)).content)
    error = {"type": "overloaded_error", "message": "lost"}
    assert events[-1] == {"type": "error", "error": error, "request_id": "r0"}
    assert app.outcomes() == {"decode_lost": 1.0}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(stream: bool) -> None:
    router = FakeRouter([[104], Wait()])
    app = TestApp(fake_model(MODEL, 4096), router)
    asked = AsgiCall(app.app, PATH, json.dumps({**BODY, "stream": stream}).encode())
    await router.arrived.wait()
    await router.handles[0].waiting.wait()
    asked.leave()
    await asyncio.wait_for(asked.task, 5)
    assert router.handles[0].num_cancels == 1
    assert app.outcomes() == {"cancelled": 1.0}


async def test_a_key_may_come_as_its_clients_send_it() -> None:
    keys = ApiKeys([ApiKey(digest_of("secret"), Caller("t", False))])
    app = TestApp(fake_model(MODEL, 4096), FakeRouter([[104]]), authenticator=keys)
    found = [
        (await app.client.post(PATH, json=BODY, headers=headers)).status_code
        for headers in (
            {"x-api-key": "secret"},
            {"authorization": "Bearer secret"},
            {"authorization": "Bearer secret", "x-api-key": "wrong"},
            {"authorization": "Bearer wrong", "x-api-key": "secret"},
            {"x-api-key": "wrong"},
            {"x-api-key": ""},
            {},
        )
    ]
    assert found == [200, 200, 200, 401, 401, 401, 401]
    refused = await app.client.post(PATH, json=BODY)
    assert failure_of(refused)[:2] == (401, "authentication_error")
    assert (await app.client.get("/v1/models", headers={"x-api-key": "secret"})).status_code == 200


async def test_a_key_without_rights() -> None:
    for caller in (Caller("a", False, infers=False), Caller("a", False, models=frozenset({"x"}))):
        app = TestApp(fake_model(MODEL, 4096), authenticator=AnonymousAccess(caller))
        for path in (PATH, f"{PATH}/count_tokens"):
            assert failure_of(await app.client.post(path, json=BODY))[:2] == (403, "permission_error")
        assert error_of(await app.client.post("/v1/responses", json={"model": MODEL, "input": "a"}))[0] == 403
        assert app.router.submitted == []


async def test_generated_wrong_bodies_are_refused() -> None:
    app = app_of("a")
    bodies, dice = Bodies(app.model.info), random.Random(65)
    for path in ("/v1/responses", PATH):
        for name, wrong in bodies.wrong[path].items():
            for _ in range(25):
                body = {**bodies.valid[path], name: wrong(dice)}
                response = await app.client.post(path, content=json.dumps(body).encode())
                assert 400 <= response.status_code < 500, (path, body, response.text)
                assert response.json()["error"]["message"]
    assert app.router.submitted == []
