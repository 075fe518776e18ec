"""Are answers in bf16 the same, bit for bit, whoever computes them? A real `disagg up` with two prefill and two decode
workers and a real checkpoint.

    python -m tests.acceptance.faults.bits [--requests 1000] [--json FILE]

The same requests are answered in several passes, and all answers are compared with those of the first:

reference    eight at a time, without faults, drafts and prefix hits
one          one at a time (a part of the requests); from here on with drafts by lookup
many         32 at a time
before       eight at a time (a part of the requests)
hits         the same again: their prompts are in the prefix cache
kills        workers are killed in turn, each as soon as all are ready again: SIGKILL, under load

Half of the prompts are random tokens, after which many tokens are about equally probable, and half are texts; half of
the answers are greedy, the others drawn. A pass must have what it is about (hits, kills, attempts that were lost,
drafts that were accepted), or nothing was tried. Exit status 1 if an answer differs or is missing, or a pass tried
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from disagg.client import AsyncClient
from disagg.cluster.models.catalog import DEFAULT_MODEL, resolve_model
from disagg.proto.errors import DisaggError
from tests.acceptance.faults.cluster import Up
from tests.support.pace import in_flight
from tests.support.reports import REPOSITORY, positive, print_table, report, write_json

TEXTS = ("docs/architecture.md", "docs/faults.md", "docs/how-a-request-is-served.md")
LENGTHS = (20, 300)
"""Tokens of a random prompt, characters of a text divided by four: least and most."""
VICTIMS = ("decode-0", "prefill-0", "decode-1", "prefill-1")
LOST = "worker_lost"
"""Event that the router counts for each attempt that a lost worker had."""
ACCEPTED = "disagg_engine_accepted_tokens_total"
WITH_DRAFTS = ("many", "hits")
"""Passes in which drafts must be accepted."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request."""

    prompt: str | tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a request was answered."""

    token_ids: tuple[int, ...]
    cached_tokens: int = 0
    error: str = ""


@dataclass(kw_only=True)
class Pass:
    """All answers of a pass, by number of the request."""

    name: str
    answers: dict[int, Given] = field(default_factory=dict)
    num_kills: int = 0
    num_lost: int = 0
    """Attempts that were lost with their workers."""
    num_accepted: int = 0
    """Drafts that became tokens; of workers that are not killed."""
    elapsed_s: float = 0.0

    def row(self, reference: Pass) -> dict[str, Any]:
        """Its figures; answers are compared with the reference's."""
        given = self.answers.values()
        return {
            "pass": self.name,
            "answers": len(given),
            "failed": sum(bool(one.error) for one in given),
            "differing": sum(
                not one.error and one.token_ids != reference.answers[number].token_ids
                for number, one in self.answers.items()
            ),
            "with_hits": sum(one.cached_tokens > 0 for one in given),
            "kills": self.num_kills,
            "lost_attempts": self.num_lost,
            "accepted_drafts": self.num_accepted,
            "elapsed_s": round(self.elapsed_s, 1),
            "errors": sorted({one.error for one in given if one.error})[:3],
        }


def tried_nothing(row: dict[str, Any]) -> str:
    """Why a pass says nothing; empty for one that tried what it is about."""
    if row["pass"] == "hits" and row["with_hits"] < row["answers"] / 2:
        return "too few prompts were in the prefix cache"
    if row["pass"] == "reference" and row["with_hits"]:
        return "prompts of the reference were in the prefix cache"
    if row["pass"] in WITH_DRAFTS and not row["accepted_drafts"]:
        return "no draft was accepted"
    if row["pass"] == "kills" and not (row["kills"] and row["lost_attempts"]):
        return "no attempt was lost"
    return ""


