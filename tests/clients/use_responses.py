"""What a user of the `openai` package does with responses, one function each; run by that package's own environment.

python -m tests.clients.use_responses URL MODEL        in the repository's root
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import openai  # type: ignore[import-not-found]  # only in its own environment
from pydantic import BaseModel, Field

from tests.clients.checks import expect, run

Check = Callable[[openai.OpenAI, str], None]
QUESTION = "What is the capital of France? Answer in one short sentence."
GREEDY = {"temperature": 0.0}
LIFECYCLE = ["response.created", "response.in_progress"]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def create(client: openai.OpenAI, model: str) -> None:
    """The same answer as that of a chat, with the same usage."""
    answer = client.responses.create(model=model, input=QUESTION, max_output_tokens=24, **GREEDY)
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, **GREEDY
    )
    assert answer.object == "response"
    assert "Paris" in answer.output_text
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == {"stop": "completed", "length": "incomplete"}[chat.choices[0].finish_reason]
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert answer.usage.input_tokens_details.cached_tokens >= 0
    assert (answer.error, answer.previous_response_id, answer.model) == (None, None, model)


def instructions(client: openai.OpenAI, model: str) -> None:
    given = {"instructions": "You answer in one short sentence.", "max_output_tokens": 12, **GREEDY}
    answer = client.responses.create(model=model, input="What is the capital of France?", **given)
    items = [
        {"role": "developer", "content": "You answer in one short sentence."},
        {"role": "user", "content": [{"type": "input_text", "text": "What is the capital of France?"}]},
    ]
    same = client.responses.create(model=model, input=items, max_output_tokens=12, **GREEDY)
    assert answer.output_text == same.output_text != ""
    assert answer.instructions == "You answer in one short sentence."
    assert same.instructions is None


def several_turns(client: openai.OpenAI, model: str) -> None:
    """The client keeps the conversation: what came out goes in again."""
    history: list[Any] = [{"role": "user", "content": "Say one word."}]
    first = client.responses.create(model=model, input=history, max_output_tokens=8, store=False, **GREEDY)
    history += first.output
    history.append({"role": "user", "content": "And another one."})
    second = client.responses.create(model=model, input=history, max_output_tokens=8, **GREEDY)
    assert second.output_text
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert second.store is False


def incomplete(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="Tell a long story.", max_output_tokens=3, **GREEDY)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 3
    assert answer.output[0].status == "incomplete"


def stream(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": QUESTION, "max_output_tokens": 24, **GREEDY}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        *LIFECYCLE,
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert len(deltas) > 1


def stream_helper(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Say hello.", max_output_tokens=400, **GREEDY) as running:
        text = "".join(event.delta for event in running if event.type == "response.output_text.delta")
        final = running.get_final_response()
    assert final.status == "completed"
    assert final.output_text == text != ""


def parse(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": QUESTION, "max_output_tokens": 100, **GREEDY}
    answer = client.responses.parse(**asked, text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)
    with client.responses.stream(**asked, text_format=Weather) as running:
        done = [event.parsed for event in running if event.type == "response.output_text.done"]
        final = running.get_final_response()
    assert done == [answer.output_parsed]
    assert final.output_parsed == answer.output_parsed


def json_schema(client: openai.OpenAI, model: str) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    given = {"type": "json_schema", "name": "verdict", "schema": {**schema, "additionalProperties": False}}
    answer = client.responses.create(
        model=model, input="Is it?", text={"format": given}, max_output_tokens=100, **GREEDY
    )
    assert list(json.loads(answer.output_text)) == ["ok"]
    assert answer.text.format.name == "verdict"


def json_object(client: openai.OpenAI, model: str) -> None:
    """Greedy, so that it either ends or not; JSON up to its end either way."""
    text = {"format": {"type": "json_object"}}
    answer = client.responses.create(model=model, input=QUESTION, text=text, max_output_tokens=60, **GREEDY)
    assert answer.output_text.startswith("{")
    if answer.status == "completed":
        assert isinstance(json.loads(answer.output_text), dict)


def tools(client: openai.OpenAI, model: str) -> None:
    """A call, its result, and the answer."""
    history: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"model": model, "tools": [WEATHER], "max_output_tokens": 100, **GREEDY}
    answer = client.responses.create(input=history, tool_choice="required", parallel_tool_calls=False, **asked)
    [call] = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    history += answer.output
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."})
    final = client.responses.create(input=history, tool_choice="none", **asked)
    assert final.output_text
    assert [tool.name for tool in final.tools] == ["get_weather"]


def tools_stream(client: openai.OpenAI, model: str) -> None:
    named = {"type": "function", "name": "get_weather"}
    asked = {"model": model, "input": "Weather in Rome?", "tools": [WEATHER], "tool_choice": named, **GREEDY}
    events = list(client.responses.create(**asked, stream=True, max_output_tokens=100))
    assert [event.type for event in events] == [
        *LIFECYCLE,
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    [call] = events[-1].response.output
    assert events[3].delta == events[4].arguments == events[5].item.arguments == call.arguments


def tools_parsed(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": "Weather in Rome?", "max_output_tokens": 100, **GREEDY}
    force = {"tools": [openai.pydantic_function_tool(Weather)], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.parse(**asked, **force)
    [call] = answer.output
    assert isinstance(call.parsed_arguments, Weather)
    with client.responses.stream(**asked, **force) as running:
        kinds = [event.type for event in running]
        final = running.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert final.output[0].parsed_arguments == call.parsed_arguments


def refused_by_name(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "x"}
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,x", "detail": "auto"}]}]
    for field, wrong in (
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("input[0].content[0].type", {"input": image}),
        ("top_p", {"top_p": 7}),
        ("max_output_tokens", {"max_output_tokens": 10**6}),
    ):
        error = expect(openai.BadRequestError, partial(client.responses.create, **{**asked, **wrong}))
        assert error.param == field, (error.param, field)


def nothing_is_kept(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="x", max_output_tokens=1)
    expect(openai.NotFoundError, lambda: client.responses.retrieve(answer.id))


def model_not_found(client: openai.OpenAI, model: str) -> None:
    error = expect(openai.NotFoundError, lambda: client.responses.create(model="nobody", input="x"))
    assert (error.code, error.param) == ("model_not_found", "model")


def asynchronous(client: openai.OpenAI, model: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="any", max_retries=0) as other:
            events = await other.responses.create(model=model, input="x", max_output_tokens=4, stream=True)
            return [event.type async for event in events]

    kinds = asyncio.run(ask())
    assert kinds[:2] == LIFECYCLE
    assert kinds[-1] in ("response.completed", "response.incomplete")


def leave_a_stream(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": "x", "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with client.responses.create(**asked, stream=True) as running:
        assert next(iter(running)).type == "response.created"


CHECKS: tuple[Check, ...] = (
    create,
    instructions,
    several_turns,
    incomplete,
    stream,
    stream_helper,
    parse,
    json_schema,
    json_object,
    tools,
    tools_stream,
    tools_parsed,
    refused_by_name,
    nothing_is_kept,
    model_not_found,
    asynchronous,
    leave_a_stream,
)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    return run(CHECKS, lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
