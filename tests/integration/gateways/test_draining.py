"""What happens to a gateway's clients and probes when it is stopped: real sockets, and a real `disagg up`."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from disagg.cli.doctor.health import ALIVE, READY, run_health, run_health_at
from disagg.cli.operations.operate import run_status
from disagg.client import AsyncClient
from disagg.cluster.system.children import LaunchError
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.proto.errors import UnavailableError
from tests.integration.security.test_security import http_get
from tests.support.certificates import Authority
from tests.support.gateway import FakeRouter, Wait
from tests.support.gateway_server import running
from tests.support.waiting import LONG_WAIT_S, until

NUM_TOKENS = 4000
"""Of an answer whose events fill every buffer between the gateway and a client that does not read."""
SERVING, NOT_SERVING = 1, 2


async def test_a_stop_waits_for_running_answers_and_no_longer(folder: Path) -> None:
    """A stream of gRPC runs to its end, a new one is refused, watchers see it at once; what is no answer, such as a
    watch of the health, holds nothing up."""
    router = FakeRouter(lambda request: [[5], Wait()])
    async with (
        running(folder, router, drain_timeout_s=600.0) as server,
        AsyncClient(server.address, resume_s=0.0) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stream = client.stream("hi", max_tokens=4)
        async for _ in stream:
            break
        stop = asyncio.create_task(server.stop())
        assert (await watch.read()).status == NOT_SERVING
        async with grpc.aio.insecure_channel(server.address) as later:
            check: Any = health_pb2_grpc.HealthStub(later).Check
            assert (await check(health_pb2.HealthCheckRequest(), timeout=LONG_WAIT_S)).status == NOT_SERVING
        with pytest.raises(UnavailableError):
            await client.generate("hi", max_tokens=1)
        assert not stop.done()
        router.handles[0].cancelled.set()  # the answer ends
        await asyncio.wait_for(stop, LONG_WAIT_S)


async def test_an_answer_that_takes_too_long_is_cut_off(folder: Path) -> None:
    router = FakeRouter(lambda request: [[5], Wait()])
    async with running(folder, router, drain_timeout_s=0.0) as server, AsyncClient(server.address) as client:
        stream = client.stream("hi", max_tokens=4)
        async for _ in stream:
            break
        await server.stop()
        assert router.handles[0].num_cancels == 1


async def test_the_command_for_probes(folder: Path, tmp_path: Path) -> None:
    """Over HTTP, over TLS whose certificate names another host, with a client's certificate, and without a gateway."""
    authority, router = Authority(tmp_path), FakeRouter(lambda request: [[5], Wait()])
    cert, key = authority.issue("gateway.example")
    client_cert, client_key = authority.issue("probe")
    mine = {"DISAGG_CLIENT_CERT": client_cert, "DISAGG_CLIENT_KEY": client_key}
    tls = TlsFiles(cert=cert, key=key, client_ca=str(authority.ca))

    async def ask(url: str, path: str, environ: dict[str, str]) -> tuple[int, str]:
        shown = io.StringIO()
        status = await asyncio.to_thread(run_health, url, path, environ, Console(file=shown))
        return status, shown.getvalue()

    async def ask_at(address: str, path: str) -> tuple[int, str]:
        shown = io.StringIO()
        status = await asyncio.to_thread(run_health_at, address, path, {}, Console(file=shown))
        return status, shown.getvalue().partition(";")[0]

    async with running(folder, router, http_port=0) as server:
        url = f"http://{server.http_address}"
        assert await ask(url, ALIVE, {}) == (0, '200 {"status":"alive"}\n')
        assert await ask(url, READY, {}) == (1, '503 {"status":"no decode worker"}\n')
        assert await ask_at(server.address, READY) == (0, "SERVING (gRPC)\n")  # no controller tells where HTTP is
        await server.set_serving(False)
        assert await ask_at(server.address, READY) == (1, "NOT_SERVING (gRPC)\n")
        with pytest.raises(LaunchError, match=r"speaks HTTP; gRPC is at 127\.0\.0\.1:8470, unless gateway.port says"):
            await asyncio.to_thread(run_status, server.http_address, Console(file=io.StringIO()))
        address = server.address
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{tenant: a, key: key-of-tenant-a-0001}]")
    keys.chmod(0o600)
    async with running(folder, router, api_keys=str(keys)) as server:
        assert await ask_at(server.address, READY) == (0, "SERVING (gRPC)\n")  # it has no key, and needs none
    assert await ask_at(address, ALIVE) == (1, f"{address} does not answer: failed to connect to all addresses")
    status, text = await ask(url, ALIVE, {})
    assert (status, text.startswith(f"{url} does not answer")) == (1, True)
    async with running(folder, router, http_port=0, tls=tls) as server:
        url = f"https://{server.http_address}"
        assert await ask(url, ALIVE, mine) == (0, '200 {"status":"alive"}\n')
        assert (await ask(url, ALIVE, {}))[0] == 1


# ---------------------------------------------------------------- disagg up


@contextmanager
def serving(config: Path, manager: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`disagg up` with a configuration, under a service manager with this socket; host:port of its HTTP."""
    command = [sys.executable, "-m", "disagg.cli", "up", "--launcher", "processes", "--config", str(config)]
    environment = {**os.environ, "NOTIFY_SOCKET": str(manager)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment) as up:
        timer = threading.Timer(2 * LONG_WAIT_S, up.kill)
        timer.start()
        try:
            assert up.stdout is not None
            for line in up.stdout:
                if found := re.search(r", (127\.0\.0\.1:\d+) \(HTTP\)", line):
                    yield up, found[1]
                    break
            else:
                raise AssertionError("it did not come up")
        finally:
            up.terminate()
            up.communicate()
            timer.cancel()


def bound(manager: socket.socket, folder: Path) -> Path:
    """The socket of a service manager, which waits no longer than a test."""
    manager.settimeout(LONG_WAIT_S)
    manager.bind(str(folder / "notify"))
    return folder / "notify"


def post(address: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read yet."""
    host, port = address.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


def rest_of(connection: socket.socket) -> bytes:
    """Until it is closed."""
    pieces: list[bytes] = []
    while piece := connection.recv(1 << 16):
        pieces.append(piece)
    return b"".join(pieces)


def test_probes_and_streams_while_a_cluster_stops(tmp_path: Path) -> None:
    config = tmp_path / "disagg.yaml"
    config.write_text("model: {path: fake}\ngateway: {port: 0, drain_timeout_s: 100}\n")
    request = {"model": "fake", "prompt": "hi", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, serving(config, bound(manager, tmp_path)) as it:
        up, address = it
        assert manager.recv(64) == b"READY=1"
        assert http_get(address, "/readyz", None) == (200, b'{"status":"ready"}')
        with post(address, {**request, "stream_options": {"include_usage": True}}) as stream:
            answer = stream.recv(1024)
            assert answer.startswith(b"HTTP/1.1 200")
            up.send_signal(signal.SIGTERM)
            until(lambda: http_get(address, "/readyz", None)[0] == 503, "it stays ready")
            assert http_get(address, "/readyz", None) == (503, b'{"status":"draining"}')
            assert manager.recv(64) == b"STOPPING=1"
            assert http_get(address, "/livez", None)[0] == 200
            assert up.poll() is None
            with post(address, request) as refused:
                error = rest_of(refused)  # which ends, because the connection is closed
            assert error.startswith(b"HTTP/1.1 503")
            assert b"gateway_stopping" in error
            answer += rest_of(stream)
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert f'"completion_tokens":{NUM_TOKENS}'.encode() in answer
        assert up.wait(LONG_WAIT_S) == 0
