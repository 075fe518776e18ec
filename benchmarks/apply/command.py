"""What requests see while a cluster gets one configuration after another.

    python -m benchmarks.apply [--json FILE]

    start ── references of each version, from clusters of their own ── the cluster under load ──┐
        thread counts ── KV sizes ── pool sizes ── weights of another version ── int8 ── mode ──┘

Requests come at random times whatever becomes of those before (open loop), and are decoded greedily. An answer has to
be that of one version: of the one that ran when its request came, or of one that was applied before it ended. So a
request that comes after an `apply` is done is altered, too, if an older version answers it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from disagg.cli.operations.apply import ApplyOptions, run_apply
from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.cluster.models.catalog import resolve_model
from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import ConfigError, DisaggError
from tests.support.reports import positive, print_table, report, write_json

Row = dict[str, Any]
Version = tuple[str, str]
"""Folder of the weights, and their quantization."""
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who",
    "List the planets of the solar system, from the sun outwards:",
    "def fibonacci(n):\n",
    "In the year 1492",
    "The difference between a cache and a buffer is that a cache",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "Water boils at a lower temperature on a mountain because",
)
READY_S, APPLY_S, TAIL_REQUESTS = 240.0, 600.0, 6
NOISE = 0.02
"""Of the other version's weights, in parts of their standard deviation: as much as a further step of training."""


