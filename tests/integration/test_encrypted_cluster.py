"""TLS between the processes of a cluster, with real sockets: who connects, who is refused, and whole answers."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.engine.io.guard import ClusterGuard
from disagg.engine.runner.fake import fake_generate
from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.connections import channels, identity
from disagg.proto.services import CHANNEL_OPTIONS, SERVER_OPTIONS, service_and_method
from tests.support.secret import OTHER_SECRET, SECRET

ECHO = "/disagg.test.Echo/Echo"
ENCRYPTED = ClusterSecret(SECRET.value, encrypted=True)
UNAUTHENTICATED = ClusterSecret(OTHER_SECRET.value, encrypted=True)
PROMPT = tuple(range(40))
TIMEOUT_S = 30.0


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _serve() -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(interceptors=(ClusterGuard(ENCRYPTED),), options=SERVER_OPTIONS)
    service, method = service_and_method(ECHO)
    handlers = {method: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = channels.add_port(server, "127.0.0.1:0", ENCRYPTED)
    await server.start()
    return server, f"127.0.0.1:{port}"


async def _call(channel: grpc.aio.Channel, secret: ClusterSecret) -> bytes:
    async with channel:
        call = channel.unary_unary(ECHO, None, None)
        answer: bytes = await call(b"hello", metadata=secret.metadata, timeout=TIMEOUT_S)
        return answer


async def test_processes_of_the_cluster_connect() -> None:
    server, address = await _serve()
    assert await _call(channels.open_channel(address, ENCRYPTED), ENCRYPTED) == b"hello"

    def blocking() -> bytes:
        with channels.open_blocking_channel(address, ENCRYPTED) as channel:
            answer: bytes = channel.unary_unary(ECHO, None, None)(b"hi", metadata=ENCRYPTED.metadata, timeout=TIMEOUT_S)
            return answer

    assert await asyncio.to_thread(blocking) == b"hi"
    await server.stop(None)


def _without_certificate(address: str) -> grpc.aio.Channel:
    """Has the authority, as any observer of a handshake does, and no certificate of its own."""
    authority = identity.make_leaf(ENCRYPTED, 1_800_000_000.0).authority
    options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", identity.NAME))
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options)


@pytest.mark.parametrize("kind", ["plain", "another cluster's certificate", "no certificate"])
async def test_a_stranger_is_refused_in_the_handshake(kind: str) -> None:
    """Even with the secret's bytes in its metadata: these never arrive."""
    server, address = await _serve()
    if kind == "plain":
        channel = channels.open_channel(address, SECRET)
    elif kind == "no certificate":
        channel = _without_certificate(address)
    else:
        channel = channels.open_channel(address, UNAUTHENTICATED)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _call(channel, ENCRYPTED)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


async def test_a_listening_process_shows_a_new_certificate_when_its_own_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    make_leaf = identity.make_leaf

    def noting(secret: ClusterSecret, now: float) -> identity.Leaf:
        made.append(now)
        return make_leaf(secret, now)

    monkeypatch.setattr(channels, "_leaves", {})
    monkeypatch.setattr(identity, "make_leaf", noting)
    monkeypatch.setattr(identity, "RENEW_AFTER_S", 1e9)
    server, address = await _serve()
    assert await _call(channels.open_channel(address, ENCRYPTED), ENCRYPTED) == b"hello"
    assert len(made) == 1
    monkeypatch.setattr(identity, "RENEW_AFTER_S", 0.0)  # from now on every leaf is due
    assert await _call(channels.open_channel(address, ENCRYPTED), ENCRYPTED) == b"hello"
    assert len(made) >= 3  # the caller's, and the server's at the handshake
    await server.stop(None)


def test_answers_come_through_an_encrypted_cluster() -> None:
    raw = {
        "model": {"path": "fake"},
        "gateway": {"port": 0},
        "placement": {"local_prefill": "never"},
        "transfer": {"transport": "shm"},
        "network": {"encryption": "on"},
    }
    with ProcessCluster(parse_config(raw)) as cluster:
        worker = cluster.workers[0].address
        with Client(cluster.address) as client:
            answer = client.generate(PROMPT, max_tokens=8, temperature=0.0)
            assert list(answer.token_ids) == fake_generate(PROMPT, 8)
        with grpc.insecure_channel(worker, options=CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary("/disagg.internal.Worker/Audit", None, None)
            with pytest.raises(grpc.RpcError) as error:
                call(b"", metadata=cluster.secret.metadata, timeout=TIMEOUT_S)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
