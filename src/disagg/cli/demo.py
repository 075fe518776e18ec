"""`disagg demo`: real prompts on a running cluster, streamed to the terminal, then what moved where.

    one prompt -> several at once -> a second turn that shares the first one's prefix -> table -> an agent -> verdict

The verdict is an exit status: 0 only if every answer has text and came through both pools, with KV moved in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from disagg.cli.demo_agent import show_agent
from disagg.cli.launch.progress import StillBusy
from disagg.cli.up import Launcher, build_config, with_cluster
from disagg.client import Client, Finished
from disagg.cluster.config.cluster_config import ClusterConfig, override
from disagg.cluster.control.cluster import Cluster
from disagg.cluster.models.catalog import import_model, resolve_model
from disagg.cluster.system.process_tools import StopFlag
from disagg.cluster.system.program import command
from disagg.cluster.system.terminal import format_bytes
from disagg.proto.errors import ConfigError, InternalError

SYSTEM = (
    "You are a helpful assistant. You answer in two or three short sentences, in plain words, and you stay with the "
    "facts. When you are asked about cities, countries, rivers or mountains, you name the place first and then say "
    "what it is known for. When you are asked about animals or plants, you say where they live and what they need. "
    "You do not make lists, you do not repeat the question, and you do not say that you are an assistant."
)
"""A system prompt that is long enough for a second turn to find several of its blocks in the caches."""

FIRST_QUESTION = "Tell me about the Amazon river."
SECOND_QUESTION = "What can a visitor see there?"
PARALLEL_QUESTIONS = (
    "Why is the sky blue?",
    "How do bees make honey?",
    "What is the difference between a river and a lake?",
)
MAX_TOKENS = 96
PREFILL_CACHE_BYTES, DECODE_CACHE_BYTES = 40 << 20, 128 << 20
"""Device caches: the one of prompts holds one agent, and not another client's prompt beside it."""

Chat = list[dict[str, str]]
"""Messages of a chat, each with `role` and `content`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One answer, what the client measured, and the cluster's explanation of it."""

    name: str
    """Number of its scene, with a letter where the scene has several answers."""
    text: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None
    """Mean time per token in seconds; None for an answer of one token."""
    prefill_worker: str
    """Id of the prefill worker; empty when none took part."""
    decode_worker: str
    """Id of the decode worker; empty when none took part."""
    prefill_cached_tokens: int
    decode_cached_tokens: int
    kv_bytes: int
    transport: str


def demo_config(
    *,
    model: str | None = None,
    prefill: int | None = None,
    decode: int | None = None,
    transport: str = "auto",
) -> ClusterConfig:
    """The default configuration with small caches, where every prompt is handed over. Raises `ConfigError`."""
    return override(
        build_config(None, model=model, port=0, prefill=prefill, decode=decode),
        {
            "placement.local_prefill": "never",
            "pools.prefill.kv_cache_bytes": PREFILL_CACHE_BYTES,
            "pools.decode.kv_cache_bytes": DECODE_CACHE_BYTES,
            "transfer.transport": transport,
            "kv_cache.fetch": True,
        },
    )


def run_demo(config: ClusterConfig, launcher: Launcher, console: Console, log_dir: Path | None = None) -> int:
    """Start a cluster, show a hand-over on it, stop it; returns the demonstration's exit status."""

    def show(cluster: Cluster, stop: StopFlag) -> int:
        with stop.interruptible():
            status = show_demo(cluster.address, console)
        console.print(f"next: {command('up')}, to have one that stays", style="dim", markup=False, soft_wrap=True)
        return status

    ensure_model(config, console)
    return with_cluster(config, launcher, console, log_dir, show)


def ensure_model(config: ClusterConfig, console: Console) -> None:
    """Import the default model where it is configured and missing; any other model is left to the user."""
    if config.model.path is not None:
        return
    try:
        resolve_model(config.model.served_name)
    except ConfigError:
        with StillBusy(console) as busy:
            import_model(config.model.served_name, progress=busy.begin)


def show_demo(address: str, console: Console) -> int:
    """Run all scenes against the gateway at `address`, and return the exit status. Raises `DisaggError` when a request
    fails."""
    with Client(address) as client:
        outcomes = run_scenes(client, console)
        pids = {worker.worker_id: worker.pid for worker in client.cluster_state().workers}
        console.print("\n")
        console.print(make_table(outcomes, pids))
        show_agent(client, client.models()[0].name, console)
    console.print()
    return verdict(outcomes, console)


# ---------------------------------------------------------------- scenes


def run_scenes(client: Client, console: Console) -> list[Outcome]:
    """Run all scenes in order; the second turn is the last outcome."""
    model = client.models()[0].name
    _title(console, "1. One prompt, streamed as it is made")
    first_turn = _chat(FIRST_QUESTION)
    _question(console, FIRST_QUESTION)
    first = ask(client, model, "1", first_turn, _printer(console))

    _title(console, f"2. {len(PARALLEL_QUESTIONS)} prompts at once, shown as they finish")
    several = _ask_together(client, model, console)

    _title(console, "3. A second turn: its prefix, the first turn, is in the caches already")
    history = [*first_turn, {"role": "assistant", "content": first.text}, {"role": "user", "content": SECOND_QUESTION}]
    _question(console, SECOND_QUESTION)
    second = ask(client, model, "3", history, _printer(console))
    return [first, *several, second]