def other_version(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint with other weights and the same tokenizer."""
    target.mkdir()
    for file in folder.iterdir():
        if file.name not in ("model.safetensors", "manifest.json"):
            shutil.copy(file, target)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator)
        weights[name] = (weight.float() + NOISE * weight.float().std() * noise).to(weight.dtype)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def changes_of(model: str, first: Path, second: Path) -> list[tuple[str, dict[str, Any]]]:
    """What is applied, as (name, configuration) in turn; the first one is what the cluster starts with."""
    pool = {"cores": "none", "num_blocks": 1024, "num_threads": 1, "max_num_seqs": 32}
    start: dict[str, Any] = {
        "model": {"name": model, "path": str(first)},
        "gateway": {"port": 0},
        "pools": {"prefill": {**pool, "size": 1}, "decode": {**pool, "size": 2}},
    }
    steps = [("start", start)]

    def then(name: str, **sections: dict[str, Any] | str) -> None:
        before = steps[-1][1]
        merged = {
            key: {**before.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in sections.items()
        }
        steps.append((name, {**before, **merged}))

    prefill, decode = start["pools"]["prefill"], start["pools"]["decode"]
    then("thread counts", pools={"prefill": {**prefill, "num_threads": 2}, "decode": {**decode, "num_threads": 2}})
    prefill, decode = ({**prefill, "num_threads": 2}, {**decode, "num_threads": 1})
    then("KV sizes and threads", pools={"prefill": prefill, "decode": {**decode, "num_blocks": 1536}})
    decode = {**decode, "num_blocks": 1536}
    then("pool sizes", pools={"prefill": {**prefill, "size": 2}, "decode": {**decode, "size": 1}})
    then("weights", model={"path": str(second)})
    then("quantization", model={"quantization": "int8"})
    then("mode", mode="elastic", pools={"workers": {**pool, "size": 2}})
    return steps


def version_of(config: dict[str, Any]) -> Version:
    """The version of the model whose answers a configuration gives."""
    return config["model"]["path"], config["model"].get("quantization", "none")


@dataclass
class Request:
    """One request, as its client saw it. Times are of the monotonic clock."""

    prompt: int
    began: float
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    gap: float = 0.0
    """Longest time between two messages, and until the first."""
    error: str = ""

    async def run(self, client: AsyncClient, num_tokens: int) -> None:
        """Read the stream to its end."""
        last = self.began
        try:
            async for delta in client.stream(
                PROMPTS[self.prompt], max_tokens=num_tokens, temperature=0.0, ignore_eos=True
            ):
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last), now
                self.tokens += delta.token_ids
        except DisaggError as error:
            self.error = repr(error)
        self.ended = time.monotonic()


async def answers_of(address: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """The answers to all prompts, one after the other."""
    found = []
    async with AsyncClient(address) as client:
        for number in range(num_prompts):
            request = Request(number, time.monotonic())
            await request.run(client, num_tokens)
            if request.error:
                raise LaunchError(f"no reference: {request.error}")
            found.append(request.tokens)
    return found


def references(
    steps: Sequence[tuple[str, dict[str, Any]]], num_prompts: int, num_tokens: int
) -> dict[Version, list[list[int]]]:
    """The answers of each version, of a cluster that was started with it."""
    found: dict[Version, list[list[int]]] = {}
    for _, config in steps:
        version = version_of(config)
        if version not in found:
            pools = {name: {**pool, "size": 1} for name, pool in config["pools"].items()}
            began = time.monotonic()
            with ProcessCluster(parse_config({**config, "pools": pools})) as cluster:
                found[version] = asyncio.run(answers_of(cluster.address, num_prompts, num_tokens))
            print(f"reference {len(found)}: {time.monotonic() - began:.1f} s", flush=True)
    return found


class Load:
    """Requests at random times, all by one client."""

    def __init__(self, client: AsyncClient, rate: float, num_prompts: int, num_tokens: int) -> None:
        self._client, self._rate = client, rate
        self._num_prompts, self._num_tokens = num_prompts, num_tokens
        self.requests: list[Request] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def pace(self) -> None:
        """Send until cancelled."""
        dice = random.Random(7)
        due = time.monotonic()
        while True:
            due += dice.expovariate(self._rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            request = Request(len(self.requests) % self._num_prompts, time.monotonic())
            self.requests.append(request)
            self._tasks.append(asyncio.create_task(request.run(self._client, self._num_tokens)))

    async def more(self, count: int) -> None:
        """Until that many further requests have ended."""
        enough = self.num_ended + count
        while self.num_ended < enough:  # noqa: ASYNC110  # a benchmark has the time
            await asyncio.sleep(0.05)

    @property
    def num_ended(self) -> int:
        """Requests that have ended."""
        return sum(bool(request.ended) for request in self.requests)

    async def rest(self) -> None:
        """Until all have ended."""
        await asyncio.gather(*self._tasks)


@dataclass(frozen=True)
class Change:
    """One `apply`. Times are of the monotonic clock."""

    name: str
    version: Version
    began: float
    ended: float
    was_applied: bool = True
    shown: str = ""


def apply(address: str, name: str, config: dict[str, Any], folder: Path) -> Change:
    """Run the command to its end."""
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    out, began, was_applied = io.StringIO(), time.monotonic(), True
    try:
        options = ApplyOptions(wait_s=APPLY_S, ready_timeout_s=READY_S)
        run_apply(address, file, Console(file=out, width=200), options)
    except (LaunchError, ConfigError) as error:
        was_applied = False
        out.write(f"{error}\n")
    return Change(name, version_of(config), began, time.monotonic(), was_applied, out.getvalue())


async def measure(
    cluster: ProcessCluster, steps: Sequence[tuple[str, dict[str, Any]]], options: argparse.Namespace, folder: Path
) -> tuple[list[Change], list[Request]]:
    """Apply one after the other under load."""
    start = time.monotonic()
    done = [Change("start", version_of(steps[0][1]), start, start)]
    async with AsyncClient(cluster.address) as client:
        load = Load(client, options.rate, options.prompts, options.tokens)
        pacer = asyncio.create_task(load.pace())
        try:
            await load.more(TAIL_REQUESTS)
            for name, config in steps[1:]:
                done.append(await asyncio.to_thread(apply, cluster.address, name, config, folder))
                print(
                    f"{name}: {done[-1].ended - done[-1].began:.1f} s, {load.num_ended} requests have ended", flush=True
                )
                if not done[-1].was_applied:
                    print(done[-1].shown)
                    break
                await load.more(TAIL_REQUESTS)
        finally:
            pacer.cancel()
        await load.rest()
    return done, load.requests


def allowed(changes: Sequence[Change], request: Request) -> set[Version]:
    """The versions that may answer it: those that ran at some time while it did."""
    found = set()
    for change, after in zip(changes, [*changes[1:], None], strict=True):
        is_over = after is not None and after.ended < request.began
        if change.was_applied and change.began <= request.ended and not is_over:
            found.add(change.version)
    return found


def rows_of(changes: Sequence[Change], requests: Sequence[Request], known: dict[Version, list[list[int]]]) -> list[Row]:
    """A row for each change, with the requests that ran at some time from its beginning to the next one's."""
    rows: list[Row] = []
    for index, change in enumerate(changes):
        until = changes[index + 1].began if index + 1 < len(changes) else float("inf")
        mine = [request for request in requests if change.began <= request.began < until]
        whole = [request for request in mine if not request.error]
        during = [r for r in requests if r.began <= change.ended and r.ended >= change.began]
        rows.append(
            {
                "change": change.name,
                "seconds": round(change.ended - change.began, 1),
                "applied": change.was_applied,
                "requests": len(mine),
                "while_it_was_applied": len(during),
                "failed": len(mine) - len(whole),
                "altered": sum(
                    all(known[version][r.prompt] != r.tokens for version in allowed(changes, r)) for r in whole
                ),
                "longest_gap_s": round(max((r.gap for r in mine), default=0.0), 3),
                "errors": sorted({r.error[:160] for r in mine if r.error}),
            }
        )
    return rows


def summary(rows: Sequence[Row], known: dict[Version, list[list[int]]]) -> dict[str, float | None]:
    """The figures by name."""
    answers = list(known.values())
    differing = [sum(a != b for a, b in zip(one, two, strict=True)) for one, two in itertools.pairwise(answers)]
    return {
        "changes": sum(row["applied"] for row in rows[1:]),
        "requests": sum(row["requests"] for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "altered": sum(row["altered"] for row in rows),
        "longest_gap_s": max(row["longest_gap_s"] for row in rows[1:]),
        "longest_gap_before_s": rows[0]["longest_gap_s"],
        "versions": len(known),
        "prompts_that_tell_versions_apart": min(differing, default=0),
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.apply", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a model of the cache")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second")
    parser.add_argument("--tokens", type=positive, default=48, help="of each answer")
    parser.add_argument("--prompts", type=positive, default=len(PROMPTS), help="different prompts, at most 8")
    parser.add_argument("--only", nargs="*", default=None, help="names of changes; all without")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    options.prompts = min(options.prompts, len(PROMPTS))
    return options


def chosen(steps: list[tuple[str, dict[str, Any]]], only: Sequence[str] | None) -> list[tuple[str, dict[str, Any]]]:
    """The start and the changes that are asked for."""
    return [(name, config) for name, config in steps if name == "start" or only is None or name in only]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status: 1 if a request failed or was altered, or a change not applied."""
    options = parse_arguments(argv)
    with tempfile.TemporaryDirectory(prefix="disagg-bench-") as name:
        folder = Path(name)
        first = Path(resolve_model(options.model))
        steps = chosen(changes_of(options.model, first, other_version(first, folder / "other")), options.only)
        try:
            known = references(steps, options.prompts, options.tokens)
            with ProcessCluster(parse_config(steps[0][1])) as cluster:
                changes, requests = asyncio.run(measure(cluster, steps, options, folder))
        except (ConfigError, LaunchError) as error:
            print(error, file=sys.stderr)
            return 1
    rows = rows_of(changes, requests, known)
    columns = ("change", "seconds", "requests", "while_it_was_applied", "failed", "altered", "longest_gap_s")
    print_table("disagg apply under load", columns, [[str(row[column]) for column in columns] for row in rows])
    content = report(rows, summary(rows, known))
    for figure, value in content.summary.items():
        print(f"{figure}: {value:g}" if value is not None else f"{figure}: none")
    if options.json:
        write_json(options.json, content)
        print(f"report: {options.json}")
    figures = content.summary
    is_good = figures["failed"] == figures["altered"] == 0 and all(row["applied"] for row in rows)
    return 0 if is_good else 1
