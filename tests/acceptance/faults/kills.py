"""Rows in which a process is killed, stopped or fails all that it is given, under open-loop load."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from tests.acceptance.faults.cluster import POLL_S, Up, until
from tests.acceptance.faults.load import Load, Model, Stream, send
from tests.acceptance.faults.row import Row, all_right, of_streams
from tests.support.process_figures import is_running

RATE = 4.0
NUM_TOKENS = 150
WARM_S = 2.0
"""Load before the fault."""
AFTER_S = 1.5
"""Load after the recovery."""
GAP_S = 3.0
MOVING_S = 0.15
"""From the beginning of a move to the kill."""
RESTART_S = 90.0
AWAITED_S = 15.0
"""How long requests wait for a worker that is known to be coming."""
LEFT_S = 5.0
"""How long anything may be held after the load."""


async def afterwards(up: Up, streams: Sequence[Stream]) -> dict[str, Any]:
    """The figures that every row of this file has, once its load has ended."""
    left_for_s, left = await up.emptied()
    return {**of_streams(streams), "left": sum(left.values()), "left_for_s": left_for_s}


async def _fault(up: Up, model: Model, victim: str, number: signal.Signals) -> tuple[dict[str, Any], dict[str, float]]:
    """Load, the fault, load until the victim is back; the row's figures, and those of a process that hangs."""
    await up.settled()
    suspected = await up.metric("disagg_router_events_total", event="suspicion")
    figures: dict[str, float] = {}
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        pid, struck = await up.pid(victim), time.monotonic()
        os.kill(pid, number)
        if number is signal.SIGSTOP:

            async def is_noticed() -> bool:
                return await up.metric("disagg_router_events_total", event="suspicion") > suspected

            figures["detected_s"] = await until(is_noticed, RESTART_S)

            async def is_gone() -> bool:
                return not is_running(pid)

            await until(is_gone, RESTART_S)
            figures["fenced_s"] = time.monotonic() - struck

        async def is_back() -> bool:
            return await up.is_settled() and await up.pid(victim) != pid

        await until(is_back, RESTART_S)
        recovery_s = time.monotonic() - struck
        await asyncio.sleep(AFTER_S)
    return {**await afterwards(up, streams), "recovery_s": recovery_s}, figures


async def _kill(up: Up, model: Model, victim: str, promise: str) -> Row:
    seen, _ = await _fault(up, model, victim, signal.SIGKILL)
    waited_s = max(seen["longest_gap_s"], seen["longest_ttft_s"])
    met = all_right(seen) and waited_s <= GAP_S and not seen["left"] and seen["left_for_s"] <= LEFT_S
    return Row(name=f"kill_{victim.partition('-')[0]}", promise=promise, met=met, **seen)


async def kill_decode(up: Up, model: Model) -> Row:
    """One of two decode workers dies."""
    return await _kill(
        up, model, "decode-0", "every stream completes, without a retry of the client and identical; gap <= 3 s"
    )


async def kill_prefill(up: Up, model: Model) -> Row:
    """One of two prefill workers dies."""
    return await _kill(up, model, "prefill-0", "every stream completes; prompts are computed elsewhere within 3 s")


MOVES_LAST = "control.send=delay(worker=decode-*,message=ClearToSend,ms=250)"
"""So that a kill hits a sequence that is held and not committed."""


async def _kill_in_a_move(up: Up, model: Model, victim: str, name: str) -> Row:
    """decode-0 drains, and while its sequences move to decode-1 one of the two dies."""
    await up.settled()
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        pid = await up.pid(victim)
        await up.client.drain("decode-0")

        async def is_moving() -> bool:
            spans = [span for request in await up.client.requests() for span in request.spans]
            return any(span.stage == "migration" and not span.HasField("end_ms") for span in spans)

        await until(is_moving, RESTART_S)
        await asyncio.sleep(MOVING_S)
        struck = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        async def is_back() -> bool:
            return await up.is_settled() and await up.pid(victim) != pid

        await until(is_back, RESTART_S)
        recovery_s = time.monotonic() - struck
        await asyncio.sleep(AFTER_S)
    seen = {**await afterwards(up, streams), "recovery_s": recovery_s}
    waited_s = max(seen["longest_gap_s"], seen["longest_ttft_s"])
    met = all_right(seen) and waited_s <= GAP_S and not seen["left"] and seen["left_for_s"] <= LEFT_S
    promise = "every stream completes, without a retry of the client and identical; gap <= 3 s"
    return Row(name=name, promise=promise, met=met, **seen)


async def kill_source(up: Up, model: Model) -> Row:
    """A decode worker dies while its sequences move to another one."""
    return await _kill_in_a_move(up, model, "decode-0", "kill_source")


async def kill_target(up: Up, model: Model) -> Row:
    """A decode worker dies while sequences of another one move to it."""
    return await _kill_in_a_move(up, model, "decode-1", "kill_target")


async def _stop(up: Up, model: Model, victim: str) -> Row:
    seen, figures = await _fault(up, model, victim, signal.SIGSTOP)
    in_time = figures["detected_s"] <= 3.0 and figures["fenced_s"] <= 5.0
    met = all_right(seen) and in_time and not seen["left"] and seen["left_for_s"] <= LEFT_S
    promise = "detected <= 3 s, fenced <= 5 s, late output ignored"
    return Row(name=f"stop_{victim.partition('-')[0]}", promise=promise, met=met, figures=figures, **seen)


