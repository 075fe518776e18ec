"""A row in which workers fail what they are given, fast, and go on living."""

from __future__ import annotations

import asyncio

from benchmarks.faults.cluster import Up
from benchmarks.faults.kills import LEFT_S, afterwards
from benchmarks.faults.load import Load, Model
from benchmarks.faults.row import Row, all_right

RATE = 10.0
NUM_TOKENS = 40
LOAD_S = 12.0
FAILPOINTS = (
    "engine.step=raise(worker=prefill-0)",
    "transport.send=fail(worker=prefill-1)",
    "engine.step=raise(worker=decode-0)",
)
"""One worker for each leg: prefill, transfer, decode. Each pool has one more that is well."""
EVENTS = ("prefill_failed", "kv_transfer_failed", "decode_failed", "breaker_opened")


async def failing_worker(up: Up, model: Model) -> Row:
    """One worker fails every prefill, one every transfer, one every decode step, from the start on."""
    await up.settled()
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(LOAD_S)
    seen = await afterwards(up, streams)
    figures = {event: await up.metric("disagg_router_events_total", event=event) for event in EVENTS}
    met = all_right(seen) and not seen["left"] and seen["left_for_s"] <= LEFT_S and all(figures.values())
    promise = "no request fails; the workers that fail are left out"
    return Row(name="failing_worker", promise=promise, met=met, figures=figures, **seen)
