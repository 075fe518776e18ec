"""How much later the end of an answer comes because its use is written first, and what the write costs the process.

The recorder alone, without a cluster: answers end one after the other, or many at a time, as fast as they can. Without
a file for comparison.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from disagg.gateway.auth.auth import Caller
from disagg.gateway.config import UsageOptions
from disagg.gateway.requests.request import Call
from disagg.gateway.usage.recorder import UsageRecorder
from disagg.proto.ids import RequestId
from tests.support.reports import percentiles

NUM_CALLS = 4000
NUM_TENANTS = 20
AT_A_TIME = (1, 16, 256)
Row = dict[str, Any]


def usage_cost(folder: Path) -> list[Row]:
    """One row for each number of answers that end at a time, with a file and without."""
    return [
        asyncio.run(_measure(options, at_a_time))
        for at_a_time in AT_A_TIME
        for options in (None, UsageOptions(folder=str(folder / str(at_a_time))))
    ]


def usage_figures(rows: list[Row]) -> Row:
    """The figures of usage for the summary."""
    (alone,) = [row for row in rows if row["recorded"] and row["at_a_time"] == 1]
    return {"usage_wait_p50_ms": alone["wait_p50_ms"], "usage_wait_p99_ms": alone["wait_p99_ms"]}


async def _measure(options: UsageOptions | None, at_a_time: int) -> Row:
    recorder = UsageRecorder(options, time.time)
    recorder.start()
    waits_ms: list[float] = []

    async def answers(number: int) -> None:
        for _ in range(NUM_CALLS // at_a_time):
            call = Call(request_id=RequestId("r"), caller=Caller(f"tenant-{number % NUM_TENANTS}", False))
            call.use.model = "m"
            call.use.add(100, 16, 50)
            began = time.perf_counter()
            await recorder.finished(call)
            waits_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0)

    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(answers(number) for number in range(at_a_time)))
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    num_writes = recorder.writes["ok"]
    await recorder.stop()
    return {
        "recorded": options is not None,
        "at_a_time": at_a_time,
        "calls_per_s": round(len(waits_ms) / seconds),
        "calls_a_write": round(len(waits_ms) / num_writes, 1) if num_writes else None,
        **{f"wait_{name}_ms": round(value, 3) for name, value in percentiles(waits_ms, (50, 99)).items()},
        "cpu_us_a_call": round(cpu_s / len(waits_ms) * 1e6, 1),
    }
