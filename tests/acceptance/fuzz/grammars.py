"""Does a cluster survive whatever form clients ask of its answers, and what do other tenants see of it?

    python -m tests.acceptance.fuzz.grammars [--count 100000] [--first 0] [--connections 4] [--json FILE]

A prefill and a decode worker with a tiny model, in processes. One tenant asks for the cases of `grammar_cases.py`, each
by its number, in the fields of one of four APIs; what is taken is answered with a few tokens, so workers compile and
use it. Another tenant reads a stream: alone, beside harmless schemas that are all new, as many at a time, and beside
the cases. Exit status 1 where a process ended, an answer is neither 200 nor an error that names a field, or the stream
broke.

died           processes of the cluster that are gone or are others than at the start
problems       answers that must not be
taken_share    of the cases
slowest_ms     the slowest answer to a case
gap_*_ms       between two messages of the other tenant's stream
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx

from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.proto.errors import DisaggError
from tests.acceptance.fuzz.grammar_cases import Case, make_case
from tests.support.reports import percentile, positive, print_table, report, write_json

MODEL: Final = "tiny"
_KEYS: Final = {"other": "other-key-0123456789abcdef", "fuzz": "fuzz-key-0123456789abcdef"}
_MAX_TOKENS: Final = 6
_QUIET_S: Final = 20.0
_BUSY_S: Final = 0.2
_TIMEOUT_S: Final = 60.0
_NAMES: Final = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "choice": "choice"}
"""Of `structured_outputs`."""


@dataclass(slots=True)
class Outcome:
    """Of many cases."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: int = -1


def request_of(number: int, case: Case) -> tuple[str, dict[str, Any]]:
    """Path and body: a schema in the fields of four APIs in turn, all else in those of one."""
    message = {"role": "user", "content": "a"}
    chat = {"model": MODEL, "messages": [message], "max_tokens": 1 + number % _MAX_TOKENS, "seed": number}
    outputs = {_NAMES[case.kind]: case.value}
    if case.kind != "json_schema" or number % 5 == 0:
        text = {"model": MODEL, "prompt": "a", "max_tokens": 1 + number % _MAX_TOKENS, "seed": number}
        return "/v1/completions", {**text, "structured_outputs": outputs}
    form = {"type": "json_schema", "name": "n", "schema": case.value}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": case.value}}}
    tools = [{"type": "function", "function": function}]
    match number % 5:
        case 1:
            return "/v1/chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": form}}
        case 2:
            return "/v1/chat/completions", {**chat, "tools": tools, "tool_choice": "required"}
        case 3:
            limit = {"max_output_tokens": chat["max_tokens"]}
            return "/v1/responses", {"model": MODEL, "input": "a", "text": {"format": form}, **limit}
    wanted = {"format": {"type": "json_schema", "schema": case.value}}
    return "/v1/messages", {key: chat[key] for key in ("model", "messages", "max_tokens")} | {"output_config": wanted}


def harmless(number: int) -> tuple[str, dict[str, Any]]:
    """A schema that is new, and takes the compiler a millisecond."""
    properties = {f"a{number}": {"type": "string"}, "b": {"type": "integer"}}
    return request_of(number, Case("json_schema", {"type": "object", "properties": properties, "required": ["b"]}))


def hostile(number: int) -> tuple[str, dict[str, Any]]:
    """The case of that number."""
    return request_of(number, make_case(number))


async def send(http: httpx.AsyncClient, number: int, path: str, body: dict[str, Any], outcome: Outcome) -> None:
    """One request, and what came of it."""
    began = time.monotonic()
    try:
        reply = await http.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
    except (httpx.HTTPError, UnicodeEncodeError) as error:
        outcome.problems.append(f"case {number}: {type(error).__name__}: {error}")
        return
    seconds = time.monotonic() - began
    if seconds > outcome.slowest_s:
        outcome.slowest_s, outcome.slowest = seconds, number
    if reply.status_code == 200:
        outcome.counts["taken"] += 1
        return
    refusal = reply.json().get("error", {}) if reply.status_code == 400 else {}
    message = str(refusal.get("message"))
    if ": " not in message:
        outcome.problems.append(f"case {number}: {reply.status_code}: {reply.text[:200]}")
        return
    outcome.counts[_reason(message)] += 1


def _reason(message: str) -> str:
    for part in ("fails on it", "of a processor", "of memory", "cannot be kept exactly", "ended with it", "no token"):
        if part in message:
            return part
    return "refused"


async def ask_all(
    http: httpx.AsyncClient, numbers: Iterator[int], make: Callable[[int], tuple[str, dict[str, Any]]], width: int
) -> Outcome:
    """Send all of them, so many at a time."""
    outcome = Outcome()

    async def ask() -> None:
        for number in numbers:
            await send(http, number, *make(number), outcome)
            if sum(outcome.counts.values()) % 5000 == 0:
                print(f"{number}: {dict(outcome.counts)}", flush=True)

    await asyncio.gather(*(ask() for _ in range(width)))
    return outcome