def plan(count: int, vocab_size: int, texts: Sequence[str]) -> list[Asked]:
    """Requests in turn with random tokens and with a part of a text, and in turn greedy and drawn; the same each
    time."""
    dice = random.Random(43)
    asked = []
    for number in range(count):
        length = dice.randint(*LENGTHS)
        if number % 2:
            text = texts[number // 2 % len(texts)]
            start = dice.randrange(max(1, len(text) - 4 * length))
            prompt: str | tuple[int, ...] = text[start : start + 4 * length]
        else:
            prompt = tuple(dice.randrange(vocab_size) for _ in range(length))
        asked.append(Asked(prompt=prompt, temperature=0.7 if number // 2 % 2 else 0.0, seed=number))
    return asked


async def ask(client: AsyncClient, asked: Asked, num_tokens: int, salt: str) -> Given:
    """One answer, to its end."""
    token_ids: list[int] = []
    cached = 0
    try:
        deltas = client.stream(
            asked.prompt,
            max_tokens=num_tokens,
            temperature=asked.temperature,
            seed=asked.seed,
            ignore_eos=True,
            cache_salt=salt,
            timeout_s=TIMEOUT_S,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                token_ids += delta.token_ids
                if delta.finished is not None:
                    cached = delta.finished.usage.cached_tokens
    except (DisaggError, grpc.aio.AioRpcError) as error:
        return Given(token_ids=tuple(token_ids), error=f"{type(error).__name__}: {error}"[:200])
    return Given(token_ids=tuple(token_ids), cached_tokens=cached)


class Drill:
    """Passes over one cluster."""

    def __init__(self, up: Up, asked: Sequence[Asked], num_tokens: int) -> None:
        self._up = up
        self._asked = asked
        self._num_tokens = num_tokens

    async def run(self, name: str, concurrency: int, count: int, salt: str = "") -> Pass:
        """The first `count` requests, `concurrency` at a time. The prefix cache has what a pass of the name `salt` left
        of the same request, by default nothing."""
        result, began, accepted = Pass(name=name), time.monotonic(), await self._accepted()

        async def one(number: int) -> None:
            own = f"{salt or name} {number}"
            result.answers[number] = await ask(self._up.client, self._asked[number], self._num_tokens, own)

        await in_flight(one, range(count), concurrency)
        result.elapsed_s = time.monotonic() - began
        result.num_accepted = max(0, await self._accepted() - accepted)
        return result

    async def _accepted(self) -> int:
        """Drafts that became tokens, over all workers since their starts."""
        workers = [name for name in VICTIMS if name.startswith("decode")]
        return int(sum([await self._up.metric(ACCEPTED, instance=worker) for worker in workers]))

    async def run_with_kills(self, name: str, concurrency: int, pause_s: float) -> Pass:
        """All requests, while a worker dies `pause_s` after the last one that did is ready again."""
        lost = await self._up.metric("disagg_router_events_total", event=LOST)
        kills: list[str] = []
        killer = asyncio.create_task(self._kill_in_turn(kills, pause_s))
        try:
            result = await self.run(name, concurrency, len(self._asked))
        finally:
            killer.cancel()
            await asyncio.gather(killer, return_exceptions=True)
        await self._up.settled(120.0)
        result.num_kills = len(kills)
        result.num_lost = int(await self._up.metric("disagg_router_events_total", event=LOST) - lost)
        return result

    async def _kill_in_turn(self, kills: list[str], pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            victim = VICTIMS[len(kills) % len(VICTIMS)]
            os.kill(await self._up.pid(victim), signal.SIGKILL)
            kills.append(victim)
            await asyncio.sleep(pause_s)
            await self._up.settled(120.0)


def config_of(options: argparse.Namespace, model_path: Path, method: str) -> dict[str, Any]:
    """Of a cluster whose decode workers speculate by `method`."""
    pool = {"size": 2, "num_blocks": options.num_blocks}
    return {
        "model": {"path": str(model_path), "dtype": options.dtype},
        "pools": {"prefill": pool, "decode": {**pool, "speculation": {"method": method}}},
    }


async def drill(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All passes, as rows: the reference on a cluster without drafts, the others on one with."""
    model_path = resolve_model(options.model)
    texts = [re.sub(r"\s+", " ", (REPOSITORY / path).read_text(encoding="utf-8")) for path in TEXTS]
    few = max(1, options.requests // 4)
    passes: list[Pass] = []
    async with Up(config_of(options, model_path, "off")) as up:
        asked = plan(options.requests, (await up.client.models())[0].vocab_size, texts)
        say("reference")
        passes.append(await Drill(up, asked, options.output_tokens).run("reference", 8, len(asked)))
    async with Up(config_of(options, model_path, "lookup")) as up:
        runs = Drill(up, asked, options.output_tokens)
        for name, concurrency, count in (("one", 1, few), ("many", 32, len(asked)), ("before", 8, few)):
            say(name)
            passes.append(await runs.run(name, concurrency, count))
        say("hits")
        passes.append(await runs.run("hits", 8, few, salt="before"))
        say("kills")
        passes.append(await runs.run_with_kills("kills", 16, options.kill_pause_s))
        _, left = await up.emptied()
    rows = [each.row(passes[0]) for each in passes]
    rows[-1]["left"] = sum(left.values())
    return rows


def say(what: str) -> None:
    """Progress."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Named figures, and `met`: 1 if every answer came and none differs."""
    figures = {f"differing_{row['pass']}": float(row["differing"]) for row in rows[1:]}
    figures |= {
        "answers": float(sum(row["answers"] for row in rows[1:])),
        "differing": float(sum(row["differing"] for row in rows[1:])),
        "failed": float(sum(row["failed"] for row in rows)),
        "kills": float(sum(row["kills"] for row in rows)),
        "lost_attempts": float(sum(row["lost_attempts"] for row in rows)),
        "left": float(sum(row.get("left", 0) for row in rows)),
        "passes_without_effect": float(sum(bool(tried_nothing(row)) for row in rows)),
    }
    wrong = ("differing", "failed", "left", "passes_without_effect")
    return {**figures, "met": float(not any(figures[name] for name in wrong))}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a model of the cache, or a checkpoint folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=positive, default=1000)
    parser.add_argument("--output-tokens", type=positive, default=64)
    parser.add_argument("--num-blocks", type=positive, default=2048, help="KV blocks of each worker")
    parser.add_argument("--kill-pause-s", type=float, default=3.0, help="from ready to the next kill")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    return parser.parse_args(argv)


def main() -> int:
    """Exit status 0 if no answer differs."""
    options = parse_arguments()
    rows = asyncio.run(drill(options))
    summary = summarize(rows)
    columns = (
        "pass",
        "answers",
        "failed",
        "differing",
        "with_hits",
        "kills",
        "lost_attempts",
        "accepted_drafts",
        "elapsed_s",
    )
    print_table("The same bits", columns, [[str(row[name]) for name in columns] for row in rows])
    for row in rows:
        if why := tried_nothing(row) or "; ".join(row["errors"]):
            print(f"{row['pass']}: {why}")
    if options.json:
        write_json(options.json, report(rows, summary))
    return 0 if summary["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
