"""How long a hand-over holds up a stream, in a real cluster: the exposed transfer of each request.

    t0     P sampled token 0: its KV is complete there, and the client can read
    ready  D got the order to join: all KV is in its memory, and the commit has come
    t1     D's first step with the sequence begins

    wait     what was left at `ready` of the step that D was computing for others; 0 if it computed none
    exposed  (t1 - t0) - wait

The wait is subtracted because it is no cost of the transfer: a sequence that were on D already would wait for a running
step just so. Only the step that ran at `ready` counts: if the sequence is not in the step that follows, that one is
part of what is exposed. Everything else is, too: the last gather on P, messages, bytes, checksums, the scatter, and the
queues of both engines. The times are the engines' own (`worker.py`), on the one monotonic clock of the
machine; no message to the gateway is in them.

Requests come one after the other, each with a prompt that is in no cache, while `streams` other sequences decode on D;
between two of them lies a random pause, so that they meet D's steps anywhere. With `queued` prompts there are always so
many others on P, of the same lengths: it computes the next one while it sends, and D takes over others all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from benchmarks.load import random_prompt
from benchmarks.transfer.worker import FOLDER_VARIABLE, Timeline
from disagg.client import AsyncClient
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts import processes
from disagg.cluster.hosts.processes import ProcessCluster
from tests.support.reports import REPOSITORY, percentile

OUTPUT_TOKENS = 8
STREAM_PROMPT_TOKENS = 32
STREAM_TOKENS = 1024
LONGEST_PAUSE_S = 0.05
SETTLE_S = 1.0
"""After the streams began, before the first request that counts."""
GRPC_END_S = 0.1
"""Its own tasks end a few turns of the loop after their channel."""
NOTING_WORKER = "benchmarks.transfer.worker"


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The hand-over of one request, in milliseconds."""

    prompt_tokens: int
    streams: int
    queued: int = 0
    moving_ms: float
    """Milliseconds from token 0 until D had all KV."""
    wait_ms: float
    starting_ms: float
    """From then until the first step, less the wait."""

    @property
    def exposed_ms(self) -> float:
        """The part of the hand-over that the client waits for: moving and starting, ms."""
        return self.moving_ms + self.starting_ms


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request that counts."""

    request_id: str
    prompt_tokens: int
    streams: int
    queued: int = 0
    """Other prompts on P."""


def handover(asked: Asked, timelines: Sequence[Timeline]) -> Handover:
    """What the workers noted of a request, as figures.

    Raises:
        ValueError: if a time is missing: the request was not handed over, or tried again elsewhere.
    """
    sent = [timeline for timeline in timelines if asked.request_id in timeline.computed]
    took = [timeline for timeline in timelines if asked.request_id in timeline.first_step]
    if len(sent) != 1 or len(took) != 1:
        raise ValueError(f"{asked.request_id} was computed {len(sent)} times and taken over {len(took)} times")
    computed, ready = sent[0].computed[asked.request_id], took[0].join_ordered[asked.request_id]
    began = took[0].first_step[asked.request_id]
    wait = min(rest_of_step(took[0].steps, ready), began - ready)
    return Handover(
        prompt_tokens=asked.prompt_tokens,
        streams=asked.streams,
        queued=asked.queued,
        moving_ms=(ready - computed) * 1e3,
        wait_ms=wait * 1e3,
        starting_ms=(began - ready - wait) * 1e3,
    )


def rest_of_step(steps: Sequence[tuple[float, float]], moment: float) -> float:
    """Seconds from `moment` to the end of the step that ran then; 0 if none did."""
    return max((end - moment for began, end in steps if began <= moment < end), default=0.0)


def rows(handovers: Sequence[Handover], transport: str) -> list[dict[str, Any]]:
    """One row for each size, number of streams, and number of prompts on P."""
    groups: dict[tuple[int, int, int], list[Handover]] = {}
    for each in handovers:
        groups.setdefault((each.prompt_tokens, each.streams, each.queued), []).append(each)
    return [
        {"what": "hand-over", "transport": transport, "prompt_tokens": tokens, "streams": streams, "queued": queued}
        | {"requests": len(group)}
        | quantiles(group)
        for (tokens, streams, queued), group in sorted(groups.items())
    ]


def quantiles(handovers: Sequence[Handover]) -> dict[str, float]:
    """p50 and p99 of what is exposed and of its parts, in milliseconds."""
    parts = {
        "exposed": [each.exposed_ms for each in handovers],
        "moving": [each.moving_ms for each in handovers],
        "starting": [each.starting_ms for each in handovers],
        "wait": [each.wait_ms for each in handovers],
    }
    return {f"{name}_p{q}_ms": percentile(values, q) for name, values in parts.items() for q in (50, 99)}


# ---------------------------------------------------------------- a cluster


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests of one measurement."""

    prompts: Sequence[int]
    """Lengths of the prompts."""
    streams: Sequence[int]
    """Other sequences that decode."""
    queued: Sequence[int] = (0,)
    """Other prompts on P; with each number of streams."""
    requests: int
    """Number of requests of each length, with each number of streams and of prompts."""
    seed: int


