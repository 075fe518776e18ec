"""Clients that do not read their answers, and silent connections: over gRPC and HTTP, with a router that has more
tokens than anybody takes.

What must hold: the gateway stops asking for tokens once the stream's buffers are full, others are answered meanwhile,
and after `write_timeout_s` the stream is ended and cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from disagg.client import AsyncClient
from disagg.cluster.system.process_tools import allow_open_files
from disagg.gateway.server import GatewayServer
from disagg.router.api import Completion, RoutedRequest
from disagg.v1 import inference_pb2 as pb
from tests.acceptance.bad_input.generated_http import exchange
from tests.support.gateway import (
    MODEL_NAME,
    FakeHandle,
    FakeRouter,
    Step,
    forever,
)
from tests.support.gateway_server import running
from tests.support.raw_clients import COMPLETIONS, GrpcStreams, HttpStream, http_request, open_grpc, open_http
from tests.support.waiting import eventually

WAIT_S = 60.0
POLL_S = 0.01
WRITE_TIMEOUT_S = 0.5
TOKEN = 20
NUM_SILENT = 1000
CAP_BYTES = 256 << 10
"""What a stream that is not read may hold in the gateway's process and in the sockets."""
PATIENT = 7
"""`seed` of the requests that are read."""

Client = GrpcStreams | HttpStream


def script(request: RoutedRequest) -> Iterable[Step]:
    """Three tokens for those who read, without end for the others."""
    if request.sampling.seed == PATIENT:
        return [[TOKEN], [TOKEN], [TOKEN], Completion("length", 3, 0)]
    return forever([TOKEN])


async def never_read(server: GatewayServer, protocol: str) -> Client:
    """A stream without a reader."""
    if protocol == "grpc":
        request = pb.GenerateRequest(model=MODEL_NAME, text="x", sampling=pb.SamplingParams(seed=1))
        return await open_grpc(server.address, [request.SerializeToString()], paused=True)
    body = {"model": MODEL_NAME, "prompt": "x", "seed": 1, "stream": True}
    return await open_http(server.http_address, http_request(COMPLETIONS, body), paused=True)


async def check_answers(server: GatewayServer) -> None:
    """A client that reads gets its whole answer, over both protocols."""
    async with AsyncClient(server.address) as client:
        answer = await client.generate("x", seed=PATIENT)
        assert answer.usage.completion_tokens == 3
    request = http_request(
        COMPLETIONS, {"model": MODEL_NAME, "prompt": "x", "seed": PATIENT}, [("connection", "close")]
    )
    reply = await exchange(server.http_address, request, WAIT_S)
    assert reply.status == 200
    assert b'"completion_tokens":3' in reply.body


async def metrics(server: GatewayServer) -> str:
    """What Prometheus would read."""
    request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    return (await exchange(server.http_address, request, WAIT_S)).body.decode()


async def reads_when_stuck(handle: FakeHandle) -> int:
    """How many batches of tokens the gateway pulled until it stopped."""
    async with asyncio.timeout(WAIT_S):
        seen = -1
        while handle.num_reads != seen or seen == 0:
            seen = handle.num_reads
            await asyncio.sleep(WRITE_TIMEOUT_S / 5)
        return seen


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_stream_that_is_not_read_is_bounded_then_lost(folder: Path, protocol: str) -> None:
    router = FakeRouter(script)
    async with running(folder, router, http_port=0, write_timeout_s=WRITE_TIMEOUT_S) as server:
        client = await never_read(server, protocol)
        async with asyncio.timeout(WAIT_S):
            await router.arrived.wait()
        [handle] = router.handles
        num_reads = await reads_when_stuck(handle)
        await check_answers(server)
        async with asyncio.timeout(WAIT_S):
            await handle.cancelled.wait()
        assert handle.num_cancels == 1
        assert f'disagg_calls_total{{outcome="stream_lost",protocol="{protocol}"}} 1.0' in await metrics(server)
        bytes_per_message = await message_bytes(server, protocol)
        assert num_reads * bytes_per_message < CAP_BYTES, f"{num_reads} messages of {bytes_per_message} bytes"
        await check_answers(server)
        client.close()
    assert [handle.num_cancels for handle in router.handles[1:]] == [0] * (len(router.handles) - 1)


async def message_bytes(server: GatewayServer, protocol: str) -> int:
    """The size of one message of a stream that is read."""
    if protocol == "grpc":
        request = pb.GenerateRequest(model=MODEL_NAME, text="x", sampling=pb.SamplingParams(seed=PATIENT))
        grpc_client = await open_grpc(server.address, [request.SerializeToString()])
        [stream] = grpc_client.streams
        client: Client = grpc_client
    else:
        body = {"model": MODEL_NAME, "prompt": "x", "seed": PATIENT, "stream": True}
        client = http_client = await open_http(server.http_address, http_request(COMPLETIONS, body))
        stream = http_client.stream
    await eventually(lambda: stream.completed)
    client.close()
    return stream.num_bytes // stream.num_messages


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_client_that_reads_again_in_time_misses_nothing(folder: Path, protocol: str) -> None:
    """Slow is not dead: a pause shorter than the timeout costs nothing."""
    num_tokens = 20_000
    router = FakeRouter(lambda _: [*([[TOKEN]] * num_tokens), Completion("length", num_tokens, 0)])
    async with running(folder, router, http_port=0, write_timeout_s=WAIT_S) as server:
        client = await never_read(server, protocol)
        async with asyncio.timeout(WAIT_S):
            await router.arrived.wait()
        [handle] = router.handles
        assert await reads_when_stuck(handle) < num_tokens
        client.resume()
        stream = client.streams[0] if isinstance(client, GrpcStreams) else client.stream
        await eventually(lambda: stream.completed)
        client.close()
    assert handle.num_cancels == 0
    assert stream.num_messages > num_tokens / 2


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_thousand_silent_connections_disturb_nobody(folder: Path, protocol: str) -> None:
    if allow_open_files() < 3 * NUM_SILENT:
        pytest.skip("this user may not open so many files")
    async with running(folder, FakeRouter(script), http_port=0, idle_timeout_s=WAIT_S) as server:
        address = server.address if protocol == "grpc" else server.http_address
        host, _, port = address.rpartition(":")
        writers = []
        try:
            for _ in range(NUM_SILENT):
                writers.append((await asyncio.open_connection(host, int(port)))[1])  # noqa: PERF401 - closed below
            for _ in range(5):
                await check_answers(server)
        finally:
            for writer in writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def test_silent_http_connections_are_closed(folder: Path) -> None:
    async with running(folder, FakeRouter(script), http_port=0, idle_timeout_s=0.3) as server:
        host, _, port = server.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        await check_answers(server)


async def test_a_connection_beyond_the_limit_closes_a_silent_one(folder: Path) -> None:
    async with running(folder, FakeRouter(script), http_port=0, max_connections=2) as server:
        host, _, port = server.http_address.rpartition(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(ConnectionError):
                assert await opened[0][0].read() == b""  # silent longest
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for _, writer in opened), return_exceptions=True)
        await asyncio.sleep(0.05)
        await check_answers(server)