class Reader:
    """The other tenant: one stream after the other."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.times: list[float] = []
        self.problems: list[str] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            try:
                async for delta in self._client.stream("a", ignore_eos=True, max_tokens=400, temperature=0.0):
                    if delta.token_ids:
                        self.times.append(time.monotonic())
            except DisaggError as error:
                self.problems.append(f"the other tenant: {error}")
                await asyncio.sleep(_BUSY_S)

    def gaps_ms(self, begin: float, end: float) -> list[float]:
        """Between two messages, those between two streams among them."""
        return [1e3 * (later - earlier) for earlier, later in pairwise(self.times) if begin <= later <= end]


async def run(cluster: ProcessCluster, options: argparse.Namespace) -> tuple[Outcome, dict[str, float], list[str]]:
    """All cases, figures, and what was wrong."""
    headers = {"authorization": f"Bearer {_KEYS['fuzz']}"}
    limits = httpx.Limits(max_connections=options.connections)
    url = f"http://{cluster.http_address}"
    before = pids(cluster)
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, timeout=_TIMEOUT_S, limits=limits) as http,
        AsyncClient(cluster.address, api_key=_KEYS["other"]) as client,
    ):
        await ask_all(http, iter(range(-20, 0)), harmless, 1)  # workers load their vocabularies
        reader = Reader(client)
        task = asyncio.create_task(reader.run())
        marks = [time.monotonic()]
        await asyncio.sleep(options.quiet_s)
        marks.append(time.monotonic())
        until = marks[-1] + options.quiet_s
        new = itertools.takewhile(lambda _: time.monotonic() < until, itertools.count(1 << 40))
        beside = await ask_all(http, new, harmless, options.connections)
        marks.append(time.monotonic())
        outcome = await ask_all(
            http, iter(range(options.first, options.first + options.count)), hostile, options.connections
        )
        marks.append(time.monotonic())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    died = [name for name, pid in pids(cluster).items() if pid != before[name]]
    figures = {
        "cases": float(options.count),
        "died": float(len(died)),
        "taken_share": outcome.counts["taken"] / options.count,
        "slowest_ms": 1e3 * outcome.slowest_s,
        "cases_per_s": options.count / (marks[3] - marks[2]),
        "harmless_per_s": sum(beside.counts.values()) / (marks[2] - marks[1]),
    }
    for name, begin, end in zip(("alone", "harmless", "cases"), marks, marks[1:], strict=False):
        gaps = reader.gaps_ms(begin, end)
        for percent in (50, 99):
            figures[f"gap_{name}_p{percent}_ms"] = percentile(gaps, percent)
        figures[f"gap_{name}_max_ms"] = max(gaps)
    problems = [*outcome.problems, *beside.problems, *reader.problems, *(f"{name} ended" for name in died)]
    figures["problems"] = float(len(problems))
    return outcome, figures, problems


def pids(cluster: ProcessCluster) -> dict[str, int]:
    """Of all processes of a cluster, by name."""
    return {name: cluster.pid(name) for name in ("gateway", *(worker.worker_id for worker in cluster.workers))}


def main() -> int:
    """Fuzz, print, write; the exit status."""
    from tests.support.tiny_models import make_checkpoint

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=positive, default=100_000, help="cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--connections", type=positive, default=4, help="cases at a time")
    parser.add_argument(
        "--quiet-s", type=float, default=_QUIET_S, help="for the stream alone, and beside harmless ones"
    )
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disagg-fuzz-") as name:
        folder = make_checkpoint("llama3_rope", Path(name) / "tiny")
        keys = Path(name) / "keys.yaml"
        keys.touch(mode=0o600)
        keys.write_text("".join(f"- tenant: {who}\n  key: {key}\n" for who, key in _KEYS.items()), encoding="utf-8")
        config = {
            "model": {"path": str(folder), "name": MODEL, "dtype": "float32"},
            "gateway": {"port": 0, "http_port": 0, "api_keys": str(keys)},
            "transfer": {"transport": "shm"},
        }
        with ProcessCluster(parse_config(config)) as cluster:
            outcome, figures, problems = asyncio.run(run(cluster, options))
    print_table("Cases", ("outcome", "cases"), [(what, str(count)) for what, count in outcome.counts.most_common()])
    print_table("Figures", ("", ""), [(what, f"{value:.2f}") for what, value in figures.items()])
    print(f"slowest: case {outcome.slowest}")
    for problem in problems[:50]:
        print(problem)
    if options.json is not None:
        rows = [{"outcome": what, "cases": count} for what, count in outcome.counts.items()]
        write_json(options.json, report(rows, {what: round(value, 3) for what, value in figures.items()}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