def ask(client: Client, model: str, name: str, chat: Chat, on_text: Callable[[str], None]) -> Outcome:
    """Make one greedy request, and pass its text to `on_text` as it comes. Raises `DisaggError` when it fails."""
    sent = time.perf_counter()
    first = last = sent
    pieces: list[str] = []
    num_tokens = 0
    finished: Finished | None = None
    for delta in client.stream(chat, model=model, max_tokens=MAX_TOKENS, temperature=0.0):
        if delta.token_ids:
            last = time.perf_counter()
            first = last if num_tokens == 0 else first
            num_tokens += len(delta.token_ids)
        pieces.append(delta.text)
        on_text(delta.text)
        finished = delta.finished
    if finished is None:
        raise InternalError(f"answer {name}: the stream ended without saying why")
    trace = client.explain(finished.request_id)
    return Outcome(
        name=name,
        text="".join(pieces),
        prompt_tokens=finished.usage.prompt_tokens,
        output_tokens=num_tokens,
        ttft_s=first - sent,
        tpot_s=(last - first) / (num_tokens - 1) if num_tokens > 1 else None,
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        prefill_cached_tokens=trace.prefill_cached_tokens,
        decode_cached_tokens=trace.decode_cached_tokens,
        kv_bytes=trace.kv_bytes,
        transport=trace.transport,
    )


def _ask_together(client: Client, model: str, console: Console) -> list[Outcome]:
    """Ask all parallel questions at once, and print each answer when it is complete. The order is that of the
    questions."""
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(len(PARALLEL_QUESTIONS)) as threads:
        running = {
            threads.submit(ask, client, model, f"2{chr(ord('a') + i)}", _chat(question), _silent): i
            for i, question in enumerate(PARALLEL_QUESTIONS)
        }
        for done in as_completed(running):
            i = running[done]
            outcomes[i] = done.result()
            _question(console, PARALLEL_QUESTIONS[i])
            console.print(outcomes[i].text.strip(), markup=False, highlight=False)
    return [outcomes[i] for i in sorted(outcomes)]


def _chat(question: str) -> Chat:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def _silent(text: str) -> None:
    """Discards the text of a stream."""


def _printer(console: Console) -> Callable[[str], None]:
    """A function that prints pieces of text one after the other, as they come."""

    def print_piece(text: str) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    return print_piece


def _title(console: Console, text: str) -> None:
    console.print(f"\n\n[bold]{escape(text)}[/bold]", highlight=False)


def _question(console: Console, text: str) -> None:
    console.print(f"\n[cyan]> {escape(text)}[/cyan]", highlight=False)


# ---------------------------------------------------------------- what is shown and decided


def make_table(outcomes: Sequence[Outcome], pids: dict[str, int]) -> Table:
    """One row per answer, at most 80 columns wide. `pids` are the workers' process ids."""
    table = Table(
        title="What the cluster did", title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("", style="bold")
    for column in ("prompt\ntokens", "cached\non P / D", "output\ntokens", "TTFT\nms", "TPOT\nms", "KV\nmoved"):
        table.add_column(column, justify="right", no_wrap=True, header_style="dim")
    table.add_column("from process\nto process", no_wrap=True, header_style="dim")
    for outcome in outcomes:
        table.add_row(*_row(outcome, pids))
    return table


def _row(outcome: Outcome, pids: dict[str, int]) -> tuple[str, ...]:
    return (
        outcome.name,
        str(outcome.prompt_tokens),
        f"{outcome.prefill_cached_tokens} / {outcome.decode_cached_tokens}",
        str(outcome.output_tokens),
        f"{outcome.ttft_s * 1e3:.0f}",
        "-" if outcome.tpot_s is None else f"{outcome.tpot_s * 1e3:.1f}",
        f"{format_bytes(outcome.kv_bytes)}\n{outcome.transport}",
        f"{_process(outcome.prefill_worker, pids)}\n{_process(outcome.decode_worker, pids)}",
    )


def _process(worker_id: str, pids: dict[str, int]) -> str:
    return f"{worker_id} (pid {pids.get(worker_id, '?')})" if worker_id else "-"


def problems(outcomes: Sequence[Outcome]) -> list[str]:
    """Reasons why the demonstration failed; empty when every answer came through both pools and the second turn hit a
    cache."""
    found = [f"answer {outcome.name}: {problem}" for outcome in outcomes for problem in _problems_of(outcome)]
    if outcomes and not max(outcomes[-1].prefill_cached_tokens, outcomes[-1].decode_cached_tokens):
        found.append(f"answer {outcomes[-1].name}: no part of its prefix was found in a cache")
    return found


def _problems_of(outcome: Outcome) -> list[str]:
    found = []
    if not outcome.text.strip() or outcome.output_tokens == 0:
        found.append("the answer is empty")
    if not outcome.prefill_worker:
        found.append("no prefill worker took part")
    if not outcome.decode_worker:
        found.append("no decode worker took part")
    if outcome.decode_worker and outcome.prefill_worker == outcome.decode_worker:
        found.append(f"{outcome.decode_worker} did both prefill and decode")
    if outcome.kv_bytes == 0:  # the last prompt token is never cached, so something always moves
        found.append("no KV moved")
    return found


def verdict(outcomes: Sequence[Outcome], console: Console) -> int:
    """Print what `problems` found, and return the exit status."""
    found = problems(outcomes)
    for problem in found:
        console.print(f"[red]failed[/red] {escape(problem)}", highlight=False)
    if found:
        return 1
    moved = format_bytes(sum(outcome.kv_bytes for outcome in outcomes))
    console.print(f"[green]ok[/green] every answer came through both pools; {moved} of KV moved", highlight=False)
    return 0
