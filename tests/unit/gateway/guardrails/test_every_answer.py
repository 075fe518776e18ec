"""Whatever a model writes: no pattern of a guardrail matches any text of any answer, in any API, whole or streamed, and
what is streamed is what a whole answer has."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disagg.gateway.guardrails.config import GuardrailOptions, RuleOptions
from disagg.gateway.guardrails.shell.guardrails import Guardrails
from disagg.gateway.requests.answer_events import Delta
from disagg.gateway.requests.request import Call, ChatPrompt, GenerationInput
from disagg.gateway.text.chat_template import ChatTurn
from disagg.gateway.text.tokenizer import ServedModel, load_model
from disagg.proto.ids import RequestId
from disagg.proto.messages import TokenLogprobs
from disagg.router.api import Completion, TokenBatch
from tests.support.calls import answer
from tests.support.gateway import MODEL_NAME, TOKENIZER_CONFIG, FakeRouter, Step, write_checkpoint
from tests.support.http_app import TestApp, events_of

ANYWHERE: Final = "secret|hello|a b|x\ny|4{4}"
PARTS: Final = re.compile(ANYWHERE)
"""What no text has, not even a part of one, such as a token or a piece of a stream."""
WHOLE: Final = re.compile(rf"{ANYWHERE}|\bcat\b")
"""What no whole text has."""
RULES: Final = GuardrailOptions(
    name="words",
    rules=(
        RuleOptions(pattern="secret|hello|a b"),
        RuleOptions(pattern=r"\bcat\b", action="replace", replacement="-"),
        RuleOptions(pattern=r"x\ny|4{4}", action="replace", replacement="#"),
    ),
)
TEMPLATE: Final = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> <tool_call> #}"
PARAMETERS: Final = {"type": "object", "properties": {"a": {"type": "string"}}}
PIECES: Final = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "', '"}}', '"', "\\"),
    *(
        "\\u0073ecret",
        "\\u0020",
        "\\n",
        "sec",
        "ret",
        "secret",
        "hello",
        "cat",
        "a",
        "b",
        " ",
        "x",
        "\n",
        "y",
        "44",
        "é",
        "\\ud83d",
    ),
    *('<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>', "<tool_call>{}</tool_call>"),
]
NUM_EXAMPLES: Final = int(os.environ.get("DISAGG_FUZZ_EXAMPLES", "12"))
CALL_OF: Final = '<tool_call>{"name": "f", "arguments": {"a": "%s"}}</tool_call>'


class Found(NamedTuple):
    """What a client has of one answer."""

    content: str
    reasoning: str
    calls: tuple[str, ...]
    """Arguments, in their order."""
    reason: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    config = {"vocab_size": 320, "max_position_embeddings": 1000, "eos_token_id": 1}
    write_checkpoint(folder, config=config, tokenizer_config={**TOKENIZER_CONFIG, "chat_template": TEMPLATE})
    return load_model(str(folder), MODEL_NAME)


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a body, and what stands in those that are JSON."""
    if isinstance(value, str):
        yield value
        if value.startswith(("{", "[")):
            try:
                yield from texts_of(json.loads(value))
            except ValueError:
                return
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield key
            yield from texts_of(one)


def check(body: Any) -> None:
    for text in texts_of(body):
        assert not PARTS.search(text), text


def checked(found: Found) -> Found:
    for text in texts_of(list(found[:3])):
        assert not WHOLE.search(text), text
    return found


