"""What a user of the `openai` package does, one function each; run by that package's own environment.

    python -m tests.clients.use_openai URL MODEL        in the repository's root

The server must be idle at the start. Standard library, `openai` and what it needs only.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import openai  # type: ignore[import-not-found]  # only in its own environment
from pydantic import BaseModel, Field

from tests.clients.checks import expect, run

Check = Callable[[openai.OpenAI, str], None]
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]},
]
GREEDY = {"temperature": 0.0, "seed": 1}
NUM_AT_ONCE = 32


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


WEATHER = openai.pydantic_function_tool(Weather)


def models(client: openai.OpenAI, model: str) -> None:
    listed = client.models.list()
    assert [entry.id for entry in listed.data] == [model]
    assert client.models.retrieve(model).id == model


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, **GREEDY)
    [choice] = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert "Paris" in choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 20
    assert 1 <= usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 0


def chat_stream(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=24, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    *with_choices, usage_only = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert with_choices[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in with_choices)
    assert "".join(c.choices[0].delta.content or "" for c in with_choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in with_choices if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert usage_only.choices == []
    assert usage_only.usage.completion_tokens == whole.usage.completion_tokens


def stream_without_usage(client: openai.OpenAI, model: str) -> None:
    chunks = list(client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def stream_helper(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES, max_tokens=8, **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta"} <= kinds
    assert final.choices[0].message.content


def completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="The capital of France is", max_tokens=5, **GREEDY)
    assert answer.object == "text_completion"
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens <= 5


def completion_stream(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "The capital of France is", "max_tokens": 7, **GREEDY}
    asked["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 7


def prompts(client: openai.OpenAI, model: str) -> None:
    texts = ["One, two,", "A, B,"]
    answer = client.completions.create(model=model, prompt=texts, max_tokens=3, **GREEDY)
    alone = [client.completions.create(model=model, prompt=text, max_tokens=3, **GREEDY) for text in texts]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]
    by_ids = client.completions.create(model=model, prompt=[[504, 3575], [504]], max_tokens=2, **GREEDY)
    assert len(by_ids.choices) == 2
    assert by_ids.usage.prompt_tokens == 3


def several_answers(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 6, "temperature": 1.0, "seed": 7, "n": 3}
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert [c.message.content for c in first.choices] == [c.message.content for c in again.choices]
    parts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == [choice.message.content for choice in first.choices]


def chat_logprobs(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 3, **GREEDY}
    answer = client.chat.completions.create(**asked)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token, "greedy takes the likeliest"
        assert abs(entry.logprob - entry.top_logprobs[0].logprob) < 1e-6
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def completion_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="One, two,", max_tokens=4, logprobs=2, **GREEDY)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 4
    assert "".join(found.tokens) == answer.choices[0].text


def logit_bias(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "One, two,", "max_tokens": 3, **GREEDY}
    answer = client.completions.create(**asked, logit_bias={"504": 100})
    tokens = client.completions.create(**asked, logit_bias={"504": 100}, logprobs=0)
    assert answer.choices[0].text == 3 * tokens.choices[0].logprobs.tokens[0]


def stop_strings(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "prompt": "1 2 3 4 5 6 7", "max_tokens": 24, **GREEDY}
    plain = client.completions.create(**asked).choices[0].text
    stop = plain[6:9]
    cut = client.completions.create(**asked, stop=stop).choices[0]
    assert cut.text == plain[: plain.index(stop)]
    assert cut.finish_reason == "stop"


def echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="One, two,", max_tokens=2, echo=True, **GREEDY)
    assert answer.choices[0].text.startswith("One, two,")


def parse_an_answer(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 100, **GREEDY}
    answer = client.chat.completions.parse(**asked, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**asked, response_format=Weather) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def json_object(client: openai.OpenAI, model: str) -> None:
    """Greedy, so that it either ends or not; JSON up to its end either way."""
    asked = {"model": model, "messages": MESSAGES, "max_tokens": 60, "response_format": {"type": "json_object"}}
    choice = client.chat.completions.create(**asked, **GREEDY).choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def tools(client: openai.OpenAI, model: str) -> None:
    """A call, its result, and the answer."""
    asked: dict[str, Any] = {"model": model, "tools": [WEATHER], "max_tokens": 100, **GREEDY}
    create = client.chat.completions.create
    answer = create(messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, **asked)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name == "Weather"
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    final = create(messages=[*MESSAGES, choice.message, result], tool_choice="none", **asked)
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None


def tools_named(client: openai.OpenAI, model: str) -> None:
    other = {"type": "function", "function": {"name": "now"}}
    named = {"type": "function", "function": {"name": "now"}}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=[WEATHER, other], tool_choice=named, max_tokens=60, **GREEDY
    )
    assert [(c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls] == [("now", "{}")]


def tools_parsed(client: openai.OpenAI, model: str) -> None:
    """The helpers, whole and streamed; with `auto` the model may answer in text."""
    asked = {"model": model, "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 100, **GREEDY}
    force = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = client.chat.completions.parse(**asked, **force)
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**asked, **force) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.parsed_arguments for event in done] == [call.function.parsed_arguments]
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == call.function.parsed_arguments
    message = client.chat.completions.create(**asked).choices[0].message
    assert message.content or message.tool_calls


def model_not_found(client: openai.OpenAI, model: str) -> None:
    error = expect(openai.NotFoundError, lambda: client.completions.create(model="nobody", prompt="x"))
    assert error.code == "model_not_found"


def bad_request_names_the_parameter(client: openai.OpenAI, model: str) -> None:
    create = client.chat.completions.create
    error = expect(openai.BadRequestError, lambda: create(model=model, messages=MESSAGES, top_p=7))
    assert (error.param, error.code) == ("top_p", "invalid_value")
    error = expect(openai.BadRequestError, lambda: create(model=model, messages=[{"role": "robot", "content": "x"}]))
    assert error.param == "messages[0].role"
    error = expect(openai.BadRequestError, lambda: client.completions.create(model=model, prompt=[]))
    assert error.param == "prompt"


def context_too_long(client: openai.OpenAI, model: str) -> None:
    error = expect(
        openai.BadRequestError, lambda: client.completions.create(model=model, prompt="a b " * 50_000, max_tokens=1)
    )
    assert error.code == "context_length_exceeded"


def refused_after_its_own_retries(client: openai.OpenAI, model: str) -> None:
    """A target that no prompt of this length can meet is refused at once; the client comes back twice by itself."""
    headers = {"x-slo-ttft-ms": "0.001"}
    create = client.with_options(max_retries=2).completions.create
    error = expect(
        openai.RateLimitError,
        lambda: create(model=model, prompt="word " * 1500, max_tokens=1, extra_headers=headers),
    )
    assert error.code == "slow_down"
    assert error.response.headers["retry-after-ms"].isdigit()
    assert error.request.headers["x-stainless-retry-count"] == "2"


def client_timeout(client: openai.OpenAI, model: str) -> None:
    create = client.with_options(timeout=0.3, max_retries=0).completions.create
    expect(
        openai.APITimeoutError,
        lambda: create(model=model, prompt="x", max_tokens=1500, extra_body={"ignore_eos": True}),
    )


def server_deadline(client: openai.OpenAI, model: str) -> None:
    create = client.with_options(max_retries=0).completions.create
    body = {"ignore_eos": True}
    error = expect(
        openai.APIStatusError,
        lambda: create(
            model=model, prompt="x", max_tokens=1500, extra_body=body, extra_headers={"x-request-timeout-ms": "300"}
        ),
    )
    assert error.status_code == 408
    assert error.code == "timeout"


def leave_a_stream(client: openai.OpenAI, model: str) -> None:
    with client.completions.create(
        model=model, prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices


def many_at_once(client: openai.OpenAI, model: str) -> None:
    asyncio.run(_many_at_once(str(client.base_url), model))


async def _many_at_once(url: str, model: str) -> None:
    async def one(asynchronous: openai.AsyncOpenAI, i: int) -> tuple[str, int]:
        prompt = f"Number {i % 4} is"
        parts = []
        usage = None
        stream = await asynchronous.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            **GREEDY,
        )
        async for chunk in stream:
            parts += [choice.text for choice in chunk.choices]
            usage = chunk.usage or usage
        assert usage is not None
        return "".join(parts), usage.completion_tokens

    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as asynchronous:
        answers = await asyncio.gather(*(one(asynchronous, i) for i in range(NUM_AT_ONCE)))
    assert [count for _, count in answers] == [12] * NUM_AT_ONCE
    assert all(text for text, _ in answers)


CHECKS: tuple[Check, ...] = (
    models,
    chat,
    chat_stream,
    stream_without_usage,
    stream_helper,
    completion,
    completion_stream,
    prompts,
    several_answers,
    chat_logprobs,
    completion_logprobs,
    logit_bias,
    stop_strings,
    echo,
    parse_an_answer,
    json_object,
    tools,
    tools_named,
    tools_parsed,
    model_not_found,
    bad_request_names_the_parameter,
    context_too_long,
    refused_after_its_own_retries,
    client_timeout,
    server_deadline,
    leave_a_stream,
    many_at_once,
)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    return run(CHECKS, lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
