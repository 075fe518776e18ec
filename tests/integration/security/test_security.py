"""Who gets in: API keys, certificates, tenants, and the secret between the processes of one cluster."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from disagg.client import AsyncClient, Client, Finished
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.control.controller_link import call_controller
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.connections.shell.guard import ClusterGuard
from disagg.gateway.auth.auth import KEY_NEEDED
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.server import GatewayServer
from disagg.proto.control import StateRequest
from disagg.proto.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
    RequestNotFoundError,
    UnavailableError,
)
from disagg.proto.ids import RequestId
from disagg.proto.services import (
    AUDIT,
    CHANNEL_OPTIONS,
    CONTROL,
    CONTROLLER_SERVICE,
    FOLLOW,
    REGISTER,
    SERVER_OPTIONS,
    SESSION,
    TRANSFER,
    WATCH,
    service_and_method,
)
from disagg.router.api import RequestTrace
from disagg.v1 import inference_pb2 as pb
from disagg.v1 import inference_pb2_grpc as pb_grpc
from tests.support.certificates import Authority
from tests.support.gateway import MODEL_NAME, FakeRouter
from tests.support.gateway_server import running
from tests.support.ports import free_port
from tests.support.secret import OTHER_SECRET, SECRET
from tests.support.waiting import WAIT_S, eventually
from tests.support.workers import wait_until_workers_idle

KEY_A, KEY_B, KEY_ADMIN = "key-of-tenant-a-0001", "key-of-tenant-b-0002", "key-of-the-operators"
KEYS = f"""
- {{tenant: a, key: {KEY_A}}}
- {{tenant: b, key: {KEY_B}}}
- {{tenant: ops, key: {KEY_ADMIN}, admin: true}}
"""


SMALL_POOLS = {"prefill": {"num_blocks": 256}, "decode": {"num_blocks": 256}}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.touch(mode=0o600)
    file.write_text(KEYS)
    return str(file)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


def answers(_: object) -> list[list[int]]:
    return [[5]]


@asynccontextmanager
async def keyed(folder: Path, keys: str, **changes: Any) -> AsyncIterator[tuple[GatewayServer, FakeRouter]]:
    router = FakeRouter(answers)
    async with running(folder, router, api_keys=keys, **changes) as server:
        yield server, router


# ---------------------------------------------------------------- gRPC


def all_methods() -> list[tuple[str, bool]]:
    """(path, whether the client streams) of every public method but health, from the services' descriptors."""
    services = pb.DESCRIPTOR.services_by_name.values()
    found = [(f"/{s.full_name}/{m.name}", m.client_streaming) for s in services for m in s.methods]
    reflection = reflection_pb2.DESCRIPTOR.services_by_name.values()
    found += [(f"/{s.full_name}/{m.name}", m.client_streaming) for s in reflection for m in s.methods]
    assert len(found) >= 13
    return found


async def status_of(
    channel: grpc.aio.Channel, path: str, client_streams: bool, key: str | None
) -> grpc.aio.AioRpcError:
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    request = b"not a protobuf \xff" * 1000
    try:
        if client_streams:
            call: Any = channel.stream_stream(path, None, None)(None, metadata=metadata, timeout=60)
        else:
            call = channel.unary_stream(path, None, None)(request, metadata=metadata, timeout=60)
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"{path} answered")


@pytest.mark.parametrize("key", [None, "unknown-key-of-nobody", KEY_A[:-1], ""])
async def test_every_method_needs_a_key(folder: Path, keys: str, key: str | None) -> None:
    async with keyed(folder, keys) as (server, router), grpc.aio.insecure_channel(server.address) as channel:
        for path, client_streams in all_methods():
            error = await status_of(channel, path, client_streams, key)
            assert (path, error.code(), error.details()) == (path, grpc.StatusCode.UNAUTHENTICATED, KEY_NEEDED)
        assert router.submitted == []


async def test_a_method_that_is_not_there_tells_nothing_without_a_key(folder: Path, keys: str) -> None:
    async with keyed(folder, keys) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        error = await status_of(channel, "/disagg.v1.InferenceService/None", False, None)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        error = await status_of(channel, "/disagg.v1.InferenceService/None", False, KEY_A)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_open(folder: Path, keys: str) -> None:
    async with keyed(folder, keys) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_answers_with_a_key(folder: Path, keys: str) -> None:
    async with keyed(folder, keys) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(metadata=(("authorization", f"Bearer {KEY_A}"),))
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [service.name for service in (await call.read()).list_services_response.service]
        assert "disagg.v1.AdminService" in names
        call.cancel()


