"""What clients that misbehave cost the others: some never read their streams, a thousand never speak.

    normal streams run ── window ──> [misbehaving ones come] ── window ──> [they leave, or are thrown out]

Both windows are of the same normal streams, so that only the misbehaving clients differ.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Literal, NamedTuple

from tests.support.gateway_rig.rig import PROTOCOLS, Protocol, Rig, wait_until
from tests.support.raw_clients import Stream
from tests.support.reports import percentile, print_table

Kind = Literal["never_reads", "never_speaks"]

NUM_NORMAL = 8
NUM_SLOW = 16
NUM_SILENT = 1000
STEP_S = 0.005
WRITE_TIMEOUT_S = 5.0
CAP_BYTES = 256 << 10
"""What one stream that is not read may cost the gateway's process."""
_LONG_WINDOWS = 3
"""Windows with misbehaving clients are this much longer: buffers fill slowly."""
_CONNECT_AT_ONCE = 100


class Slow(NamedTuple):
    """One kind of misbehaving client on one port."""

    protocol: Protocol
    kind: Kind
    num_clients: int
    tpot_p50_ms_before: float
    tpot_p50_ms: float
    """Median TPOT of the normal streams while the misbehaving clients are connected, in milliseconds."""
    gap_p99_ms_before: float
    gap_p99_ms: float
    bytes_per_client: float
    """Growth of the gateway's resident memory."""
    freed_after_s: float
    """From the last of them until the gateway had thrown all out; silent ones leave by themselves: 0."""


async def measure_slow(window_s: float) -> list[Slow]:
    """Every kind on both ports. The gateway's process is a new one each time: memory that it has once taken from the
    system stays with it, and would hide the growth."""
    rows = []
    for protocol in PROTOCOLS:
        for kind in ("never_reads", "never_speaks"):
            async with Rig(write_timeout_s=_LONG_WINDOWS * window_s + WRITE_TIMEOUT_S) as rig:
                rig.worker.step_s = STEP_S
                rows.append(await _measure(rig, protocol, kind, window_s))
    return rows


async def _measure(rig: Rig, protocol: Protocol, kind: Kind, window_s: float) -> Slow:
    loop = asyncio.get_running_loop()
    async with rig.streams(protocol, NUM_NORMAL, timed=True) as normal:
        await wait_until(lambda: all(stream.num_messages > 1 for stream in normal), "the normal streams run")
        before = await _window(normal, window_s)
        rss = (await rig.sample()).rss_bytes
        misbehaving = _slow(rig, protocol) if kind == "never_reads" else _silent(rig, protocol)
        async with misbehaving as num_clients:
            came = loop.time()
            during = await _window(normal, window_s * _LONG_WINDOWS)
            grown = (await rig.sample()).rss_bytes - rss
            freed_after_s = 0.0
            if kind == "never_reads":
                await wait_until(
                    lambda: rig.worker.steps.num_sequences == NUM_NORMAL, "slow readers lose their streams"
                )
                freed_after_s = loop.time() - came
    return Slow(
        protocol=protocol,
        kind=kind,
        num_clients=num_clients,
        tpot_p50_ms_before=before[0],
        tpot_p50_ms=during[0],
        gap_p99_ms_before=before[1],
        gap_p99_ms=during[1],
        bytes_per_client=grown / num_clients,
        freed_after_s=freed_after_s,
    )


async def _window(streams: Sequence[Stream], window_s: float) -> tuple[float, float]:
    """Median TPOT and p99 of the gaps, in ms, of what comes from now on."""
    for stream in streams:
        stream.times.clear()
    await asyncio.sleep(window_s)
    return timings([stream.times for stream in streams])


def timings(times: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Median over streams of the mean time between messages, and p99 of all gaps; both in ms."""
    gaps = [[later - earlier for earlier, later in pairwise(one)] for one in times]
    means = [sum(one) / len(one) for one in gaps if one]
    return percentile(means, 50) * 1e3, percentile([gap for one in gaps for gap in one], 99) * 1e3


@asynccontextmanager
async def _slow(rig: Rig, protocol: Protocol) -> AsyncIterator[int]:
    async with rig.streams(protocol, NUM_SLOW, paused=True):
        yield NUM_SLOW


@asynccontextmanager
async def _silent(rig: Rig, protocol: Protocol) -> AsyncIterator[int]:
    host, _, port = rig.addresses[protocol].rpartition(":")
    writers = []
    try:
        for _ in range(0, NUM_SILENT, _CONNECT_AT_ONCE):
            opened = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(_CONNECT_AT_ONCE)))
            writers += [writer for _, writer in opened]
        yield NUM_SILENT
    finally:
        for writer in writers:
            writer.close()
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


def slow_summary(rows: Sequence[Slow]) -> dict[str, float]:
    """Per protocol and kind: how much the others' median TPOT grew, and the memory of each client."""
    flat: dict[str, float] = {}
    for row in rows:
        name = f"{row.protocol}_{row.kind}"
        flat[f"{name}_tpot_ratio"] = round(row.tpot_p50_ms / row.tpot_p50_ms_before, 3)
        flat[f"{name}_gap_p99_ms"] = round(row.gap_p99_ms, 2)
        flat[f"{name}_kib_per_client"] = round(row.bytes_per_client / 1024, 1)
        if row.kind == "never_reads":
            flat[f"{name}_freed_after_s"] = round(row.freed_after_s, 1)
    return flat


def show_slow(rows: Sequence[Slow]) -> None:
    """Print the table."""
    columns = ("", "clients", "TPOT ms before", "with them", "gap p99 before", "with them", "KiB/client", "freed s")
    lines = [
        (
            f"{row.protocol}, {row.kind.replace('_', ' ')}",
            str(row.num_clients),
            f"{row.tpot_p50_ms_before:.2f}",
            f"{row.tpot_p50_ms:.2f}",
            f"{row.gap_p99_ms_before:.1f}",
            f"{row.gap_p99_ms:.1f}",
            f"{row.bytes_per_client / 1024:.1f}",
            f"{row.freed_after_s:.1f}" if row.freed_after_s else "-",
        )
        for row in rows
    ]
    print_table(f"{NUM_NORMAL} normal streams beside misbehaving clients", columns, lines)