class Client:
    """Asks for the same answer in every way."""

    def __init__(self, model: ServedModel, text: str, sizes: list[int], others: list[str], with_tools: bool) -> None:
        ids = model.tokenizer.encode_text(text, special=False)
        other_ids = [model.tokenizer.encode_text(other, special=False)[0] for other in others if other]
        script: list[Step] = []
        start = 0
        while start < len(ids):
            size = sizes[len(script) % len(sizes)]
            some = ids[start : start + size]
            tops = tuple(dict.fromkeys(other_ids))
            one = TokenLogprobs(-1.0, tops, (-0.5,) * len(tops))
            script.append(TokenBatch(some, [one] * len(some)))
            start += size
        script.append(Completion("stop", len(ids), 0))
        guardrails = Guardrails([RULES])
        self.app = TestApp(model, FakeRouter(lambda _: script), guardrails=guardrails)
        self.with_tools = with_tools

    async def post(self, path: str, **body: Any) -> Any:
        response = await self.app.client.post(path, json={"model": MODEL_NAME, "max_tokens": 300, **body})
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        if path == "/v1/chat/completions" or path == "/v1/completions":
            return [one for one in events_of(response) if one != "[DONE]"]
        lines = response.text.split("\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]

    async def chat(self, stream: bool) -> Found:
        tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
        body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 3}
        found = await self.post(
            "/v1/chat/completions", stream=stream, **body, **({"tools": tools} if self.with_tools else {})
        )
        if not stream:
            choice = found["choices"][0]
            message = choice["message"]
            check(found)
            calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
            return checked(
                Found(
                    message["content"] or "",
                    message.get("reasoning_content", ""),
                    tuple(calls),
                    choice["finish_reason"],
                )
            )
        choices = [event["choices"][0] for event in found]
        pieces: dict[int, list[str]] = {}
        for choice in choices:
            for call in choice["delta"].get("tool_calls", ()):
                pieces.setdefault(call["index"], []).append(call["function"]["arguments"])
        whole = Found(
            "".join(choice["delta"].get("content") or "" for choice in choices),
            "".join(choice["delta"].get("reasoning_content") or "" for choice in choices),
            tuple("".join(texts) for _, texts in sorted(pieces.items())),
            choices[-1]["finish_reason"],
        )
        check(found)
        return checked(whole)

    async def text(self, stream: bool) -> Found:
        found = await self.post("/v1/completions", stream=stream, prompt="hi", logprobs=3)
        choices = [event["choices"][0] for event in (found if stream else [found])]
        whole = Found("".join(choice["text"] for choice in choices), "", (), choices[-1]["finish_reason"])
        check(found)
        return checked(whole)

    async def response(self, stream: bool) -> Found:
        tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}]
        found = await self.post(
            "/v1/responses", stream=stream, input="hi", **({"tools": tools} if self.with_tools else {})
        )
        check(found)
        answer = found[-1]["response"] if stream else found
        texts: dict[str, list[str]] = {"message": [], "reasoning": []}
        for item in answer["output"]:
            if item["type"] in texts:
                texts[item["type"]] += [part["text"] for part in item["content"]]
        calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
        cut = (answer["incomplete_details"] or {}).get("reason")
        reason = cut or ("tool_calls" if calls else "stop")
        whole = Found("".join(texts["message"]), "".join(texts["reasoning"]), tuple(calls), reason)
        if stream:
            deltas: dict[str, list[str]] = {}
            for event in found:
                if event["type"].endswith(".delta"):
                    deltas.setdefault(event["type"], []).append(event["delta"])
            assert "".join(deltas.get("response.output_text.delta", ())) == whole.content
            assert "".join(deltas.get("response.reasoning_text.delta", ())) == whole.reasoning
            assert tuple(deltas.get("response.function_call_arguments.delta", ())) == whole.calls
        return checked(whole)

    async def message(self, stream: bool) -> Found:
        tools = [{"name": "f", "input_schema": PARAMETERS}]
        body = {"messages": [{"role": "user", "content": "hi"}], **({"tools": tools} if self.with_tools else {})}
        found = await self.post("/v1/messages", stream=stream, **body)
        check(found)
        reasons = {"refusal": "content_filter", "tool_use": "tool_calls", "end_turn": "stop"}
        if not stream:
            blocks = found["content"]
            whole = Found(
                "".join(block["text"] for block in blocks if block["type"] == "text"),
                "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
                tuple(json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"),
                reasons[found["stop_reason"]],
            )
        else:
            deltas: dict[str, list[str]] = {"text_delta": [], "thinking_delta": [], "input_json_delta": []}
            names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
            for event in found:
                if event["type"] == "content_block_delta":
                    kind = event["delta"]["type"]
                    deltas[kind].append(event["delta"][names[kind]])
            end = next(event["delta"]["stop_reason"] for event in found if event["type"] == "message_delta")
            calls = tuple(json.dumps(json.loads(one)) for one in deltas["input_json_delta"])
            whole = Found("".join(deltas["text_delta"]), "".join(deltas["thinking_delta"]), calls, reasons[end])
        return checked(whole)

    async def rpc(self) -> Found:
        """What the gRPC service writes is the generator's deltas; it knows no tools."""
        given = GenerationInput(
            model=MODEL_NAME, prompt=ChatPrompt((ChatTurn("user", "hi"),)), split_reasoning=True, logprobs=3
        )
        events = [event async for event in answer(self.app.generator, given, Call(request_id=RequestId("rpc")))]
        deltas = [event for event in events if isinstance(event, Delta)]
        tokenizer = self.app.model.tokenizer
        for delta in deltas:
            check([tokenizer.decode([one]) for each in delta.logprobs for one in each.top_ids])
        reason = events[-1].reason  # type: ignore[union-attr]
        whole = Found("".join(one.text for one in deltas), "".join(one.reasoning for one in deltas), (), reason)
        return checked(whole)


def parsed(found: Found) -> Found:
    return found._replace(calls=tuple(json.dumps(json.loads(one)) for one in found.calls))


async def answers(model: ServedModel, text: str, sizes: list[int], others: list[str], with_tools: bool) -> list[Found]:
    """Of every API, each checked; all that have the same channels are alike."""
    client = Client(model, text, sizes, others, with_tools)
    found = []
    for ask in (client.chat, client.response, client.message):
        whole, streamed = [parsed(await ask(stream)) for stream in (False, True)]
        assert streamed == whole
        found.append(whole)
    assert found[0] == found[1] == found[2]
    whole, streamed = [await client.text(stream) for stream in (False, True)]
    assert streamed == whole
    rpc = await client.rpc()
    if not with_tools:
        assert rpc == found[0]
    return found


CASES: Final = [
    ("a call that spells it by escapes", CALL_OF % "\\u0073ecret", Found("", "", (), "content_filter")),
    (
        "a call that spells it by escapes, beside a number that no double can be",
        CALL_OF.replace("}}", ', "n": 1e400}}') % "\\u0073ecret",
        Found("", "", (), "content_filter"),
    ),
    ("a blank by an escape", "so " + CALL_OF % "a\\u0020b", Found("so ", "", (), "content_filter")),
    ("text around a call that joins", "sec" + CALL_OF % "c" + "ret", Found("", "", (), "content_filter")),
    ("a line end in an argument", CALL_OF % "x\\ny", Found("", "", (), "content_filter")),
    ("a word after a line end", CALL_OF % "\\ncat", Found("", "", (), "content_filter")),
    ("a call that is well", "a" + CALL_OF % "b", Found("a", "", ('{"a": "b"}',), "tool_calls")),
    ("reasoning", "<think>a secret</think>x", Found("", "a ", (), "content_filter")),
]


@pytest.mark.parametrize(("text", "wanted"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_what_is_stopped(model: ServedModel, text: str, wanted: Found) -> None:
    for sizes in ([1], [3], [400]):
        for found in await answers(model, text, sizes, ["x"], with_tools=True):
            assert found == wanted


PIECE: Final = st.sampled_from(PIECES)


def call_of(pieces: list[str]) -> str:
    return CALL_OF % "".join(pieces)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    text=st.lists(st.one_of(PIECE, st.lists(PIECE, max_size=4).map(call_of)), max_size=10).map("".join),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    others=st.lists(st.sampled_from(PIECES), max_size=3),
    with_tools=st.booleans(),
)
@example(text="so", sizes=[1], others=["the", "hello"], with_tools=False)
def test_no_pattern_matches_any_text(
    model: ServedModel, text: str, sizes: list[int], others: list[str], with_tools: bool
) -> None:
    asyncio.run(answers(model, text, sizes, others, with_tools))
