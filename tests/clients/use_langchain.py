"""What a user of `langchain-openai` does, one function each, with chat completions and with responses; run by that
package's own environment.

    python -m tests.clients.use_langchain URL MODEL        in the repository's root
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_core.tools import tool  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from tests.clients.checks import run

Check = Callable[[str, str], None]
QUESTION = [SystemMessage("You answer in one short sentence."), HumanMessage("What is the capital of France?")]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


@tool  # type: ignore[untyped-decorator]
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def _chat(url: str, model: str, **more: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 100, "max_retries": 0, **more}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="any", model=model, **given)


def invoke(url: str, model: str) -> None:
    answer = _chat(url, model, max_tokens=24).invoke(QUESTION)
    assert "Paris" in answer.content
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens"] <= 24


def stream(url: str, model: str) -> None:
    chat = _chat(url, model, max_tokens=24, stream_usage=True)
    chunks = list(chat.stream(QUESTION))
    whole = chat.invoke(QUESTION)
    assert "".join(chunk.content for chunk in chunks) == whole.content
    counts = [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata]
    assert counts == [whole.usage_metadata["output_tokens"]]


def batch(url: str, model: str) -> None:
    chat = _chat(url, model, max_tokens=8)
    answers = chat.batch([[HumanMessage(f"Number {i} is")] for i in range(6)])
    assert all(answer.content for answer in answers)
    assert len(answers) == 6


def tools(url: str, model: str) -> None:
    """A call, its result, and the answer."""
    _use_a_tool(_chat(url, model), {"strict": True, "parallel_tool_calls": False})


def tools_streamed(url: str, model: str) -> None:
    bound = _chat(url, model).bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    chunks = list(bound.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"]
    assert whole.tool_calls[0]["args"]["city"] in ("Paris", "Rome")


def structured_output(url: str, model: str) -> None:
    answer = _chat(url, model).with_structured_output(Weather).invoke(QUESTION)
    assert isinstance(answer, Weather)


def structured_output_by_a_call(url: str, model: str) -> None:
    answer = _chat(url, model).with_structured_output(Weather, method="function_calling").invoke(QUESTION)
    assert isinstance(answer, Weather)


def structured_output_streamed(url: str, model: str) -> None:
    parts = list(_chat(url, model).with_structured_output(Weather).stream(QUESTION))
    assert isinstance(parts[-1], Weather)


def asynchronous(url: str, model: str) -> None:
    async def ask() -> str:
        return "".join([chunk.content async for chunk in _chat(url, model, max_tokens=8).astream(QUESTION)])

    assert asyncio.run(ask())


def responses(url: str, model: str) -> None:
    """The same with responses: `max_tokens` is their `max_output_tokens`."""
    chat = _chat(url, model, max_tokens=24, use_responses_api=True)
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)


def responses_tools(url: str, model: str) -> None:
    _use_a_tool(_chat(url, model, use_responses_api=True), {"parallel_tool_calls": False})


def responses_structured_output(url: str, model: str) -> None:
    answer = _chat(url, model, use_responses_api=True).with_structured_output(Weather).invoke(QUESTION)
    assert isinstance(answer, Weather)


def _use_a_tool(chat: Any, how: dict[str, Any]) -> None:
    asked = [HumanMessage("What is the weather in Paris?")]
    answer = chat.bind_tools([get_weather], tool_choice="any", **how).invoke(asked)
    [call] = answer.tool_calls
    assert (call["name"], list(call["args"])) == ("get_weather", ["city"])
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    final = chat.bind_tools([get_weather], tool_choice="none").invoke([*asked, answer, result])
    assert final.text
    assert not final.tool_calls


CHECKS: tuple[Check, ...] = (
    invoke,
    stream,
    batch,
    tools,
    tools_streamed,
    structured_output,
    structured_output_by_a_call,
    structured_output_streamed,
    asynchronous,
    responses,
    responses_tools,
    responses_structured_output,
)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    return run(CHECKS, lambda: nullcontext(url), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
