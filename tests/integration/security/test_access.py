"""What keys and certificates open besides requests, what is written down, and that both are read again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from disagg.client import AsyncClient
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.operators.shell.state_feed import MAX_STREAMS_PER_TENANT
from disagg.gateway.server import GatewayServer
from disagg.proto.errors import AuthenticationError, PermissionDeniedError, UnavailableError
from disagg.router.api import TenantLimits
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc
from tests.integration.security.test_security import client_context, http_get
from tests.support.certificates import Authority
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.gateway_server import running
from tests.support.waiting import eventually

KEY_A, KEY_M, KEY_ADMIN = "key-of-tenant-a-0001", "key-of-monitoring-02", "key-of-the-operators"
KEYS = f"""
- {{tenant: a, key: {KEY_A}}}
- {{tenant: m, key: {KEY_M}, metrics: true}}
- {{tenant: ops, key: {KEY_ADMIN}, admin: true}}
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path, KEYS)


def write_keys(folder: Path, text: str) -> Path:
    file, new = folder / "keys.yaml", folder / "keys.new"
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(file)
    return file


def answers(_: object) -> list[list[int]]:
    return [[5]]


async def status(server: GatewayServer, path: str, key: str | None, tls: ssl.SSLContext | None = None) -> int:
    return (await asyncio.to_thread(http_get, server.http_address, path, key, tls))[0]


async def test_metrics_are_for_keys_that_may_read_them(folder: Path, keys: Path) -> None:
    async with running(folder, FakeRouter(), api_keys=str(keys), http_port=0) as server:
        found = {key: await status(server, "/metrics", key) for key in (None, KEY_A, KEY_M, KEY_ADMIN)}
        assert found == {None: 401, KEY_A: 403, KEY_M: 200, KEY_ADMIN: 200}
        _, body = await asyncio.to_thread(http_get, server.http_address, "/metrics", KEY_M)
        assert b'disagg_refused_authentications_total{protocol="http",reason="missing"} 1.0' in body
    async with running(folder, FakeRouter(), http_port=0) as server:
        assert await status(server, "/metrics", None) == 200


async def test_refusals_and_changes_are_written_down(
    folder: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder, FakeRouter(), api_keys=str(keys), http_port=0) as server:
        caplog.clear()
        async with AsyncClient(server.address, "unknown-key-of-nobody") as client:
            with pytest.raises(AuthenticationError):
                await client.models()
        assert await status(server, "/v1/models", "unknown-key-of-nobody") == 401
        async with AsyncClient(server.address, KEY_A) as client:
            with pytest.raises(PermissionDeniedError):
                await client.drain("decode-0")
        async with AsyncClient(server.address, KEY_ADMIN) as client:
            with pytest.raises(UnavailableError):  # there is no controller here
                await client.scale({"decode": 3})
    lines = [record.getMessage() for record in caplog.records if record.name == "disagg.audit"]
    assert [line.replace(line.split(" from ")[1].split(": ")[0], "PEER") for line in lines] == [
        "refused a call over grpc from PEER: unknown key",
        "refused a call over http from PEER: unknown key",
        "drain decode-0 by tenant a from PEER: not allowed",
        "scale decode=3 by tenant ops from PEER: this gateway has no controller",
    ]
    assert all("127.0.0.1:" in line and "nobody" not in line for line in lines)


