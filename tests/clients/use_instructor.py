"""What a user of `instructor` does, one function each; run by that package's own environment.

python -m tests.clients.use_instructor URL MODEL        in the repository's root
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

import instructor  # type: ignore[import-not-found]  # only in its own environment
import openai  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from tests.clients.checks import run

Check = Callable[[openai.OpenAI, str], None]
MESSAGES = [{"role": "user", "content": "What is the weather in Paris, for how many days?"}]
GREEDY = {"temperature": 0.0, "seed": 1}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def _ask(client: openai.OpenAI, model: str, mode: Any, **more: Any) -> Weather:
    patched = instructor.from_openai(client, mode=mode)
    answer = patched.chat.completions.create(
        model=model, messages=MESSAGES, response_model=Weather, max_retries=0, **{"max_tokens": 100, **GREEDY, **more}
    )
    assert isinstance(answer, Weather)
    return answer


def tools(client: openai.OpenAI, model: str) -> None:
    _ask(client, model, instructor.Mode.TOOLS)


def tools_strict(client: openai.OpenAI, model: str) -> None:
    _ask(client, model, instructor.Mode.TOOLS_STRICT)


def json_schema(client: openai.OpenAI, model: str) -> None:
    _ask(client, model, instructor.Mode.JSON_SCHEMA)


def from_provider(client: openai.OpenAI, model: str) -> None:
    patched = instructor.from_provider(f"openai/{model}", base_url=str(client.base_url), api_key="any")
    answer = patched.create(messages=MESSAGES, response_model=Weather, max_tokens=100, max_retries=0, **GREEDY)
    assert isinstance(answer, Weather)


def partial(client: openai.OpenAI, model: str) -> None:
    """An object that fills up while it streams."""
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        patched.chat.completions.create_partial(
            model=model, messages=MESSAGES, response_model=Weather, max_tokens=100, max_retries=0, **GREEDY
        )
    )
    assert len(parts) > 1
    assert Weather.model_validate(parts[-1].model_dump())


def with_completion(client: openai.OpenAI, model: str) -> None:
    patched = instructor.from_openai(client)
    answer, completion = patched.chat.completions.create_with_completion(
        model=model, messages=MESSAGES, response_model=Weather, max_tokens=100, max_retries=0, **GREEDY
    )
    assert isinstance(answer, Weather)
    assert completion.usage.completion_tokens > 0


def responses(client: openai.OpenAI, model: str) -> None:
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    answer = patched.responses.create(
        model=model, input=MESSAGES, response_model=Weather, max_output_tokens=100, max_retries=0, temperature=0.0
    )
    assert isinstance(answer, Weather)


CHECKS: tuple[Check, ...] = (tools, tools_strict, json_schema, from_provider, partial, with_completion, responses)


def main(url: str, model: str) -> int:
    """Run all of them; 0 if all passed."""
    return run(CHECKS, lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0), model)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
