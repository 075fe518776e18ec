"""A row in which one tenant sends the messages that cost a gateway most, while another one reads streams.

The messages come from a process of their own: in the process that reads the streams, writing and reading them would
delay the other tenant's tokens as well. It yields the processor to all others, as if it ran on another machine.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Final

from disagg.gateway.config import GatewayConfig, ModelSource
from tests.acceptance.bad_input.fuzz_clients import Answer, Sender
from tests.acceptance.bad_input.fuzz_messages import Message, Served, Shape, make
from tests.acceptance.faults.cluster import Up
from tests.acceptance.faults.kills import LEFT_S
from tests.acceptance.faults.load import Load, Model, Stream
from tests.acceptance.faults.row import Row, all_right, of_streams
from tests.support.process_figures import is_running
from tests.support.reports import percentile

NEIGHBOUR: Final = "neighbour"
ATTACKER: Final = "attacker"
KEYS: Final[Mapping[str, str]] = {name: f"key-of-the-{name}-tenant" for name in (NEIGHBOUR, ATTACKER)}
WORST: Final = (
    ("tokenize_chat", Shape(count=1913, part=64_000, text="emoji")),
    ("logit_bias", Shape(count=30_000, part=2)),
    ("grpc_detokenize", Shape(count=65_000, part=15)),
    ("long_prompt", Shape(part=1 << 20, text="quotes")),
    ("grpc_tokenize_text", Shape(part=1 << 20, text="emoji")),
    ("grpc_broken_text", Shape(part=1 << 20, text="emoji")),
    ("chat_turns", Shape(count=4096, part=200)),
    ("tokenize_strings", Shape(part=1 << 20, text="two_bytes")),
)
"""What `tests.acceptance.bad_input.fuzz --seconds 60 --seed 1` found to hold the event loop longest, one for each
connection. Not those whose answers workers compute for long: many prompts in one call are a matter of a
tenant's limits."""
RATE: Final = 4.0
NUM_TOKENS: Final = 60
PERIOD_S: Final = 6.0
NUM_PERIODS: Final = 4
"""Of each kind, with the messages and without, in turn: the machine is as busy with other things in both."""
MAX_RATIO: Final = 1.3
MAX_MODEL_LEN: Final = 8192
START_S: Final = 60.0
"""For the process that sends the messages."""


async def worst_messages(up: Up, model: Model) -> Row:
    """Eight connections send the worst messages that there are, again and again."""
    await up.settled()
    gateway, workers = up.gateway_pid(), [worker.pid for worker in (await up.state()).values()]
    config = GatewayConfig(models=(ModelSource(name="x", path="fake", prefix_root=""),))
    served = Served(model.name, config.max_message_bytes(MAX_MODEL_LEN))
    answers: list[Answer] = []
    with_messages: list[tuple[float, float]] = []
    without: list[tuple[float, float]] = []
    with _attacker(up.address, up.http_address, up.keys[ATTACKER], served) as link:
        if not await asyncio.to_thread(link.poll, START_S):
            raise TimeoutError(f"the sender of the messages was not ready after {START_S:g} s")
        link.recv()
        async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS, key=up.keys[NEIGHBOUR]) as streams:
            await asyncio.sleep(PERIOD_S / 2)
            for _ in range(NUM_PERIODS):
                began = time.monotonic()
                await asyncio.sleep(PERIOD_S)
                without.append((began, time.monotonic()))
                began = time.monotonic()
                link.send(PERIOD_S)
                answers += await asyncio.to_thread(link.recv)
                with_messages.append((began, time.monotonic()))
    left_for_s, left = await up.emptied()
    quiet, busy = _p99_s(streams, without), _p99_s(streams, with_messages)
    seen = of_streams(streams)
    faults = [f"{answer.code}: {answer.problem}" for answer in answers if answer.problem]
    are_there = all(is_running(pid) for pid in (gateway, *workers)) and gateway == up.gateway_pid()
    met = all_right(seen) and busy <= MAX_RATIO * quiet and not faults and are_there
    return Row(
        name="worst_messages",
        promise=f"another tenant's p99 ITL at most {MAX_RATIO:g} times that without; no fault; no process ends",
        met=met and not left and left_for_s <= LEFT_S,
        left=sum(left.values()),
        left_for_s=left_for_s,
        figures={
            "itl_p99_ms": busy * 1e3,
            "quiet_itl_p99_ms": quiet * 1e3,
            "ratio": busy / quiet,
            "messages": float(len(answers)),
            "faults": float(len(faults)),
            "same_processes": float(are_there),
        },
        **{**seen, "errors": (*seen["errors"], *faults)[:3]},
    )


@contextmanager
def _attacker(grpc_address: str, http_address: str, key: str, served: Served) -> Iterator[Connection]:
    """The process that sends the messages: it answers a number of seconds with the answers of that time."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(theirs, grpc_address, http_address, key, served), daemon=True)
    process.start()
    theirs.close()
    try:
        yield link
    finally:
        link.close()
        process.terminate()
        process.join()


def _attack(link: Connection, grpc_address: str, http_address: str, key: str, served: Served) -> None:
    """In that process, until the other end is closed."""
    os.nice(19)
    messages = [make(family, shape, served) for family, shape in WORST]

    async def flood() -> None:
        async with Sender(grpc_address, http_address, key) as sender:
            link.send(len(messages))
            while True:
                seconds = await asyncio.to_thread(link.recv)
                link.send(await _flood(sender, messages, time.monotonic() + seconds))

    with suppress(EOFError):
        asyncio.run(flood())


async def _flood(sender: Sender, messages: Sequence[Message], until: float) -> list[Answer]:
    """One connection for each message."""
    answers: list[Answer] = []

    async def send(message: Message) -> None:
        while time.monotonic() < until:
            answers.append(await sender.send(message))

    await asyncio.gather(*(send(message) for message in messages))
    return answers


def _p99_s(streams: Sequence[Stream], periods: Sequence[tuple[float, float]]) -> float:
    """Of the gaps between tokens that ended in one of these periods."""
    return percentile(
        [
            later - earlier
            for stream in streams
            for earlier, later in pairwise(stream.times)
            if any(begin <= later <= end for begin, end in periods)
        ],
        99,
    )
