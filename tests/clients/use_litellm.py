"""What a user of `litellm` does, one function each; run by that package's own environment.

python -m tests.clients.use_litellm URL MODEL        in the repository's root
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import litellm  # type: ignore[import-not-found]  # only in its own environment
from pydantic import BaseModel, Field

from tests.clients.checks import expect, run

Check = Callable[[str, str], None]
QUESTION = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
TOO_LONG = [{"role": "user", "content": "word " * 9000}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def _where(url: str, model: str, provider: str = "openai") -> dict[str, Any]:
    return {"model": f"{provider}/{model}", "api_base": f"{url}/v1", "api_key": "any", "max_retries": 0}


def _ask(url: str, model: str, messages: Any = QUESTION, **more: Any) -> Any:
    given = {"max_tokens": 24, "temperature": 0.0, **more}
    return litellm.completion(**_where(url, model), messages=messages, **given)


def chat(url: str, model: str) -> None:
    answer = _ask(url, model)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream(url: str, model: str) -> None:
    chunks = list(_ask(url, model, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = _ask(url, model)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == text
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def as_vllm(url: str, model: str) -> None:
    """The provider that users name for a server of this kind, with a field that is an extension."""
    where = _where(url, model, "hosted_vllm")
    answer = litellm.completion(**where, messages=QUESTION, max_tokens=8, extra_body={"top_k": 1})
    assert answer.choices[0].message.content


def text(url: str, model: str) -> None:
    where = _where(url, model, "text-completion-openai")
    answer = litellm.text_completion(**where, prompt="The capital of France is", max_tokens=8, temperature=0.0)
    assert answer.choices[0].text


def tools(url: str, model: str) -> None:
    """A call, its result, and the answer."""
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = _ask(url, model, asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    message = answer.choices[0].message
    [call] = message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    final = _ask(url, model, [*asked, message.model_dump(), result], tools=[WEATHER], tool_choice="none")
    assert final.choices[0].message.content


def tools_streamed(url: str, model: str) -> None:
    given = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
    rebuilt = litellm.stream_chunk_builder(list(_ask(url, model, stream=True, **given)))
    whole = _ask(url, model, **given)
    [call], [other] = rebuilt.choices[0].message.tool_calls, whole.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == (other.function.name, other.function.arguments)


def structured_output(url: str, model: str) -> None:
    answer = _ask(url, model, response_format=Weather, max_tokens=100)
    assert Weather.model_validate_json(answer.choices[0].message.content)


def responses(url: str, model: str) -> None:
    answer = litellm.responses(**_where(url, model), input="What is the capital of France?", max_output_tokens=20)
    assert answer.output[0].content[0].text
    assert answer.usage.output_tokens <= 20


def anthropic(url: str, model: str) -> None:
    """The same server by its other API."""
    where = {**_where(url, model, "anthropic"), "api_base": url}
    answer = litellm.completion(**where, messages=QUESTION, max_tokens=8)
    assert answer.choices[0].message.content


def asynchronous(url: str, model: str) -> None:
    async def ask() -> str:
        chunks = await litellm.acompletion(**_where(url, model), messages=QUESTION, max_tokens=8, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(ask())


def a_prompt_that_is_too_long(url: str, model: str) -> None:
    expect(litellm.ContextWindowExceededError, lambda: _ask(url, model, TOO_LONG))


def fall_back_of_a_router(url: str, model: str) -> None:
    """A model with a longer context answers what is too long for the first one."""
    router = litellm.Router(
        model_list=[
            {"model_name": "short", "litellm_params": _where(url, model)},
            {"model_name": "long", "litellm_params": {**_where(url, model), "mock_response": "from the longer one"}},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    answer = router.completion(model="short", messages=TOO_LONG, max_tokens=8)
    assert answer.choices[0].message.content == "from the longer one"
    assert router.completion(model="short", messages=QUESTION, max_tokens=8).choices[0].message.content


def errors(url: str, model: str) -> None:
    expect(litellm.BadRequestError, lambda: _ask(url, model, top_p=7))
    expect(litellm.NotFoundError, lambda: _ask(url, "nobody"))


CHECKS: tuple[Check, ...] = (
    chat,
    stream,
    as_vllm,
    text,
    tools,
    tools_streamed,
    structured_output,
    responses,
    anthropic,
    asynchronous,
    a_prompt_that_is_too_long,
    fall_back_of_a_router,
    errors,
)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    litellm.suppress_debug_info = True
    return run(CHECKS, lambda: nullcontext(url), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
