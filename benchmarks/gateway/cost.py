"""What a token costs the gateway's process, by protocol and by the number of streams.

    open n streams ──> all run ──> [CPU, tokens] ── window ──> [CPU, tokens] ──> leave

Only the time between the two samples counts: requests are neither opened nor ended in it.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.support.gateway_rig.rig import PROTOCOLS, Protocol, Rig, wait_until

STEP_S = {1: 0.002, 8: 0.008, 32: 0.02, 128: 0.064}
"""Pace of every stream, by the number of streams: 500 to 2,000 tokens/s together, which a gateway can follow."""
LIVE_STREAMS = 1000
LIVE_STEP_S = 0.05
OPENING_STEP_S = 0.25
"""Pace while streams are opened: while many streams write, grpc is slow to take a burst of calls on one connection."""
WARMUP_S = 0.3


class Cost(NamedTuple):
    """One window."""

    protocol: Protocol
    num_streams: int
    step_ms: float
    repeat: int
    seconds: float
    num_tokens: int
    num_messages: int
    """That clients got: fewer than tokens where the gateway fell behind and put several into one."""
    cpu_s: float
    rss_bytes: int

    @property
    def us_per_token(self) -> float:
        """CPU time of a token."""
        return self.cpu_s / self.num_tokens * 1e6

    @property
    def core_share(self) -> float:
        """CPU time per time."""
        return self.cpu_s / self.seconds


def orders(num_repeats: int) -> Iterator[tuple[int, Sequence[Protocol]]]:
    """The protocols by turns: each goes first in every second repeat."""
    for repeat in range(num_repeats):
        yield repeat, PROTOCOLS if repeat % 2 == 0 else PROTOCOLS[::-1]


async def measure_window(
    rig: Rig, protocol: Protocol, num_streams: int, step_s: float, window_s: float, repeat: int
) -> Cost:
    """Raises `RuntimeError` if a stream ended meanwhile."""
    rig.worker.step_s = OPENING_STEP_S
    loop = asyncio.get_running_loop()
    async with rig.streams(protocol, num_streams) as streams:
        await wait_until(lambda: all(stream.ended or stream.num_messages for stream in streams), "all streams run")
        rig.worker.step_s = step_s
        await asyncio.sleep(OPENING_STEP_S + WARMUP_S)
        started, before = loop.time(), await rig.sample()
        tokens, messages = rig.worker.steps.num_tokens, sum(stream.num_messages for stream in streams)
        await asyncio.sleep(window_s)
        after, ended = await rig.sample(), loop.time()
        tokens = rig.worker.steps.num_tokens - tokens
        messages = sum(stream.num_messages for stream in streams) - messages
        broken = [stream for stream in streams if stream.ended]
        if broken:
            raise RuntimeError(f"{len(broken)} of {num_streams} {protocol} streams ended early: {broken[0].last!r}")
    return Cost(
        protocol=protocol,
        num_streams=num_streams,
        step_ms=step_s * 1e3,
        repeat=repeat,
        seconds=ended - started,
        num_tokens=tokens,
        num_messages=messages,
        cpu_s=after.cpu_s - before.cpu_s,
        rss_bytes=after.rss_bytes,
    )


async def measure_costs(rig: Rig, steps: Mapping[int, float], window_s: float, num_repeats: int) -> list[Cost]:
    """Every number of streams, both protocols by turns, in both orders."""
    costs = []
    for num_streams, step_s in steps.items():
        for protocol in PROTOCOLS:  # the first requests of a process pay for its caches
            await measure_window(rig, protocol, num_streams, step_s, window_s / 4, -1)
        for repeat, protocols in orders(num_repeats):
            costs += [await measure_window(rig, p, num_streams, step_s, window_s, repeat) for p in protocols]
    return costs


def medians(costs: Sequence[Cost]) -> dict[tuple[Protocol, int], Cost]:
    """The window of median CPU time per token, for each protocol and number of streams; of an even number the dearer
    of the two in the middle."""
    found: dict[tuple[Protocol, int], list[Cost]] = {}
    for cost in costs:
        found.setdefault((cost.protocol, cost.num_streams), []).append(cost)
    return {key: _median(group) for key, group in found.items()}


def _median(group: Sequence[Cost]) -> Cost:
    wanted = statistics.median_high(cost.us_per_token for cost in group)
    return next(cost for cost in group if cost.us_per_token == wanted)


def summary(costs: Sequence[Cost], live: Sequence[Cost]) -> dict[str, float]:
    """`<protocol>_us_per_token_<n>` for each number of streams; the figure without a number is the one of the most
    streams that the gateway followed token by token. `core_share_1000_streams` is the dearer protocol's."""
    flat: dict[str, float] = {}
    typical = medians(costs)
    numbers = sorted({cost.num_streams for cost in costs})
    for (protocol, num_streams), cost in typical.items():
        flat[f"{protocol}_us_per_token_{num_streams}"] = round(cost.us_per_token, 2)
    for number in numbers:
        ratio = typical["http", number].us_per_token / typical["grpc", number].us_per_token
        flat[f"http_over_grpc_{number}"] = round(ratio, 3)
    if numbers:
        for protocol in PROTOCOLS:
            flat[f"{protocol}_us_per_token"] = flat[f"{protocol}_us_per_token_{numbers[-1]}"]
        flat["http_over_grpc"] = flat[f"http_over_grpc_{numbers[-1]}"]
    shares = {protocol: cost for (protocol, _), cost in medians(live).items()}
    for protocol, cost in shares.items():
        flat[f"{protocol}_core_share_{cost.num_streams}_streams"] = round(cost.core_share, 3)
        flat[f"{protocol}_tokens_per_message_{cost.num_streams}_streams"] = round(
            cost.num_tokens / max(1, cost.num_messages), 2
        )
    if shares:
        flat[f"core_share_{live[0].num_streams}_streams"] = round(max(c.core_share for c in shares.values()), 3)
    return flat
