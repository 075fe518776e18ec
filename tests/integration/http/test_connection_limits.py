"""Silent connections, unfinished bodies and streams without a key leave room for clients with keys."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.gateway.server import GatewayServer
from tests.support.gateway import FakeRouter
from tests.support.gateway_server import running

KEY_A, KEY_B = "key-of-tenant-a-0001", "key-of-tenant-b-0002"
WAIT_S = 60.0
BODY = b'{"model":"tiny","prompt":[5],"max_tokens":1}'


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.touch(mode=0o600)
    file.write_text(f"[{{tenant: a, key: {KEY_A}}}, {{tenant: b, key: {KEY_B}}}]")
    return str(file)


@asynccontextmanager
async def serving(folder: Path, keys: str, **changes: Any) -> AsyncIterator[GatewayServer]:
    router = FakeRouter(lambda _: [[5]])
    async with asyncio.timeout(WAIT_S), running(folder, router, http_port=0, api_keys=keys, **changes) as server:
        yield server


class Connection:
    """One client's connection, closed at the end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def post(self, key: str, length: int, body: bytes) -> None:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        self.writer.write(f"{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n".encode() + body)

    async def answer(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await self.reader.readexactly(length)


@asynccontextmanager
async def connections(server: GatewayServer, number: int) -> AsyncIterator[list[Connection]]:
    host, port = server.http_address.rsplit(":", 1)
    opened = [Connection(*await asyncio.open_connection(host, int(port))) for _ in range(number)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.writer.close()
            with contextlib.suppress(ConnectionError):
                await connection.writer.wait_closed()


async def test_a_client_with_a_key_gets_in_while_silent_connections_hold_all_places(folder: Path, keys: str) -> None:
    async with (
        serving(folder, keys, max_connections=8) as server,
        connections(server, 1) as [known],
    ):
        known.post(KEY_A, len(BODY), BODY)
        assert (await known.answer()).startswith(b"HTTP/1.1 200 ")
        async with connections(server, 12), connections(server, 1) as [new]:
            new.post(KEY_B, len(BODY), BODY)
            assert (await new.answer()).startswith(b"HTTP/1.1 200 ")
            known.post(KEY_A, len(BODY), BODY)  # silent for longest, but its caller is known
            assert (await known.answer()).startswith(b"HTTP/1.1 200 ")


async def test_few_of_many_new_connections_are_accepted_in_one_turn_of_the_event_loop(folder: Path, keys: str) -> None:
    """All of them wait for the loop, and come one after another in its next turns."""
    number = 300
    async with serving(folder, keys) as server:
        host, port = server.http_address.rsplit(":", 1)
        http = server._http
        assert http is not None
        accepted, counts = http._connections.state.connections, [0]
        with contextlib.ExitStack() as held:
            for _ in range(number):  # without a turn of the loop in between
                held.callback(socket.create_connection((host, int(port)), WAIT_S).close)
            while counts[-1] < number:
                await asyncio.sleep(0)
                counts.append(len(accepted))
        assert max(later - earlier for earlier, later in pairwise(counts)) <= 32


async def test_unfinished_bodies_of_one_tenant_are_bounded(folder: Path, keys: str) -> None:
    limits = {"max_prompt_bytes": 1 << 10, "max_unfinished_bytes": 1, "max_model_len": 64}  # one message: 65 KiB
    async with (
        serving(folder, keys, **limits) as server,
        connections(server, 5) as hoard,
        connections(server, 1) as own,
    ):
        for connection in hoard:
            connection.post(KEY_A, 60_001, b" " * 60_000)
        refused = [await connection.answer() for connection in hoard[:1]]
        own[0].post(KEY_B, len(BODY), BODY)
        assert (await own[0].answer()).startswith(b"HTTP/1.1 200 ")
        statuses = asyncio.gather(*(connection.answer() for connection in hoard[1:4]))
        refused += await statuses
        assert all(answer.startswith(b"HTTP/1.1 429 ") for answer in refused)
        assert all(b"retry-after: 1\r\n" in answer and b"max_unfinished_bytes" in answer for answer in refused)
        hoard[4].writer.write(b"{")  # whole now: it was read to its end, and is no JSON of a request
        assert (await hoard[4].answer()).startswith(b"HTTP/1.1 400 ")


async def test_a_body_without_a_key_is_refused_before_it_arrives(folder: Path, keys: str) -> None:
    async with serving(folder, keys) as server, connections(server, 1) as [stranger]:
        stranger.post("no-such-key-at-all-0000", 1 << 20, b"")
        assert (await stranger.answer()).startswith(b"HTTP/1.1 401 ")


async def test_few_health_watches_without_a_key(folder: Path, keys: str) -> None:
    async with (
        serving(folder, keys, max_keyless_watches=8) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        ask = health_pb2.HealthCheckRequest()
        watches = [stub.Watch(ask) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        for metadata in ((), (("authorization", "Bearer no-such-key-at-all-0000"),)):
            with pytest.raises(grpc.aio.AioRpcError, match="from this address, at most 2") as refusal:
                await stub.Watch(ask, metadata=metadata).read()
            assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        keyed = [stub.Watch(ask, metadata=(("authorization", f"Bearer {KEY_A}"),)) for _ in range(4)]
        for watch in keyed:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
        watches.pop().cancel()
        while True:  # the place is free as soon as the server has seen the cancellation
            with contextlib.suppress(grpc.aio.AioRpcError):
                again = stub.Watch(ask)
                assert (await again.read()).status == health_pb2.HealthCheckResponse.SERVING
                break
        for watch in (*watches, *keyed, again):
            watch.cancel()
