"""The agent of the demonstration against a stand-in for the client: its history grows, other prompts come between its
turns, and both are compared."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest
from rich.console import Console

from disagg.cli import demo_agent
from disagg.cli.demo_agent import AgentTurn, comparison
from disagg.client import Client, Delta, Finished, Usage
from disagg.proto.errors import InternalError


class FakeClient:
    """Answers with two words; everything but the last 100 tokens of a prompt was known."""

    def __init__(self, *, finishes: bool = True) -> None:
        self.prompts: list[Any] = []
        self._finishes = finishes

    def stream(self, prompt: Any, *, model: str, max_tokens: int, temperature: float) -> Iterator[Delta]:
        assert (model, temperature) == ("tiny", 0.0)
        self.prompts.append((list(prompt), max_tokens))
        yield Delta("All ", (1,))
        yield Delta("well.", (2,))
        if self._finishes:
            yield Delta("", (), Finished("stop", Usage(1000 + len(self.prompts), 901, 2), "r"))


def test_each_turn_has_the_whole_history_and_another_prompt_comes_before_the_next() -> None:
    fake = FakeClient()
    turns, others = demo_agent.run_agent(cast(Client, fake), "tiny")
    assert [turn.prompt_tokens for turn in turns] == [1001, 1003, 1005, 1007, 1009]
    assert [turn.computed_tokens for turn in turns] == [100, 102, 104, 106, 108]
    assert [other.prompt_tokens for other in others] == [1002, 1004, 1006, 1008]
    chats = [prompt for prompt, max_tokens in fake.prompts if max_tokens == demo_agent.MAX_TOKENS]
    assert [len(chat) for chat in chats] == [1, 3, 5, 7, 9]
    assert all(after[: len(before)] == before for before, after in itertools.pairwise(chats))
    assert chats[1][1] == {"role": "assistant", "content": "All well."}
    ids = [prompt for prompt, max_tokens in fake.prompts if max_tokens == 1]
    assert {len(prompt) for prompt in ids} == {demo_agent.OTHER_TOKENS}
    assert len({tuple(prompt) for prompt in ids}) == 4


def test_later_turns_are_compared_with_the_pace_of_the_other_prompts() -> None:
    turns = [
        AgentTurn(prompt_tokens=n, computed_tokens=100, ttft_s=s) for n, s in ((900, 9.0), (1000, 0.1), (1200, 0.3))
    ]
    others = [AgentTurn(prompt_tokens=500, computed_tokens=500, ttft_s=s) for s in (0.5, 1.5)]
    assert (
        comparison(turns, others)
        == "turns 2 to 3: first token after 200 ms; with all of the prompt computed about 2200 ms"
    )


def test_the_scene_shows_every_turn() -> None:
    text = io.StringIO()
    demo_agent.show_agent(cast(Client, FakeClient()), "tiny", Console(file=text, width=100))
    rows = [line.split()[:3] for line in text.getvalue().splitlines() if line[:2].strip().isdigit()]
    assert rows == [[str(n + 1), str(1001 + 2 * n), str(100 + 2 * n)] for n in range(5)]


def test_a_stream_without_an_end_is_an_error() -> None:
    with pytest.raises(InternalError, match="the stream of the agent ended without saying why"):
        demo_agent.run_agent(cast(Client, FakeClient(finishes=False)), "tiny")
