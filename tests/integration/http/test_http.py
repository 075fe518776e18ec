"""HTTP over loopback sockets, with a router that follows a script: what only a real connection shows."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from disagg.client import AsyncClient
from disagg.gateway.config import GatewayConfig
from disagg.gateway.server import GatewayServer
from disagg.proto.errors import ConfigError
from disagg.proto.token_ids import unpack_token_ids
from tests.support.gateway import MODEL_NAME, FakeRouter, Wait, forever
from tests.support.gateway_server import running, sources
from tests.support.http_app import CHAT, TEXT, error_of, events_of
from tests.support.sockets import listening_addresses
from tests.support.waiting import eventually

WAIT_S = 60.0
"""How long anything may take before a test fails."""
CHUNK_BYTES = 150
"""At least, of one token."""
MAX_ON_THE_WAY_BYTES = 512 << 10
"""What an unread stream may hold here (256 KiB) and in the client's kernel."""
STREAM = {**CHAT, "stream": True}


@asynccontextmanager
async def serving(folder: Path, router: FakeRouter, **changes: Any) -> AsyncIterator[GatewayServer]:
    """A gateway with HTTP, for no longer than a test may take."""
    async with asyncio.timeout(WAIT_S), running(folder, router, http_port=0, **changes) as server:
        yield server


@asynccontextmanager
async def client_of(server: GatewayServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=WAIT_S) as client:
        yield client