def measure_handovers(config: Mapping[str, Any], load: Load) -> list[Handover]:
    """All of it in one cluster, which it starts.

    Raises:
        ValueError: if a request was not handed over once, as it should be.
    """
    with tempfile.TemporaryDirectory(prefix="disagg-timelines-") as folder:
        path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {FOLDER_VARIABLE: folder, "PYTHONPATH": path}
        with (
            mock.patch.object(processes, "WORKER_MODULE", NOTING_WORKER),
            mock.patch.dict(os.environ, environment),
            ProcessCluster(parse_config(dict(config))) as cluster,
        ):
            asked = asyncio.run(_ask_all(cluster.address, load))
        timelines = [
            msgspec.json.decode(file.read_bytes(), type=Timeline) for file in sorted(Path(folder).glob("*.json"))
        ]
    return [handover(each, timelines) for each in asked]


async def _ask_all(address: str, load: Load) -> list[Asked]:
    dice, asked = random.Random(load.seed), []
    async with AsyncClient(address) as client:
        (model,) = await client.models()
        for tokens in sorted(set(load.prompts)):  # what is slow the first time is not counted
            await _ask(client, random_prompt(dice.getrandbits(60), tokens, model.vocab_size))
        for streams, queued in itertools.product(load.streams, load.queued):
            print(f"hand-overs: {streams} streams, {queued} prompts ...", file=sys.stderr, flush=True)
            others = [_Others((STREAM_PROMPT_TOKENS,), STREAM_TOKENS)] * streams
            others += [_Others(load.prompts, OUTPUT_TOKENS)] * queued
            async with _kept_up(client, others, model.vocab_size, dice):
                for _ in range(load.requests):
                    for tokens in load.prompts:
                        await asyncio.sleep(dice.uniform(0, LONGEST_PAUSE_S))
                        prompt = random_prompt(dice.getrandbits(60), tokens, model.vocab_size)
                        request_id = await _ask(client, prompt)
                        asked.append(Asked(request_id=request_id, prompt_tokens=tokens, streams=streams, queued=queued))
    await asyncio.sleep(GRPC_END_S)
    return asked


async def _ask(client: AsyncClient, prompt: list[int], max_tokens: int = OUTPUT_TOKENS) -> str:
    answer = await client.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return answer.request_id


class _Others(NamedTuple):
    """One client that sends one request after the other."""

    prompts: Sequence[int]
    """Lengths, one of which it takes each time."""
    num_tokens: int


@contextlib.asynccontextmanager
async def _kept_up(
    client: AsyncClient, others: Sequence[_Others], vocab_size: int, dice: random.Random
) -> AsyncIterator[None]:
    """Keep so many other sequences in the cluster."""

    async def ask(each: _Others) -> None:
        while True:
            prompt = random_prompt(dice.getrandbits(60), dice.choice(each.prompts), vocab_size)
            await _ask(client, prompt, each.num_tokens)

    tasks = [asyncio.create_task(ask(each), name=f"other-{number}") for number, each in enumerate(others)]
    try:
        await asyncio.sleep(SETTLE_S if tasks else 0)
        yield
        for task in tasks:
            if task.done():
                task.result()  # a stream that failed is no measurement
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
