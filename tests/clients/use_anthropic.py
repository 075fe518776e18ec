"""What a user of the `anthropic` package does, one function each; run by that package's own environment.

python -m tests.clients.use_anthropic URL MODEL        in the repository's root
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import anthropic  # type: ignore[import-not-found]  # only in its own environment
from pydantic import BaseModel

from tests.clients.checks import expect, run

Check = Callable[[anthropic.Anthropic, str], None]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = "You answer in one short sentence."
GREEDY = {"extra_body": {"temperature": 0.0}}
"""The package has no argument for it any more; the API has."""
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: Literal[1, 2, 3]


def create(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.create(model=model, max_tokens=24, system=SYSTEM, messages=QUESTION, **GREEDY)
    [block] = answer.content
    assert (answer.type, answer.role, answer.model, block.type) == ("message", "assistant", model, "text")
    assert "Paris" in block.text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.stop_sequence is None
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 20
    assert 1 <= usage.output_tokens <= 24
    assert answer._request_id == answer.id.removeprefix("msg_")


def blocks(client: anthropic.Anthropic, model: str) -> None:
    """Contents as blocks, with marks for a cache, which change nothing."""
    plain = client.messages.create(model=model, max_tokens=12, system=SYSTEM, messages=QUESTION, **GREEDY)
    mark = {"cache_control": {"type": "ephemeral"}}
    answer = client.messages.create(
        model=model,
        max_tokens=12,
        system=[{"type": "text", "text": SYSTEM, **mark}],
        messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"], **mark}]}],
        metadata={"user_id": "someone"},
        **GREEDY,
    )
    assert answer.content[0].text == plain.content[0].text
    assert (
        answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        == plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    )


def several_turns(client: anthropic.Anthropic, model: str) -> None:
    first = client.messages.create(model=model, max_tokens=8, messages=QUESTION, **GREEDY)
    history = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And of Italy?"}]
    second = client.messages.create(model=model, max_tokens=8, messages=history, **GREEDY)
    assert second.content[0].text


def max_tokens(client: anthropic.Anthropic, model: str) -> None:
    answer = client.messages.create(model=model, max_tokens=3, messages=QUESTION, **GREEDY)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 3)


def stop_sequences(client: anthropic.Anthropic, model: str) -> None:
    asked = {"model": model, "max_tokens": 24, "system": SYSTEM, "messages": QUESTION, **GREEDY}
    plain = client.messages.create(**asked).content[0].text
    cut = client.messages.create(**asked, stop_sequences=["no such text", plain[6:9]])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", plain[6:9])
    assert cut.content[0].text == plain[: plain.index(plain[6:9])]


def raw_stream(client: anthropic.Anthropic, model: str) -> None:
    asked = {"model": model, "max_tokens": 24, "system": SYSTEM, "messages": QUESTION, **GREEDY}
    whole = client.messages.create(**asked)
    events = list(client.messages.create(**asked, stream=True))
    texts = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(texts),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(texts) == whole.content[0].text
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def stream_helper(client: anthropic.Anthropic, model: str) -> None:
    with client.messages.stream(model=model, max_tokens=24, messages=QUESTION, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == stream.get_final_text() != ""
    usage = final.usage
    counted = client.messages.count_tokens(model=model, messages=QUESTION).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def count_tokens(client: anthropic.Anthropic, model: str) -> None:
    given = {"model": model, "system": SYSTEM, "messages": QUESTION}
    answer = client.messages.create(**given, max_tokens=1)
    counted = client.messages.count_tokens(**given).input_tokens
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert client.messages.count_tokens(**given, tools=[WEATHER]).input_tokens > counted


def tools(client: anthropic.Anthropic, model: str) -> None:
    """A call, its result, and the answer."""
    asked = {"model": model, "max_tokens": 100, "tools": [WEATHER], **GREEDY}
    history: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = client.messages.create(messages=history, tool_choice=ONE_CALL, **asked)
    [call] = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
    history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(messages=history, tool_choice={"type": "none"}, **asked)
    assert final.content[0].text


def tools_named(client: anthropic.Anthropic, model: str) -> None:
    other = {"name": "now", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    named = {"type": "tool", "name": "now"}
    answer = client.messages.create(
        model=model, max_tokens=60, messages=QUESTION, tools=[WEATHER, other], tool_choice=named, **GREEDY
    )
    assert [(block.name, block.input) for block in answer.content] == [("now", {})]


def tools_stream(client: anthropic.Anthropic, model: str) -> None:
    asked = {"model": model, "max_tokens": 100, "messages": QUESTION, "tools": [WEATHER], "tool_choice": ONE_CALL}
    whole = client.messages.create(**asked, **GREEDY)
    with client.messages.stream(**asked, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    parts = [event.partial_json for event in events if event.type == "input_json"]
    assert len(parts) == 1
    assert final.content[0].input == whole.content[0].input
    assert final.stop_reason == "tool_use"


def tool_runner(client: anthropic.Anthropic, model: str) -> None:
    """Its loop of calls and results; the model may answer in text at once."""
    calls: list[str] = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_time(zone: str) -> str:
        """The time of a zone."""
        calls.append(zone)
        return "noon"

    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=40, messages=QUESTION, tools=[get_time], max_iterations=2
    )
    assert list(runner)


def parse(client: anthropic.Anthropic, model: str) -> None:
    asked = {"model": model, "max_tokens": 100, "messages": QUESTION, **GREEDY}
    answer = client.messages.parse(**asked, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)
    with client.messages.stream(**asked, output_format=Weather) as stream:
        final = stream.get_final_message()
    assert final.parsed_output == answer.parsed_output


def refused_by_name(client: anthropic.Anthropic, model: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "eA=="}
    image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    asked = {"model": model, "max_tokens": 20, "messages": QUESTION}
    for field, wrong in (
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        ("messages[0].content[0].type", {"messages": image}),
        ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
        ("top_p", {"extra_body": {"top_p": 7}}),
        ("max_tokens", {"max_tokens": 0}),
        ("messages[1].role", {"messages": [*QUESTION, {"role": "assistant", "content": "Par"}]}),
    ):
        error = expect(anthropic.BadRequestError, partial(client.messages.create, **{**asked, **wrong}))
        assert error.body["type"] == "error"
        assert error.body["error"]["type"] == "invalid_request_error"
        assert error.body["error"]["message"].startswith(f"{field}: "), (field, error.body)


def model_not_found(client: anthropic.Anthropic, model: str) -> None:
    asked = {"model": "nobody", "messages": QUESTION}
    error = expect(anthropic.NotFoundError, lambda: client.messages.create(max_tokens=1, **asked))
    assert error.body["error"]["type"] == "not_found_error"
    assert error.request_id == error.body["request_id"]
    expect(anthropic.NotFoundError, lambda: client.messages.count_tokens(**asked))


def refused_after_its_own_retries(client: anthropic.Anthropic, model: str) -> None:
    """A target that no prompt of this length can meet is refused at once; the client comes back twice by itself."""
    long = [{"role": "user", "content": "word " * 1500}]
    headers = {"x-slo-ttft-ms": "0.001"}
    create = client.with_options(max_retries=2).messages.create
    error = expect(
        anthropic.RateLimitError,
        lambda: create(model=model, max_tokens=1, messages=long, extra_headers=headers),
    )
    assert error.body["error"]["type"] == "rate_limit_error"
    assert error.request.headers["x-stainless-retry-count"] == "2"


def asynchronous(client: anthropic.Anthropic, model: str) -> None:
    async def ask() -> str:
        asked = {"model": model, "max_tokens": 6, "messages": QUESTION}
        async with (
            anthropic.AsyncAnthropic(base_url=client.base_url, api_key="any", max_retries=0) as other,
            other.messages.stream(**asked) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask())


def leave_a_stream(client: anthropic.Anthropic, model: str) -> None:
    asked = {"model": model, "max_tokens": 1500, "messages": QUESTION, "extra_body": {"ignore_eos": True}}
    with client.messages.create(**asked, stream=True) as stream:
        assert next(iter(stream)).type == "message_start"


CHECKS: tuple[Check, ...] = (
    create,
    blocks,
    several_turns,
    max_tokens,
    stop_sequences,
    raw_stream,
    stream_helper,
    count_tokens,
    tools,
    tools_named,
    tools_stream,
    tool_runner,
    parse,
    refused_by_name,
    model_not_found,
    refused_after_its_own_retries,
    asynchronous,
    leave_a_stream,
)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    return run(CHECKS, lambda: anthropic.Anthropic(base_url=url, api_key="any", max_retries=0), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