async def connect(server: GatewayServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.http_address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


def request(body: Any, path: str = "/v1/chat/completions", headers: str = "") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw


def tokens(server: GatewayServer, text: str) -> list[int]:
    return server.models[""].tokenizer.encode_text(text, special=False)


# ---------------------------------------------------------------- answers


async def test_answers_on_one_connection(folder: Path) -> None:
    router = FakeRouter()
    async with serving(folder, router) as server, client_of(server) as client:
        router.script = lambda _: [tokens(server, "hello"), tokens(server, " 🙂")]
        whole = await client.post("/v1/chat/completions", json=CHAT)
        stream = await client.post("/v1/completions", json={**TEXT, "stream": True})
        models = await client.get("/v1/models")
        metrics = await client.head("/metrics")
    assert whole.json()["choices"][0]["message"]["content"] == "hello 🙂"
    assert "".join(event["choices"][0]["text"] for event in events_of(stream)[:-1]) == "hello 🙂"
    assert stream.headers["transfer-encoding"] == "chunked"
    assert [one.status_code for one in (models, metrics)] == [200, 200]
    assert metrics.content == b""


async def test_tokens_come_as_they_are_made(folder: Path) -> None:
    router = FakeRouter([[75], Wait()])
    async with serving(folder, router) as server, client_of(server) as client:
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            async with aclosing(cast(AsyncGenerator[str, None], response.aiter_lines())) as lines:
                first = await anext(lines)
            assert json.loads(first.removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
            assert router.handles[0].num_cancels == 0
        await router.handles[0].cancelled.wait()


async def test_many_streams_at_once_end_whole(folder: Path) -> None:
    router = FakeRouter(lambda routed: [unpack_token_ids(routed.prompt_token_ids)[:1]] * 20)

    async def one(client: httpx.AsyncClient, token_id: int) -> str:
        body = {"model": MODEL_NAME, "prompt": [token_id], "stream": True, "max_tokens": 20}
        events = events_of(await client.post("/v1/completions", json=body))
        assert events[-1] == "[DONE]"
        return "".join(event["choices"][0]["text"] for event in events[:-1])

    async with serving(folder, router) as server, client_of(server) as client:
        texts = await asyncio.gather(*(one(client, 70 + i) for i in range(64)))
        assert texts == [server.models[""].tokenizer.decode([70 + i] * 20) for i in range(64)]


async def test_both_protocols_count_and_answer_alike(folder: Path) -> None:
    router = FakeRouter([[75], [76]])
    async with serving(folder, router) as server, client_of(server) as client:
        async with AsyncClient(server.address) as grpc_client:
            grpc_text = (await grpc_client.generate("hi")).text
        http_text = (await client.post("/v1/completions", json=TEXT)).json()["choices"][0]["text"]
        shown = (await client.get("/metrics")).text
    assert grpc_text == http_text
    for protocol in ("grpc", "http"):
        assert f'disagg_calls_total{{outcome="ok",protocol="{protocol}"}} 1.0' in shown


# ---------------------------------------------------------------- clients that leave or stop


@pytest.mark.parametrize("steps", [[Wait()], [[75], Wait()]], ids=["before", "after"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_client_that_hangs_up_cancels(folder: Path, steps: list[Any], stream: bool, path: str) -> None:
    body = {**CHAT, "input": "hi", "max_tokens": 9, "stream": stream}
    router = FakeRouter(steps)
    async with serving(folder, router) as server:
        _, writer = await connect(server)
        writer.write(request(body, path))
        await router.arrived.wait()
        await router.handles[0].waiting.wait()
        writer.close()
        await router.handles[0].cancelled.wait()
    assert [handle.num_cancels for handle in router.handles] == [1]


async def test_a_client_that_resets_a_running_stream_cancels(folder: Path) -> None:
    router = FakeRouter(lambda _: forever([75]))
    async with serving(folder, router) as server:
        reader, writer = await connect(server)
        writer.write(request(STREAM))
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        await router.handles[0].cancelled.wait()
    assert [handle.num_cancels for handle in router.handles] == [1]


async def test_a_client_that_does_not_read_slows_its_stream_and_then_loses_it(folder: Path) -> None:
    """No more tokens are pulled from it than fit into the buffers on the way."""
    router = FakeRouter(lambda _: forever([75]))
    async with serving(folder, router, write_timeout_s=0.5) as server, client_of(server) as client:
        host, port = server.http_address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(request(STREAM))
            await router.arrived.wait()
            await router.handles[0].cancelled.wait()
            shown = (await client.get("/metrics")).text
    assert 'disagg_calls_total{outcome="stream_lost",protocol="http"} 1.0' in shown
    assert router.handles[0].num_reads * CHUNK_BYTES < MAX_ON_THE_WAY_BYTES


async def drained(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_silent_connections_are_closed(folder: Path) -> None:
    async with serving(folder, FakeRouter(), idle_timeout_s=0.2) as server:
        silent = [await connect(server) for _ in range(20)]
        assert [await drained(reader) for reader, _ in silent] == [b""] * 20
        for _, writer in silent:
            writer.close()


async def test_a_head_and_a_body_that_are_too_slow(folder: Path) -> None:
    async with serving(folder, FakeRouter(), read_timeout_s=0.2) as server:
        reader, writer = await connect(server)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        assert await drained(reader) == b""
        writer.close()
        reader, writer = await connect(server)
        writer.write(request(CHAT)[:-1])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"x-should-retry: false" in head
        writer.close()


async def test_there_is_a_limit_of_connections(folder: Path) -> None:
    async with serving(folder, FakeRouter(), max_connections=3) as server:
        opened = [await connect(server) for _ in range(3)]
        reader, writer = await connect(server)
        assert await drained(opened[0][0]) == b""  # silent longest: the new one has its place
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readline()
        for _, one in (*opened, (reader, writer)):
            one.close()


# ---------------------------------------------------------------- bad requests


async def test_a_large_body_is_refused_before_it_is_read(folder: Path) -> None:
    async with serving(folder, FakeRouter()) as server:
        reader, writer = await connect(server)
        start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(start + b"content-length: 99999999999\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_a_large_body_in_chunks_is_refused_while_it_comes(folder: Path) -> None:
    async with serving(folder, FakeRouter()) as server, client_of(server) as client:

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield b" " * (1 << 16)

        response = await client.post("/v1/completions", content=endless(), headers={"content-type": "application/json"})
        assert error_of(response) == (400, "body", "invalid_value")
        assert (await client.get("/livez")).status_code == 200


async def test_what_is_no_http_is_answered_and_closed(folder: Path) -> None:
    async with serving(folder, FakeRouter()) as server:
        for garbage in (b"\x16\x03\x01\x00\xa5", b"BLA / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx y\r\n\r\n"):
            reader, writer = await connect(server)
            writer.write(garbage)
            raw = await drained(reader)
            assert raw.startswith(b"HTTP/1.1 400 ")
            assert json.loads(raw.split(b"\r\n\r\n")[1])["error"]["code"] == "invalid_value"
            writer.close()


async def test_requests_in_one_go_are_answered_in_turn(folder: Path) -> None:
    router = FakeRouter([[75]])
    async with serving(folder, router) as server:
        reader, writer = await connect(server)
        writer.write(
            request(CHAT)
            + request(STREAM)
            + b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
        )
        raw = await drained(reader)
        writer.close()
    assert raw.count(b"HTTP/1.1 200 OK") == 3
    assert raw.index(b"chat.completion") < raw.index(b"[DONE]") < raw.index(b"alive")


# ---------------------------------------------------------------- start and stop


async def test_stop_waits_for_running_answers(folder: Path) -> None:
    router = FakeRouter([Wait()])
    async with serving(folder, router) as server, client_of(server) as client:
        answer = asyncio.create_task(client.post("/v1/chat/completions", json=STREAM))
        await router.arrived.wait()
        await router.handles[0].waiting.wait()
        stopping = asyncio.create_task(server.stop(WAIT_S))
        await asyncio.sleep(0)  # it has begun
        refused = await client.post("/v1/chat/completions", json=STREAM)
        assert error_of(refused) == (503, None, "gateway_stopping")
        assert (await client.get("/livez")).status_code == 200
        assert not stopping.done()
        router.handles[0].cancelled.set()  # the router gives it up: the request ends by itself
        response = await answer
        await stopping
        assert not accepts(server)
    assert error_of(response) == (499, None, "cancelled")
    assert len(router.submitted) == 1


def accepts(server: GatewayServer) -> bool:
    host, port = server.http_address.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


async def test_stop_ends_streams_with_an_error_and_closes_all(folder: Path) -> None:
    router = FakeRouter([[75], Wait()])
    async with serving(folder, router) as server:
        silent = await connect(server)
        streams = [await connect(server) for _ in range(5)]
        for reader, writer in streams:
            writer.write(request(STREAM))
            await reader.readuntil(b"data: ")
        await server.stop(0.0)
        for reader, writer in streams:
            raw = await drained(reader)
            assert b"gateway_stopping" in raw
            assert b"[DONE]" not in raw
            writer.close()
        assert await drained(silent[0]) == b""
        silent[1].close()
    assert [handle.num_cancels for handle in router.handles] == [1] * 5


async def test_a_port_that_is_taken(folder: Path) -> None:
    async with serving(folder, FakeRouter()) as server:
        port = int(server.http_address.rsplit(":", 1)[1])
        config = GatewayConfig(models=sources(folder), http_port=port)
        second, before = GatewayServer(config, {"": FakeRouter()}), listening_addresses()
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            await second.start()
        await eventually(lambda: listening_addresses() == before)  # its port for gRPC is closed again


async def test_without_a_port_there_is_no_http(folder: Path) -> None:
    async with running(folder, FakeRouter()) as server:
        assert server.http_address == ""
