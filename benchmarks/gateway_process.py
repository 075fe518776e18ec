"""The measured process of the gateway's benchmark: router and gateway as `cluster/gateway_host.py` puts them together,
without a controller.

    python -m benchmarks.gateway_process, then lines of JSON:

    in   `GatewayJob`                       out  {"grpc": "127.0.0.1:...", "http": "127.0.0.1:..."}
    in   an empty line, any number of times out  {"cpu_s": ..., "rss_bytes": ...}
    in   the end of the input               the process ends

CPU seconds are those of the whole process, user and system, all threads.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.gateway_server import open_gateway
from disagg.cluster.process_tools import allow_open_files
from disagg.proto.messages import WorkerInfo
from disagg.router.gateway.config import GatewayConfig

NUM_PROFILE_LINES = 45


class GatewayJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and where the worker is."""

    gateway: GatewayConfig
    worker: WorkerInfo
    profile: bool = False
    """Write a profile of the event loop to stderr at the end."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, as host:port."""

    grpc: str
    http: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What the process has used up to now."""

    cpu_s: float
    rss_bytes: int


def sample() -> Sample:
    """Of this process."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return Sample(cpu_s=time.process_time(), rss_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"))


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _answer_samples(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """On a thread of its own: a busy event loop does not delay the answer."""
    for _ in sys.stdin.buffer:
        _say(sample())
    loop.call_soon_threadsafe(stop.set)


async def _serve(job: GatewayJob) -> None:
    stop = asyncio.Event()
    profile = cProfile.Profile() if job.profile else None
    async with open_gateway(job.gateway, job.worker) as (grpc, http):
        _say(Started(grpc=grpc, http=http))
        threading.Thread(target=_answer_samples, args=(stop, asyncio.get_running_loop()), daemon=True).start()
        if profile is not None:
            profile.enable()
        await stop.wait()
        if profile is not None:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(NUM_PROFILE_LINES)


if __name__ == "__main__":
    allow_open_files()
    asyncio.run(_serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=GatewayJob)))