async def stop_decode(up: Up, model: Model) -> Row:
    """One of two decode workers hangs."""
    return await _stop(up, model, "decode-1")


async def stop_prefill(up: Up, model: Model) -> Row:
    """One of two prefill workers hangs."""
    return await _stop(up, model, "prefill-1")


async def only_decode(up: Up, model: Model) -> Row:
    """The only decode worker dies: with fixed roles no other worker can take over."""
    await up.settled()
    (prompt, expected), *_ = model.pairs(NUM_TOKENS)
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        pid, struck = await up.pid("decode-0"), time.monotonic()
        os.kill(pid, signal.SIGKILL)

        async def is_ready() -> bool:
            worker = (await up.state()).get("decode-0")
            return worker is not None and worker.phase == "ready" and worker.pid != pid

        async def serves() -> bool:
            return (await send(up.client, prompt[:20], expected[:1])).is_whole

        restart = asyncio.create_task(until(is_ready, RESTART_S))
        await asyncio.sleep(POLL_S)
        await until(serves, RESTART_S)
        back_s = time.monotonic() - struck
        restart_s = await restart
        await asyncio.sleep(AFTER_S)
    seen = await afterwards(up, streams)
    # Requests wait for a worker that is known to be coming; else they end with an error soon after.
    late = [
        stream
        for stream in streams
        if stream.error and (back_s <= AWAITED_S or stream.ended - max(stream.sent, struck) > AWAITED_S + 3.0)
    ]
    figures = {"restart_s": restart_s, "back_s": back_s, "wrong_errors": float(len(late))}
    after = [stream for stream in streams if stream.sent > struck + back_s]
    met = not (late or seen["wrong"] or seen["left"]) and back_s <= restart_s + 2.0
    met = met and all(stream.is_whole for stream in after) and bool(after)
    promise = "every answer is whole where the worker is back in 15 s; service back <= restart + 2 s"
    return Row(name="only_decode", promise=promise, met=met, recovery_s=restart_s, figures=figures, **seen)


async def only_prefill(up: Up, model: Model) -> Row:
    """The only prefill worker dies: decode workers compute prompts as well, and take over."""
    row = await _kill(up, model, "prefill-0", "decode workers take over: every stream completes; first token <= 3 s")
    return Row(**{**{name: getattr(row, name) for name in row.__dataclass_fields__}, "name": "only_prefill"})


async def kill_gateway(up: Up, model: Model) -> Row:
    """The only gateway dies: its streams break, and what they held is given back."""
    await up.settled()
    addresses = [worker.address for worker in (await up.state()).values()]
    async with Load(up.address, model, rate=RATE, num_tokens=NUM_TOKENS) as streams:
        await asyncio.sleep(WARM_S)
        struck = time.monotonic()
        os.kill(up.gateway_pid(), signal.SIGKILL)

        async def are_idle() -> bool:
            reports = [await up.audit(address) for address in addresses]
            return not any(sum(report.counts.values()) - report.counts.get("tombstones", 0) for report in reports)

        freed_s = await until(are_idle, 20.0)
        await until(up.is_settled, RESTART_S)
        recovery_s = time.monotonic() - struck
        await asyncio.sleep(AFTER_S)
    seen = await afterwards(up, streams)
    after = [stream for stream in streams if stream.sent > struck + recovery_s]
    met = freed_s <= 3.0 and not seen["wrong"] and not seen["left"] and bool(after)
    met = met and all(stream.is_whole for stream in after)
    return Row(
        name="kill_gateway",
        promise="orphans cancelled <= 3 s; the gateway is back at its address",
        met=met,
        recovery_s=recovery_s,
        figures={"freed_s": freed_s},
        **seen,
    )


FAILING_RATE = 10.0
FAILING_TOKENS = 40
LOAD_S = 12.0
FAILPOINTS = (
    "engine.step=raise(worker=prefill-0,after=12)",
    "transport.send=fail(worker=prefill-1,after=8)",
    "engine.step=raise(worker=decode-0,after=40)",
)
"""One worker for each leg: prefill, transfer, decode. Each pool has one more that is well. What comes first is for the
probes, which no worker passes that fails already."""
EVENTS = ("prefill_failed", "kv_transfer_failed", "decode_failed", "breaker_opened")


async def failing_worker(up: Up, model: Model) -> Row:
    """One worker fails every prefill, one every transfer, one every decode step, once they have passed their probes."""
    await up.settled()
    async with Load(up.address, model, rate=FAILING_RATE, num_tokens=FAILING_TOKENS) as streams:
        await asyncio.sleep(LOAD_S)
    seen = await afterwards(up, streams)
    figures = {event: await up.metric("disagg_router_events_total", event=event) for event in EVENTS}
    met = all_right(seen) and not seen["left"] and seen["left_for_s"] <= LEFT_S and all(figures.values())
    promise = "no request fails; the workers that fail are left out"
    return Row(name="failing_worker", promise=promise, met=met, figures=figures, **seen)
