"""The measured process of the gateway's benchmark: router and gateway as `gateway_host.py` puts them
together, without a controller.

    python -m tests.support.gateway_rig.process, then lines of JSON:

    in   `GatewayJob`                       out  {"grpc": "127.0.0.1:...", "http": "127.0.0.1:..."}
    in   an empty line, any number of times out  {"cpu_s": ..., "rss_bytes": ..., "turn_s": ..., "turn_cpu_s": ...}
    in   the end of the input               the process ends

CPU seconds are those of the whole process, user and system, all threads. The longest turns of the event loop are those
since the line before, by the wall clock and by the processor time of the loop's thread: on a busy machine only the
latter is what the gateway itself did.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import pstats
import selectors
import sys
import threading
import time
from pathlib import Path

import msgspec
from typing_extensions import override

from disagg.cluster.system.process_tools import allow_open_files, freeze_start
from disagg.gateway.config import GatewayConfig
from disagg.proto.messages import WorkerInfo
from tests.support.gateway_rig.server import open_gateway

NUM_PROFILE_LINES = 45


class GatewayJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve, and where the worker is."""

    gateway: GatewayConfig
    worker: WorkerInfo
    profile: bool = False
    """Write a profile of the event loop to stderr at the end."""
    time_turns: bool = False
    """Time the turns of the event loop, which costs two microseconds each; else they are 0."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Where it listens, as host:port."""

    grpc: str
    http: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What the process has used up to now."""

    cpu_s: float
    rss_bytes: int
    turn_s: float
    """The longest turn of the event loop since the sample before."""
    turn_cpu_s: float
    """The same in processor time of the loop's thread."""


class TurnSelector(selectors.DefaultSelector):
    """The loop's selector; all that happens between two calls of `select` is a turn.

    Args:
        is_on: whether turns are timed.
    """

    def __init__(self, is_on: bool) -> None:
        super().__init__()
        self._is_on = is_on
        self._began: float | None = None
        self._cpu_began = 0.0
        self._longest_s = self._longest_cpu_s = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._is_on:
            return super().select(timeout)
        if self._began is not None:
            self._longest_s = max(self._longest_s, time.monotonic() - self._began)
            self._longest_cpu_s = max(self._longest_cpu_s, time.thread_time() - self._cpu_began)
        ready = super().select(timeout)
        self._began, self._cpu_began = time.monotonic(), time.thread_time()
        return ready

    def take(self) -> tuple[float, float]:
        """The longest turn since the last call, in seconds and in processor time. For one other thread."""
        found = self._longest_s, self._longest_cpu_s
        self._longest_s = self._longest_cpu_s = 0.0
        return found


def sample(selector: TurnSelector) -> Sample:
    """Of this process."""
    resident_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    turn_s, turn_cpu_s = selector.take()
    return Sample(
        cpu_s=time.process_time(),
        rss_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        turn_s=turn_s,
        turn_cpu_s=turn_cpu_s,
    )


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _answer_samples(stop: asyncio.Event, loop: asyncio.AbstractEventLoop, selector: TurnSelector) -> None:
    """On a thread of its own: a busy event loop does not delay the answer."""
    for _ in sys.stdin.buffer:
        _say(sample(selector))
    loop.call_soon_threadsafe(stop.set)


async def _serve(job: GatewayJob, selector: TurnSelector) -> None:
    stop = asyncio.Event()
    profile = cProfile.Profile() if job.profile else None
    async with open_gateway(job.gateway, job.worker) as (grpc, http):
        _say(Started(grpc=grpc, http=http))
        loop = asyncio.get_running_loop()
        if job.time_turns:
            freeze_start()  # as a gateway does: else a long turn may be a look through all that was there at the start
        threading.Thread(target=_answer_samples, args=(stop, loop, selector), daemon=True).start()
        if profile is not None:
            profile.enable()
        await stop.wait()
        if profile is not None:
            profile.disable()
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(NUM_PROFILE_LINES)


if __name__ == "__main__":
    allow_open_files()
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=GatewayJob)
    turns = TurnSelector(given.time_turns)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        runner.run(_serve(given, turns))
