"""What a user of `openai-agents` does, one function each, with chat completions and with responses; run by that
package's own environment.

    python -m tests.clients.use_agents URL MODEL        in the repository's root
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, Literal

import agents  # type: ignore[import-not-found]  # only in its own environment
from openai import AsyncOpenAI  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from tests.clients.checks import run

Check = Callable[[str, str], None]
QUESTION = "What is the capital of France?"
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


class Weathers:
    """A tool that notes its calls."""

    def __init__(self) -> None:
        self.cities: list[str] = []

        @agents.function_tool  # type: ignore[untyped-decorator]
        def get_weather(city: Literal["Paris", "Rome"]) -> str:
            """The weather of a city."""
            self.cities.append(city)
            return f"Sunny in {city}."

        self.tool = get_weather


def _agent(model: Any, settings: Any = None, **more: Any) -> Any:
    return agents.Agent(
        name="assistant",
        instructions="You answer in one short sentence.",
        model=model,
        model_settings=agents.ModelSettings(temperature=0.0, max_tokens=80, **(settings or {})),
        **more,
    )


async def _text(model: Any) -> None:
    result = await agents.Runner.run(_agent(model), QUESTION)
    assert "Paris" in result.final_output
    usage = result.context_wrapper.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0


async def _stream(model: Any) -> None:
    running = agents.Runner.run_streamed(_agent(model), QUESTION)
    parts = [
        event.data.delta
        async for event in running.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert len(parts) > 1
    assert "".join(parts) == running.final_output


async def _tool(model: Any) -> None:
    """A call that must happen; the loop goes on with its result."""
    weathers = Weathers()
    agent = _agent(model, ONE_CALL, tools=[weathers.tool])
    result = await agents.Runner.run(agent, "What is the weather in Paris?", max_turns=6)
    assert weathers.cities[0] in ("Paris", "Rome")
    assert result.final_output


async def _tool_streamed(model: Any) -> None:
    weathers = Weathers()
    agent = _agent(model, ONE_CALL, tools=[weathers.tool], tool_use_behavior="stop_on_first_tool")
    running = agents.Runner.run_streamed(agent, "What is the weather in Paris?")
    events = [event.type async for event in running.stream_events()]
    assert "run_item_stream_event" in events
    assert running.final_output == f"Sunny in {weathers.cities[0]}."


async def _output(model: Any) -> None:
    result = await agents.Runner.run(_agent(model, output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


async def _history(model: Any) -> None:
    agent = _agent(model)
    first = await agents.Runner.run(agent, QUESTION)
    asked = [*first.to_input_list(), {"role": "user", "content": "And of Italy?"}]
    assert (await agents.Runner.run(agent, asked)).final_output


def _with(kind: Any, name: str, check: Callable[[Any], Awaitable[None]]) -> Check:
    """The check with one kind of model."""

    async def ask(url: str, model: str) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            await check(kind(model=model, openai_client=client))

    def checked(url: str, model: str) -> None:
        asyncio.run(ask(url, model))

    checked.__name__ = f"{name}{check.__name__}"
    return checked


KINDS = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
CHECKS: tuple[Check, ...] = tuple(
    _with(kind, name, check)
    for name, kind in KINDS.items()
    for check in (_text, _stream, _tool, _tool_streamed, _output, _history)
)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    agents.set_tracing_disabled(True)
    return run(CHECKS, lambda: nullcontext(url), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