async def test_a_key_from_argument_and_environment(folder: Path, keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keyed(folder, keys) as (server, router):
        async with AsyncClient(server.address, KEY_A) as client:
            assert (await client.generate("hello")).reason == "length"
        monkeypatch.setenv("DISAGG_API_KEY", KEY_B)
        assert await asyncio.to_thread(blocking_answer, server.address) == "length"
        assert [request.tenant for request, _ in router.submitted] == ["a", "b"]
        async with AsyncClient(server.address, "") as client:
            with pytest.raises(AuthenticationError, match=r"^a valid API key is needed"):
                await client.models()


def blocking_answer(address: str) -> str:
    with Client(address) as client:
        (finished,) = [delta.finished for delta in client.stream("hello") if delta.finished is not None]
        assert isinstance(finished, Finished)
        return finished.reason


async def test_the_caller_is_that_of_each_call(folder: Path, keys: str) -> None:
    """Calls of two tenants on one connection at a time, mixed."""
    async with keyed(folder, keys) as (server, router), grpc.aio.insecure_channel(server.address) as channel:
        stub: Any = pb_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.GenerateOnceRequest(request=pb.GenerateRequest(model="tiny", text="hello"))

        async def call(key: str) -> None:
            await stub.GenerateOnce(request, metadata=(("authorization", f"Bearer {key}"),))

        await asyncio.gather(*(call(key) for key in [KEY_A, KEY_B] * 20))
        assert sorted(request.tenant for request, _ in router.submitted) == ["a"] * 20 + ["b"] * 20


# ---------------------------------------------------------------- rights


Operation = Callable[[AsyncClient], Any]
ADMIN_ONLY: dict[str, Operation] = {
    "SetPoolSizes": lambda client: client.scale({"decode": 2}),
    "DrainWorker": lambda client: client.drain("decode-0"),
    "ForgetTenant": lambda client: client.forget("a"),
    "ProbePair": lambda client: client.probe("prefill-0", "decode-0"),
    "ListRequests": lambda client: client.requests(),
    "GetLoad": lambda client: client.load(),
    "SetDecodes": lambda client: client.set_decodes("gather"),
    "GetShape": lambda client: client.shape(),
}


@pytest.mark.parametrize("name", ADMIN_ONLY)
async def test_what_only_an_admin_may(folder: Path, keys: str, name: str) -> None:
    async with keyed(folder, keys) as (server, _):
        async with AsyncClient(server.address, KEY_A) as client:
            with pytest.raises(PermissionDeniedError, match=r"^this needs a key with the scope admin$"):
                await ADMIN_ONLY[name](client)
        async with AsyncClient(server.address, KEY_ADMIN) as client:
            try:
                await ADMIN_ONLY[name](client)
            except (UnavailableError, InvalidRequestError):  # there is no controller and no worker here
                assert name not in ("ListRequests", "GetLoad", "GetShape", "ForgetTenant")


async def test_forgetting_a_tenant_that_no_key_has_fails(folder: Path, keys: str) -> None:
    async with keyed(folder, keys) as (server, _), AsyncClient(server.address, KEY_ADMIN) as client:
        await client.forget("a")
        with pytest.raises(InvalidRequestError, match=r"^tenant: no key has the tenant 'aa'; similar: a; all workers"):
            await client.forget("aa")


async def test_requests_are_seen_by_their_tenant_and_admins(folder: Path, keys: str) -> None:
    async with keyed(folder, keys) as (server, router):
        router.traces[RequestId("r")] = RequestTrace(request_id=RequestId("r"), tenant="a", stages={"tokenize": 0.0})
        for key in (KEY_A, KEY_ADMIN):
            async with AsyncClient(server.address, key) as client:
                assert (await client.explain("r")).request_id == "r"
        async with AsyncClient(server.address, KEY_B) as client:
            await client.cluster_state()
            with pytest.raises(RequestNotFoundError) as of_other:
                await client.explain("r")
            with pytest.raises(RequestNotFoundError) as of_none:
                await client.explain("s")
            assert str(of_other.value) == str(of_none.value)


async def test_strangers_may_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No keys, all addresses: the machine itself is the operator's, others are not."""
    message = r"^this gateway has no API keys and others can reach it"
    async with running(folder, FakeRouter(answers), host="0.0.0.0") as server:
        address = f"127.0.0.1:{server.port}"
        async with AsyncClient(address) as client:
            assert (await client.generate("hello")).reason == "length"
            await client.requests()
            monkeypatch.setattr("disagg.gateway.auth.shell.rights.is_local_peer", lambda peer: False)
            for operation in ADMIN_ONLY.values():
                with pytest.raises(PermissionDeniedError, match=message):
                    await operation(client)
            await client.cluster_state()
            assert (await client.generate("hello")).reason == "length"


# ---------------------------------------------------------------- HTTP


def http_get(
    address: str,
    path: str,
    key: str | None = None,
    tls: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    if tls is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=tls)
    try:
        connection.request("GET", path, headers=headers or ({} if key is None else {"Authorization": f"Bearer {key}"}))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


async def test_http_asks_for_the_same_keys(folder: Path, keys: str) -> None:
    async with keyed(folder, keys, http_port=0) as (server, _):

        async def get(path: str, key: str | None = None) -> int:
            return (await asyncio.to_thread(http_get, server.http_address, path, key))[0]

        paths = ("/v1/models", "/health", "/metrics", "/version", "/ping", "/none")
        assert {path: await get(path) for path in paths} == dict.fromkeys(paths, 401)
        assert {path: await get(path, "unknown-key-of-nobody") for path in paths} == dict.fromkeys(paths, 401)
        assert [await get(path, KEY_A) for path in ("/v1/models", "/metrics", "/none")] == [200, 403, 404]
        assert await get("/livez") == 200


def http_post(address: str, headers: dict[str, str]) -> tuple[int, str]:
    """What a page's request is answered with: the status, and the error's code."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        body = json.dumps({"model": MODEL_NAME, "prompt": "hi", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status, answer.get("error", {}).get("code", "")
    finally:
        connection.close()


REBOUND, FOREIGN_ORIGIN = {"host": "evil.example:8471"}, {"origin": "https://evil.example"}


async def test_pages_of_other_sites_are_refused_where_no_key_is_asked_for(folder: Path) -> None:
    """A name that was rebound, a foreign origin, and a body that a page can send without a preflight; and metrics,
    which reveal requests of others. Probes are answered under any name."""
    router = FakeRouter(answers)
    async with running(folder, router, http_port=0) as server:

        async def post(headers: dict[str, str]) -> tuple[int, str]:
            return await asyncio.to_thread(http_post, server.http_address, headers)

        async def get(path: str, headers: dict[str, str]) -> int:
            return (await asyncio.to_thread(http_get, server.http_address, path, headers=headers))[0]

        assert await post(REBOUND) == (403, "foreign_site")
        assert await post(FOREIGN_ORIGIN) == (403, "foreign_site")
        assert await post({"content-type": "text/plain"}) == (415, "unsupported_media_type")
        assert [await get(path, REBOUND) for path in ("/metrics", "/v1/models", "/none")] == [403, 403, 403]
        assert [await get(path, REBOUND) for path in ("/livez", "/ping", "/health")] == [
            200,
            503,
            503,
        ]  # without workers
        assert router.submitted == []
        assert await post({}) == (200, "")
        assert [await get(path, {}) for path in ("/metrics", "/v1/models")] == [200, 200]


async def test_an_open_gateway_that_others_reach_looks_at_names_that_it_was_given(folder: Path) -> None:
    """Without `allowed_hosts` the names are unknown and not checked; origins are checked in any case."""
    names: dict[tuple[str, ...], list[int]] = {}
    for hosts in ((), ("llm.local",)):
        async with running(folder, FakeRouter(answers), host="0.0.0.0", http_port=0, allowed_hosts=hosts) as server:
            address = f"127.0.0.1:{server.http_address.rpartition(':')[2]}"
            headers: tuple[dict[str, str], ...] = (
                {"host": "evil.example"},
                {"host": "llm.local"},
                {"host": "10.0.0.1:80"},
                FOREIGN_ORIGIN,
                {},
            )
            names[hosts] = [(await asyncio.to_thread(http_post, address, each))[0] for each in headers]
    assert names == {(): [200, 200, 200, 403, 200], ("llm.local",): [403, 200, 200, 403, 200]}


# ---------------------------------------------------------------- connections


async def closed_by_server(address: str, num_connections: int, num_closed: int) -> int:
    """Opens silent connections, and waits until the server has closed so many of them; how many it closed, those
    included that follow at once."""
    host, _, port = address.rpartition(":")
    streams = [await asyncio.open_connection(host, int(port)) for _ in range(num_connections)]

    async def until_closed(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass

    ends = [asyncio.create_task(until_closed(reader)) for reader, _ in streams]
    await eventually(lambda: sum(end.done() for end in ends) >= num_closed)
    await asyncio.wait(ends, timeout=0.5)
    found = sum(end.done() for end in ends)
    for end in ends:
        end.cancel()
    for _, writer in streams:
        writer.close()
    await asyncio.gather(*ends, *(writer.wait_closed() for _, writer in streams), return_exceptions=True)
    return found


async def test_silent_grpc_connections_are_closed(folder: Path, keys: str) -> None:
    async with keyed(folder, keys, grpc_handshake_timeout_s=0.5) as (server, _):
        assert await closed_by_server(server.address, 50, 50) == 50
        async with AsyncClient(server.address, KEY_A) as client:
            assert (await client.generate("hello")).reason == "length"


async def first_answer(client: AsyncClient) -> str:
    """The server may see a moment later that the connections before this one have gone."""
    while True:
        with contextlib.suppress(UnavailableError):
            return (await client.generate("hello")).reason
        await asyncio.sleep(0.05)


async def test_more_grpc_connections_than_allowed_are_closed(folder: Path, keys: str) -> None:
    async with keyed(folder, keys, max_grpc_connections=3, grpc_handshake_timeout_s=60.0) as (server, _):
        assert await closed_by_server(server.address, 5, 2) == 2
        async with asyncio.timeout(60), AsyncClient(server.address, KEY_A) as client:
            assert await first_answer(client) == "length"


async def test_an_idle_client_is_served_again(folder: Path, keys: str) -> None:
    async with keyed(folder, keys, idle_timeout_s=0.2) as (server, _), AsyncClient(server.address, KEY_A) as client:
        for _ in range(3):
            assert (await client.generate("hello")).reason == "length"
            await asyncio.sleep(0.5)


# ---------------------------------------------------------------- TLS


def client_context(ca: str, cert: tuple[str, str] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    if cert is not None:
        context.load_cert_chain(*cert)
    return context


async def test_tls_on_both_protocols(folder: Path, keys: str, authority: Authority) -> None:
    cert, key = authority.issue("server")
    async with keyed(folder, keys, http_port=0, tls=TlsFiles(cert=cert, key=key)) as (server, _):
        async with AsyncClient(server.address, KEY_A, authority.ca) as client:
            assert (await client.generate("hello")).reason == "length"
        tls = client_context(authority.ca)
        status, body = await asyncio.to_thread(http_get, server.http_address, "/v1/models", KEY_A, tls)
        assert (status, b'"tiny"' in body) == (200, True)


async def test_a_server_of_another_ca_is_not_trusted(folder: Path, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    other = Authority(tmp_path, "other")
    async with running(folder, FakeRouter(), http_port=0, tls=TlsFiles(cert=cert, key=key)) as server:
        for client in (AsyncClient(server.address, ca_cert=other.ca), AsyncClient(server.address)):
            async with client:
                with pytest.raises(UnavailableError):
                    await client.models()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(http_get, server.http_address, "/livez", None, client_context(other.ca))


async def test_mutual_tls(folder: Path, authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("server")
    ours, theirs = authority.issue("client"), Authority(tmp_path, "other").issue("stranger")
    files = TlsFiles(cert=cert, key=key, client_ca=authority.ca)
    async with running(folder, FakeRouter(answers), http_port=0, tls=files) as server:
        async with AsyncClient(server.address, None, authority.ca, *ours) as client:
            assert (await client.generate("hello")).reason == "length"
        tls = client_context(authority.ca, ours)
        assert (await asyncio.to_thread(http_get, server.http_address, "/v1/models", None, tls))[0] == 200
        for pair in (None, theirs):
            async with AsyncClient(server.address, None, authority.ca, *(pair or ("", ""))) as client:
                with pytest.raises(UnavailableError):
                    await client.models()
            tls = client_context(authority.ca, pair)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.to_thread(http_get, server.http_address, "/livez", None, tls)


# ---------------------------------------------------------------- the cluster's secret


@pytest.fixture(scope="module")
def cluster(keys: str) -> Iterator[ProcessCluster]:
    config = {
        "model": {"path": "fake"},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "api_keys": keys},
        "placement": {"local_prefill": "never"},
        "controller": {"port": free_port()},
        "pools": SMALL_POOLS,
    }
    with ProcessCluster(parse_config(config)) as running_cluster:
        yield running_cluster
    assert running_cluster.killed == []


async def call_inside(address: str, path: str, metadata: tuple[tuple[str, bytes], ...]) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call: Any = channel.stream_stream(path, None, None)(None, metadata=metadata, timeout=60)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    raise AssertionError(f"{path} answered")


async def test_internal_methods_are_closed_to_others(cluster: ProcessCluster) -> None:
    refused = (grpc.StatusCode.UNAUTHENTICATED, "not a process of this cluster")
    prefill, decode = cluster.workers
    controller = f"127.0.0.1:{cluster.plan.config.controller.port}"
    inside = [(worker.address, path) for worker in (prefill, decode) for path in (SESSION, WATCH, AUDIT, "/x.Y/Z")]
    inside += [(decode.address, TRANSFER), *((controller, path) for path in (REGISTER, FOLLOW, CONTROL))]
    for address, path in inside:
        for metadata in ((), OTHER_SECRET.metadata):
            assert (path, await call_inside(address, path, metadata)) == (path, refused)
    with pytest.raises(UnavailableError, match="not a process of this cluster"):
        await asyncio.to_thread(call_controller, controller, StateRequest(), OTHER_SECRET)
    async with AsyncClient(cluster.address, KEY_A) as client:
        assert (await client.generate([1, 2, 3], max_tokens=2)).reason == "length"


@pytest.mark.usefixtures("own_templates")
def test_the_secret_is_nowhere_to_be_seen(keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in command lines, environments and logs of the processes, nor in what the cluster prints of itself; and
    the operator's own key is in none of them either."""
    monkeypatch.setenv("DISAGG_API_KEY", KEY_ADMIN)
    config = {
        "model": {"path": "fake"},
        "transfer": {"transport": "shm"},
        "gateway": {"port": 0, "api_keys": keys},
        "pools": SMALL_POOLS,
    }
    with ProcessCluster(parse_config(config), log_dir=tmp_path) as cluster:
        pids = [cluster.pid(name) for name in ("prefill-0", "decode-0", "gateway")]
        pids += {parent_of(pid) for pid in pids}  # their templates
        assert len(pids) == 5
        seen = [Path(f"/proc/{pid}/{file}").read_bytes() for pid in pids for file in ("cmdline", "environ")]
        seen.append(repr(vars(cluster)).encode())
        value = cluster.secret.value
    logs = sorted(tmp_path.iterdir())
    names = ["decode-0.log", "gateway.log", "prefill-0.log", "template-gateway.log", "template-worker.log"]
    assert [log.name for log in logs] == names
    assert [log.stat().st_mode & 0o777 for log in logs] == [0o600] * 5
    forms = (KEY_ADMIN.encode(), value, value.hex().encode(), base64.b64encode(value), repr(value)[2:-1].encode())
    for content in (*seen, *(log.read_bytes() for log in logs)):
        assert [form for form in forms if form in content] == []


def parent_of(pid: int | None) -> int:
    """The process that has forked this one."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("PPid:")[2].split()[0])


async def test_a_wrong_secret_is_logged_once_for_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    server = grpc.aio.server(interceptors=(ClusterGuard(SECRET),), options=SERVER_OPTIONS)

    async def control(frame: bytes, context: object) -> bytes:
        return frame

    methods = {service_and_method(CONTROL)[1]: grpc.unary_unary_rpc_method_handler(control)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CONTROLLER_SERVICE, methods),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        with caplog.at_level(logging.WARNING, logger="disagg.connections.shell.guard"):
            for _ in range(3):
                assert (await call_inside(address, CONTROL, ()))[0] is grpc.StatusCode.UNAUTHENTICATED
        (line,) = caplog.messages
        assert line.startswith("refused a call from ipv4:127.0.0.1:")
        assert line.endswith(" without the cluster's secret (logged once for each host)")
        async with grpc.aio.insecure_channel(address) as channel:
            echo = channel.unary_unary(CONTROL, None, None)
            assert await echo(b"x", metadata=SECRET.metadata) == b"x"
    finally:
        await server.stop(None)


# ---------------------------------------------------------------- tenants


async def test_what_one_tenant_computed_is_no_hit_for_another(cluster: ProcessCluster) -> None:
    """Neither in the cached tokens that are reported to a tenant, nor in what the workers reuse."""
    prompt = list(range(100, 196))

    async def cached(key: str, salt: str = "") -> int:
        async with AsyncClient(cluster.address, key) as client:
            answer = await client.generate(prompt, max_tokens=2, ignore_eos=True, cache_salt=salt)
            return answer.usage.cached_tokens

    async def hit(key: str) -> int:
        """Tokens of the first hit: on a busy machine an attempt may be lost, and the next one computes again."""
        ends_at = time.monotonic() + WAIT_S
        while not (found := await cached(key)) and time.monotonic() < ends_at:
            pass
        return found

    assert await cached(KEY_A) == 0
    assert (of_own := await hit(KEY_A)) > 0
    assert await cached(KEY_B) == 0
    assert await hit(KEY_B) == of_own
    assert await cached(KEY_A, salt="other") == 0
    assert await hit(KEY_A) == of_own
    await wait_until_workers_idle(cluster.workers, cluster.secret)
