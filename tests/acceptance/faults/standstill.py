"""All processes of a cluster stand still for a while, and go on: a suspended machine, one that is moved, a frozen
container.

SIGSTOP for each in turn, in an order of chance, and SIGCONT in another: as it is with real machines, none is the first
for sure. Clients are elsewhere and wait. Nothing of it is anybody's fault, so nobody may be judged by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from disagg.client import AsyncClient
from disagg.cluster.system.process_tools import ProcessRef
from tests.acceptance.faults.cluster import Up, until
from tests.acceptance.faults.kills import afterwards
from tests.acceptance.faults.load import Model, Stream, send
from tests.acceptance.faults.row import Row, all_right

NUM_CLIENTS = 6
NUM_TOKENS = 150
WARM_S = 3.0
AFTER_S = 8.0
"""Longer than it takes to kill a process that hangs."""


@contextlib.asynccontextmanager
async def clients(up: Up, model: Model, num_clients: int = NUM_CLIENTS) -> AsyncIterator[list[Stream]]:
    """So many, each with one request after the other, without deadlines; the list has all of them after the block."""
    streams: list[Stream] = []
    is_over = asyncio.Event()

    async def ask(number: int) -> None:
        pairs = model.pairs(NUM_TOKENS)
        async with AsyncClient(up.address, resume_s=0.0) as client:
            while not is_over.is_set():
                prompt, expected = pairs[number % len(pairs)]
                streams.append(await send(client, prompt, expected, timeout_s=None))
                number += num_clients

    tasks = [asyncio.create_task(ask(number)) for number in range(num_clients)]
    try:
        yield streams
    finally:
        is_over.set()
        await asyncio.gather(*tasks)


async def stand_still(processes: Sequence[ProcessRef], seconds: float) -> None:
    """Stop them all, and continue them."""
    order = [process.pid for process in processes if process.is_alive()]
    random.shuffle(order)
    for pid in order:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        random.shuffle(order)
        for pid in order:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def standstill(up: Up, model: Model, seconds: float, name: str, after_s: float = AFTER_S) -> Row:
    """The row of one duration."""
    await up.settled()
    before = {worker: state.pid for worker, state in (await up.state()).items()}
    gateway = up.gateway_pid() if up.launcher == "processes" else 0
    async with clients(up, model) as streams:
        await asyncio.sleep(WARM_S)
        await stand_still(up.processes(), seconds)
        resumed = time.monotonic()

        async def answers() -> bool:
            return bool(await up.state())

        answers_s = await until(answers, 60.0)
        await asyncio.sleep(max(0.0, after_s - (time.monotonic() - resumed)))
    after = {worker: state.pid for worker, state in (await up.state()).items()}
    seen = await afterwards(up, streams)
    is_same = after == before and (not gateway or up.gateway_pid() == gateway)
    figures = {
        "still_s": seconds,
        "replaced": float(sum(after.get(worker) != pid for worker, pid in before.items())),
        "answers_s": answers_s,
        "suspicions": await up.metric("disagg_router_events_total", event="suspicion"),
        "retries": sum([await up.metric("disagg_router_events_total", event=event) for event in RETRIES]),
    }
    met = is_same and all_right(seen) and not seen["left"]
    promise = "no process is replaced, every stream completes and is identical"
    return Row(name=name, promise=promise, met=met, figures=figures, **seen)


RETRIES = ("worker_lost", "worker_suspected", "worker_stuck", "kv_transfer_failed", "prefill_failed", "decode_failed")


def still_for(seconds: float, name: str) -> Callable[[Up, Model], Awaitable[Row]]:
    """The row function."""

    async def row(up: Up, model: Model) -> Row:
        return await standstill(up, model, seconds, name)

    return row
