"""The row in which others hold connections, bodies and health streams while a client with a key sends requests.

measure ─> silent connections to each port, bodies one byte short, health streams ─> measure ─> release
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.proto.errors import DisaggError
from tests.acceptance.faults.cluster import OPERATOR, Up, until
from tests.acceptance.faults.load import Model
from tests.acceptance.faults.row import Row
from tests.support.process_figures import rss_bytes
from tests.support.reports import percentile

SENDER: Final = "sender-of-bodies"
KEYS: Final[Mapping[str, str]] = {SENDER: "key-of-the-tenant-with-the-bodies"}
NUM_SILENT: Final = 4100
"""To each port: more than the HTTP connections that there may be."""
NUM_BODIES: Final = 100
BODY_BYTES: Final = 1 << 20
NUM_WATCHES: Final = 300
"""Half of them with a key."""
NUM_CALLS: Final = 40
MAX_FAILURES: Final = 3
"""After so many in one series the others are counted as failed, too."""
CALL_TIMEOUT_S: Final = 5.0
MAX_SLOWER_S: Final = 0.1
MAX_GROWTH_BYTES: Final = 256 << 20
RELEASE_S: Final = 20.0
_SPARE_SOCKETS: Final = 8

Call = Callable[[], Awaitable[None]]


async def silent_connections(up: Up, model: Model) -> Row:
    """Everything at once, on both ports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pid = up.gateway_pid()
    calls = _calls(up, [number % model.vocab_size for number in range(16)])
    try:
        before = {name: await _series(call) for name, call in calls.items()}
        sockets, rss = _num_sockets(pid), rss_bytes(pid)
        async with contextlib.AsyncExitStack() as held:
            num_watches = await _occupy(up, held)
            during = {name: await _series(call) for name, call in calls.items()}
            growth = rss_bytes(pid) - rss
        left_for_s = await _released(pid, sockets + _SPARE_SOCKETS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = max(0, _num_sockets(pid) - sockets - _SPARE_SOCKETS)
    figures: dict[str, float] = {"rss_growth_mib": growth / (1 << 20), "watches": num_watches}
    slower = 0.0
    for name, (taken, _) in during.items():
        worst = max(taken, default=CALL_TIMEOUT_S)
        slower = max(slower, worst - max(before[name][0], default=0.0))
        figures[f"{name}_p50_before_ms"] = percentile(before[name][0], 50) * 1e3 if before[name][0] else 0.0
        figures[f"{name}_worst_before_ms"] = max(before[name][0], default=0.0) * 1e3
        figures[f"{name}_p50_ms"] = percentile(taken, 50) * 1e3 if taken else 0.0
        figures[f"{name}_worst_ms"] = worst * 1e3
        figures[f"{name}_failed"] = NUM_CALLS - len(taken)
    errors = [error for _, failures in (*before.values(), *during.values()) for error in failures]
    return Row(
        name="silent_connections",
        promise="a client with a key waits at most 100 ms longer than alone; memory is bounded; all is given back",
        met=not errors and slower <= MAX_SLOWER_S and growth <= MAX_GROWTH_BYTES and not left,
        streams=2 * NUM_CALLS * len(calls),
        completed=sum(len(taken) for taken, _ in (*before.values(), *during.values())),
        failed=len(errors),
        left=left,
        left_for_s=left_for_s,
        figures=figures,
        errors=tuple(errors[:3]),
    )


def _calls(up: Up, prompt: list[int]) -> dict[str, Call]:
    """One token by each way in."""

    async def http_new() -> None:
        body = f'{{"model":"fake","prompt":{prompt},"max_tokens":1}}'.encode()
        reader, writer = await _post(up, up.keys[OPERATOR], len(body), body)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise ConnectionError(f"HTTP: {status.decode().strip() or 'closed'}")
        finally:
            writer.close()

    async def grpc_open() -> None:
        await up.client.generate(prompt, max_tokens=1, timeout_s=CALL_TIMEOUT_S)

    async def grpc_new() -> None:
        # Else gRPC shares a connection that is open already.
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(up.address, options=options) as channel:
            request = health_pb2.HealthCheckRequest()
            try:
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                raise ConnectionError(f"gRPC: {error}") from error

    return {"http_new": http_new, "grpc_open": grpc_open, "grpc_new": grpc_new}


async def _series(call: Call) -> tuple[list[float], list[str]]:
    """The seconds of each call that was answered, and the errors of others."""
    taken: list[float] = []
    errors: list[str] = []
    for _ in range(NUM_CALLS):
        began = time.monotonic()
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await call()
        except (DisaggError, OSError, TimeoutError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            if len(errors) == MAX_FAILURES:
                break
        else:
            taken.append(time.monotonic() - began)
    return taken, errors


async def _post(up: Up, key: str, length: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = up.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode() + body)
    return reader, writer


async def _occupy(up: Up, held: contextlib.AsyncExitStack) -> int:
    """Hold everything until `held` closes; how many health streams are open."""
    channel = await held.enter_async_context(grpc.aio.insecure_channel(up.address))
    stub = health_pb2_grpc.HealthStub(channel)
    keyed = (("authorization", f"Bearer {up.keys[OPERATOR]}"),)
    watches = [
        stub.Watch(health_pb2.HealthCheckRequest(), metadata=keyed if number % 2 else ())
        for number in range(NUM_WATCHES)
    ]
    for watch in watches:
        held.callback(watch.cancel)
    first = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
    for _ in range(NUM_BODIES):
        _, writer = await _post(up, up.keys[SENDER], BODY_BYTES + 1, b" " * BODY_BYTES)
        held.callback(writer.close)
    for address in (up.http_address, up.address):
        host, _, port = address.rpartition(":")
        for _ in range(NUM_SILENT):
            _, writer = await asyncio.open_connection(host, int(port))
            held.callback(writer.close)
    return sum(isinstance(answer, health_pb2.HealthCheckResponse) for answer in first)


async def _released(pid: int, most: int) -> float:
    """Wait until the gateway has no more sockets than that, `RELEASE_S` at most; the seconds it took."""

    async def is_released() -> bool:
        return _num_sockets(pid) <= most

    with contextlib.suppress(TimeoutError):
        return await until(is_released, RELEASE_S)
    return RELEASE_S


def _num_sockets(pid: int) -> int:
    number = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            number += str(link.readlink()).startswith("socket:")
    return number
