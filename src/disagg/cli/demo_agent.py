"""The last scene of `disagg demo`: an agent of five turns, whose history the prefill worker loses between two of them.

    a log to read -> answer -> more of it -> answer -> ...     beside: another client's prompts, as long as the cache

What the prefill worker has lost the decode worker still has, so it is fetched from there and only the new turn is
computed. What computing takes is seen beside it, by the prompts of the other client, which nobody has.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from disagg.client import Client, Finished
from disagg.proto.errors import InternalError

NUM_TURNS = 5
FIRST_LINES, MORE_LINES = 28, 3
"""Lines of the log at the first turn, and at each later one."""
MAX_TOKENS = 24
OTHER_TOKENS = 1536
_TASK = "You watch the log of a cluster. Say in one sentence what happened last.\n\n"
_WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
_EVENTS = ("is ready", "took a prompt of 812 tokens", "sent its blocks", "ended an answer", "reported its load")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """One prompt, its history included, and what a client measured."""

    prompt_tokens: int
    computed_tokens: int
    ttft_s: float
    text: str = ""


def run_agent(client: Client, model: str) -> tuple[list[AgentTurn], list[AgentTurn]]:
    """The turns of the agent, and the prompts of the other client between them. Raises `DisaggError` when one fails."""
    turns: list[AgentTurn] = []
    others: list[AgentTurn] = []
    chat: list[dict[str, str]] = []
    line = 0
    for number in range(NUM_TURNS):
        count = MORE_LINES if number else FIRST_LINES
        text = "\n".join(_line(line + index) for index in range(count))
        line += count
        chat.append({"role": "user", "content": text if number else _TASK + text})
        turns.append(_ask(client, model, chat, MAX_TOKENS))
        chat.append({"role": "assistant", "content": turns[-1].text})
        if number < NUM_TURNS - 1:
            rng = random.Random(number)
            others.append(_ask(client, model, [rng.randrange(1000, 9000) for _ in range(OTHER_TOKENS)], 1))
    return turns, others


def _line(number: int) -> str:
    rng = random.Random(number)
    clock = f"12:{number // 60:02}:{number % 60:02}"
    return f"{clock} {rng.choice(_WORKERS)} {rng.choice(_EVENTS)}, {rng.randrange(1000)} of 4096 blocks in use"


def _ask(client: Client, model: str, prompt: list[dict[str, str]] | list[int], max_tokens: int) -> AgentTurn:
    sent = time.perf_counter()
    first_s: float | None = None
    pieces: list[str] = []
    finished: Finished | None = None
    for delta in client.stream(prompt, model=model, max_tokens=max_tokens, temperature=0.0):
        if delta.token_ids and first_s is None:
            first_s = time.perf_counter() - sent
        pieces.append(delta.text)
        finished = delta.finished
    if finished is None or first_s is None:
        raise InternalError("the stream of the agent ended without saying why")
    usage = finished.usage
    return AgentTurn(
        prompt_tokens=usage.prompt_tokens,
        computed_tokens=usage.prompt_tokens - usage.cached_tokens,
        ttft_s=first_s,
        text="".join(pieces),
    )


def agent_table(turns: Sequence[AgentTurn]) -> Table:
    """One row for each turn."""
    table = Table(title="The agent", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("turn", style="bold")
    for column in ("prompt\ntokens", "of these\ncomputed", "TTFT\nms"):
        table.add_column(column, justify="right", no_wrap=True, header_style="dim")
    for number, turn in enumerate(turns, start=1):
        table.add_row(str(number), str(turn.prompt_tokens), str(turn.computed_tokens), f"{turn.ttft_s * 1e3:.0f}")
    return table


def comparison(turns: Sequence[AgentTurn], others: Sequence[AgentTurn]) -> str:
    """What the later turns took beside what computing their prompts would have taken, at the pace of the other client's
    prompts."""
    token_s = sum(other.ttft_s for other in others) / sum(other.prompt_tokens for other in others)
    later = turns[1:]
    took_s = sum(turn.ttft_s for turn in later) / len(later)
    whole_s = token_s * sum(turn.prompt_tokens for turn in later) / len(later)
    took, whole = f"{took_s * 1e3:.0f} ms", f"{whole_s * 1e3:.0f} ms"
    return f"turns 2 to {len(turns)}: first token after {took}; with all of the prompt computed about {whole}"


def show_agent(client: Client, model: str, console: Console) -> None:
    """Run the scene and print it."""
    console.print(
        "\n\n[bold]4. An agent of five turns; between them other prompts take its place on the prefill worker[/bold]",
        highlight=False,
    )
    turns, others = run_agent(client, model)
    console.print()
    console.print(agent_table(turns))
    console.print(f"\n{comparison(turns, others)}", markup=False, highlight=False, soft_wrap=True)
