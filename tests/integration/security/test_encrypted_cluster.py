"""TLS between the processes of a cluster, with real sockets: who connects, who is refused, and whole answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from disagg.client import Client
from disagg.cluster.config.cluster_config import parse_config
from disagg.cluster.hosts.processes import ProcessCluster
from disagg.connections import identity
from disagg.connections.cluster_secret import CertificateFiles, ClusterSecret
from disagg.connections.shell import channels
from disagg.connections.shell.guard import ClusterGuard
from disagg.engine.fake_runner import fake_generate
from disagg.proto.errors import ConfigError
from disagg.proto.services import CHANNEL_OPTIONS, SERVER_OPTIONS, service_and_method
from tests.integration.security.test_security import http_get
from tests.support.certificates import Authority
from tests.support.metrics import read_samples, value
from tests.support.secret import OTHER_SECRET, SECRET

ECHO = "/disagg.test.Echo/Echo"
ENCRYPTED = ClusterSecret(SECRET.value, encrypted=True)
UNAUTHENTICATED = ClusterSecret(OTHER_SECRET.value, encrypted=True)
PROMPT = tuple(range(40))
TIMEOUT_S = 60.0


async def _echo(request: bytes, context: object) -> bytes:
    return request


async def _serve(secret: ClusterSecret = ENCRYPTED) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(interceptors=(ClusterGuard(secret),), options=SERVER_OPTIONS)
    service, method = service_and_method(ECHO)
    handlers = {method: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = channels.add_port(server, "127.0.0.1:0", secret)
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


# ---------------------------------------------------------------- given certificates


def _given(authority: Authority, name: str = "process") -> ClusterSecret:
    """The cluster's secret, with files of an authority."""
    cert, key = authority.issue(name, dns=identity.NAME)
    files = CertificateFiles(ca=authority.ca, cert=cert, key=key)
    return ClusterSecret(SECRET.value, encrypted=True, certificates=files)


@pytest.mark.parametrize("kind", ["plain", "another CA", "made from the secret", "no certificate"])
async def test_only_certificates_of_the_given_authority_connect(kind: str, tmp_path: Path) -> None:
    secret = _given(Authority(tmp_path))
    server, address = await _serve(secret)
    assert await _call(channels.open_channel(address, secret), secret) == b"hello"
    (tmp_path / "other").mkdir()
    if kind == "no certificate":
        assert secret.certificates is not None
        authority = Path(secret.certificates.ca).read_bytes()
        options = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", identity.NAME))
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(authority), options=options)
    else:
        others = {
            "plain": SECRET,
            "another CA": _given(Authority(tmp_path / "other")),
            "made from the secret": ENCRYPTED,
        }
        channel = channels.open_channel(address, others[kind])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _call(channel, secret)  # with the right secret in its metadata
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


async def test_a_certificate_of_the_authority_without_the_secret_is_refused(tmp_path: Path) -> None:
    secret = _given(Authority(tmp_path))
    server, address = await _serve(secret)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await _call(channels.open_channel(address, secret), OTHER_SECRET)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await server.stop(None)


async def test_an_authority_is_replaced_while_the_processes_run(tmp_path: Path) -> None:
    """First both authorities are trusted, then certificates are replaced, then the old authority goes."""
    for name in ("old", "new", "server", "caller"):
        (tmp_path / name).mkdir()
    old, new = Authority(tmp_path / "old", "old CA"), Authority(tmp_path / "new", "new CA")

    def put(where: str, trusted: list[Authority], signer: Authority) -> None:
        folder = tmp_path / where
        cert, key = signer.issue(where, dns=identity.NAME)
        ca = b"".join(Path(each.ca).read_bytes() for each in trusted)
        for file, content in (("ca", ca), ("cert", Path(cert).read_bytes()), ("key", Path(key).read_bytes())):
            fresh = folder / f"{file}.new"
            fresh.write_bytes(content)
            fresh.chmod(0o600)
            fresh.replace(folder / file)

    def secret_in(where: str) -> ClusterSecret:
        files = CertificateFiles(**{name: str(tmp_path / where / name) for name in ("ca", "cert", "key")})
        return ClusterSecret(SECRET.value, encrypted=True, certificates=files)

    for where in ("server", "caller"):
        put(where, [old], old)
    at_server, at_caller = secret_in("server"), secret_in("caller")
    server, address = await _serve(at_server)
    assert await _call(channels.open_channel(address, at_caller), SECRET) == b"hello"
    opened_at = time.time()
    assert not channels.is_stale(opened_at, at_caller, time.time())
    for trusted, signer in (([old, new], old), ([old, new], new), ([new], new)):
        for where in ("server", "caller"):
            put(where, trusted, signer)
            assert await _call(channels.open_channel(address, at_caller), SECRET) == b"hello"
    assert channels.is_stale(opened_at, at_caller, time.time())
    left_behind = ClusterSecret(SECRET.value, encrypted=True, certificates=_given(old).certificates)
    with pytest.raises(grpc.aio.AioRpcError):
        await _call(channels.open_channel(address, left_behind), SECRET)
    await server.stop(None)


def test_a_cluster_with_given_certificates_serves_and_refuses_others(tmp_path: Path) -> None:
    given = _given(Authority(tmp_path)).certificates
    assert given is not None
    raw = {
        "model": {"path": "fake"},
        "gateway": {"port": 0},
        "placement": {"local_prefill": "never"},
        "transfer": {"transport": "shm"},
        "network": {"certificates": {"ca": given.ca, "cert": given.cert, "key": given.key}},
    }
    with ProcessCluster(parse_config(raw)) as cluster:
        worker = cluster.workers[0].address
        with Client(cluster.address) as client:
            answer = client.generate(PROMPT, max_tokens=8, temperature=0.0)
            assert list(answer.token_ids) == fake_generate(PROMPT, 8)
        metrics = read_samples(http_get(cluster.http_address, "/metrics", None)[1])
        expires_at = value(metrics, "disagg_certificate_expires_timestamp_seconds", certificate="cluster")
        assert expires_at > time.time()
        derived = ClusterSecret(cluster.secret.value, encrypted=True)
        for secret in (ClusterSecret(cluster.secret.value), derived):  # in plain, and with what the secret makes
            with channels.open_blocking_channel(worker, secret) as channel:
                call = channel.unary_unary("/disagg.internal.Worker/Audit", None, None)
                with pytest.raises(grpc.RpcError) as error:
                    call(b"", metadata=cluster.secret.metadata, timeout=TIMEOUT_S)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_certificates_that_cannot_be_used_are_named_before_anything_starts(tmp_path: Path) -> None:
    given = _given(Authority(tmp_path)).certificates
    assert given is not None
    Path(given.key).chmod(0o644)
    started: list[str] = []
    section = {"ca": given.ca, "cert": given.cert, "key": given.key}
    cluster = ProcessCluster(
        parse_config({"model": {"path": "fake"}, "gateway": {"port": 0}, "network": {"certificates": section}}),
        progress=lambda name, state: started.append(name),
    )
    with pytest.raises(ConfigError, match=r"^network.certificates.key: others can use "):
        cluster.start()
    assert started == []