async def test_of_health_only_the_methods_that_balancers_ask_are_open(
    folder: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(folder, FakeRouter(), api_keys=str(keys)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        caplog.clear()
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
        listed: Any = channel.unary_unary("/grpc.health.v1.Health/List", None, None)
        other: Any = channel.unary_unary("/grpc.health.v1.Health/CheckX", None, None)
        for call, key, code in (
            (listed, None, grpc.StatusCode.UNAUTHENTICATED),
            (other, None, grpc.StatusCode.UNAUTHENTICATED),
            (listed, KEY_A, grpc.StatusCode.UNIMPLEMENTED),
        ):
            metadata = () if key is None else (("authorization", f"Bearer {key}"),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", metadata=metadata, timeout=60)
            assert caught.value.code() is code
    assert [record for record in caplog.records if record.exc_info] == []


async def test_watchers_of_a_tenant_are_few_and_share_what_they_see(folder: Path, keys: Path) -> None:
    router = FakeRouter()
    async with (
        running(folder, router, api_keys=str(keys)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
        contextlib.AsyncExitStack() as stack,
    ):
        stub: Any = pb_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.WatchClusterStateRequest(interval_ms=60_000)

        def watch(key: str) -> Any:
            call = stub.WatchClusterState(request, metadata=(("authorization", f"Bearer {key}"),))
            stack.callback(call.cancel)
            return call

        first = [watch(KEY_A) for _ in range(MAX_STREAMS_PER_TENANT)]
        for call in first:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(KEY_A).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "WatchClusterState: 16 streams of a tenant at a time"
        assert (await watch(KEY_M).read()).HasField("state")
        first[0].cancel()

        async def has_room() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                return (await watch(KEY_A).read()).HasField("state")  # type: ignore[no-any-return]
            return False

        await eventually(has_room, every_s=0.05)


async def test_a_client_s_certificate_says_which_tenant_it_is(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tenant, nobody = authority.issue("team-a"), authority.issue("no tenant's name")
    files = TlsFiles(cert=cert, key=key, client_ca=authority.ca)
    router = FakeRouter(answers)
    async with running(folder, router, http_port=0, tls=files) as server:
        async with AsyncClient(server.address, None, authority.ca, *tenant) as client:
            assert (await client.generate("hello")).reason == "length"
            assert [delta async for delta in client.stream("hello")] != []
            with pytest.raises(PermissionDeniedError):
                await client.scale({"decode": 3})
        assert [request.tenant for request, _ in router.submitted] == ["team-a"] * 2
        as_tenant, as_nobody = (client_context(authority.ca, pair) for pair in (tenant, nobody))
        paths = ("/v1/models", "/metrics")
        assert [await status(server, path, None, as_tenant) for path in paths] == [200, 403]
        assert [await status(server, path, None, as_nobody) for path in paths] == [401, 401]
        async with AsyncClient(server.address, None, authority.ca, *nobody) as client:
            with pytest.raises(AuthenticationError, match="the common name of your certificate"):
                await client.models()


SOLE = TenantLimits(max_priority=0)
"""Of the one tenant in a file."""


async def read_to_the_end(states: AsyncIterator[object]) -> None:
    async for _ in states:
        pass


async def test_keys_are_read_again(folder: Path, keys: Path) -> None:
    router = FakeRouter(answers)
    async with running(folder, router, api_keys=str(keys), http_port=0) as server:

        async def works(key: str) -> bool:
            return await status(server, "/v1/models", key) == 200

        async with AsyncClient(server.address, KEY_A) as client:
            async with contextlib.aclosing(client.watch(0.1)) as states:
                await anext(states)
                write_keys(keys.parent, "[{tenant: b, key: key-of-tenant-b-0002}]")
                await eventually(lambda: works("key-of-tenant-b-0002"), every_s=0.05)
                assert not await works(KEY_A)
                with pytest.raises(AuthenticationError):  # what has no end ends now
                    await read_to_the_end(states)
            with pytest.raises(AuthenticationError):
                await client.generate("hello")
        write_keys(keys.parent, "not a list")
        write_keys(keys.parent, f"[{{tenant: c, key: {KEY_A}}}]")
        await eventually(lambda: works(KEY_A), every_s=0.05)
        assert not await works("key-of-tenant-b-0002")
        assert router.stated == [{"b": SOLE}, {"c": SOLE}]


async def test_a_key_that_has_expired_ends_as_a_removed_one(folder: Path, keys: Path) -> None:
    async with running(folder, FakeRouter(answers), api_keys=str(keys), http_port=0) as server:
        async with AsyncClient(server.address, KEY_A) as client, contextlib.aclosing(client.watch(0.1)) as states:
            await anext(states)
            write_keys(keys.parent, f"[{{tenant: a, key: {KEY_A}, expires: 2000-01-01}}]")
            with pytest.raises(AuthenticationError, match=r"has expired$"):
                await read_to_the_end(states)
            with pytest.raises(AuthenticationError) as caught:
                await client.generate("hello")
        assert caught.value.code == "expired_api_key"
        code, body = await asyncio.to_thread(http_get, server.http_address, "/v1/models", KEY_A)
        assert (code, json.loads(body)["error"]["code"]) == (401, "expired_api_key")
        write_keys(keys.parent, f"[{{tenant: a, key: {KEY_A}, expires: 2999-01-01}}]")

        async def works() -> bool:
            return await status(server, "/v1/models", KEY_A) == 200

        await eventually(works, every_s=0.05)


async def test_scopes_and_models_of_keys_over_grpc(folder: Path, tmp_path: Path) -> None:
    file = write_keys(
        tmp_path,
        f"""
- {{tenant: m, key: {KEY_M}, scopes: [metrics]}}
- {{tenant: a, key: {KEY_A}, models: [other]}}
- {{tenant: ops, key: {KEY_ADMIN}, scopes: [admin, inference], models: [{MODEL_NAME}]}}
""",
    )
    async with running(folder, FakeRouter(answers), api_keys=str(file)) as server:
        async with AsyncClient(server.address, KEY_M) as client:
            for call in (client.generate("hello"), client.tokenize("hello")):
                with pytest.raises(PermissionDeniedError, match=r"^this needs a key with the scope inference$"):
                    await call
            assert [each.name for each in await client.models()] == [MODEL_NAME]
        async with AsyncClient(server.address, KEY_A) as client:
            assert await client.models() == []
            message = rf"^model: this key is not for '{MODEL_NAME}', but for other$"
            for call in (client.generate("hello", model=MODEL_NAME), client.tokenize("hello", model=MODEL_NAME)):
                with pytest.raises(PermissionDeniedError, match=message):
                    await call
            with pytest.raises(PermissionDeniedError, match=r"^this needs a key with the scope admin$"):
                await client.requests()
        async with AsyncClient(server.address, KEY_ADMIN) as client:
            assert (await client.generate("hello")).reason == "length"
            refused = [(each.outcome, each.detail, each.attempts) for each in await client.requests()]
            assert refused == [("permission_denied", f"model: this key is not for '{MODEL_NAME}', but for other", 0)]


async def test_certificates_are_read_again(folder: Path, tmp_path: Path) -> None:
    """The server's, and the CA of its clients': who is signed by the old one only is no longer let in."""
    (tmp_path / "new").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "new")
    cert, key = authority.issue("server")
    ours, theirs = authority.issue("client"), other.issue("client")
    files = TlsFiles(cert=cert, key=key, client_ca=str(tmp_path / "ca.pem"))
    router = FakeRouter(answers)
    async with running(folder, router, http_port=0, tls=files) as server:
        old, new = client_context(authority.ca, ours), client_context(other.ca, theirs)
        old_ca = str(tmp_path / "old.pem")
        Path(old_ca).write_bytes(Path(authority.ca).read_bytes())

        async def works(tls: ssl.SSLContext) -> bool:
            try:
                return await status(server, "/v1/models", None, tls) == 200
            except (ssl.SSLError, ConnectionError):
                return False

        assert (await works(old), await works(new)) == (True, False)
        async with AsyncClient(server.address, None, old_ca, *ours) as client:
            assert (await client.generate("hello")).reason == "length"
            Path(cert).write_text("not PEM")  # what cannot be used changes nothing
            assert await works(old)
            for source, target in zip((*other.issue("server"), other.ca), (cert, key, authority.ca), strict=True):
                Path(source).replace(target)
            renewed = client_context(authority.ca, theirs)
            await eventually(lambda: works(renewed), every_s=0.05)
            assert not await works(old)
            assert (await client.generate("hello")).reason == "length"  # a connection that is there goes on
        async with AsyncClient(server.address, None, authority.ca, *theirs) as client:
            assert (await client.generate("hello")).reason == "length"
        async with AsyncClient(server.address, None, old_ca, *ours) as client:
            with pytest.raises(UnavailableError):
                await client.models()
