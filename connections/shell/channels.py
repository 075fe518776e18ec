"""How our own processes connect by gRPC: the one place where a channel to, or a port for, another process of the
cluster is opened. With `ClusterSecret.encrypted` it is TLS 1.2 or newer with certificates at both ends, made from the
secret (`identity.py`) or given (`operator_certificates.py`), else plain.

Certificates of a listening process are renewed while it listens. One that calls takes its own when it opens a channel:
a channel whose certificate was replaced and that then breaks has to be opened anew (`is_stale`). `first_to_end` runs
the tasks of one connection, all of which end with the first one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Final

import grpc

from disagg.connections.cluster_secret import CertificateFiles, ClusterSecret
from disagg.proto.services import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from disagg.connections.identity import Leaf
    from disagg.connections.operator_certificates import GivenLeaf

_lock: Final = threading.Lock()
_leaves: Final[dict[ClusterSecret, Leaf]] = {}
"""Leaf certificates of this process by secret; guarded by the lock. A process that serves has one entry."""
_given: Final[dict[CertificateFiles, GivenLeaf]] = {}
"""Given certificates of this process by their files; guarded by the lock."""


def open_channel(address: str, secret: ClusterSecret) -> grpc.aio.Channel:
    """Open a channel of asyncio to another process of the cluster."""
    if not secret.encrypted:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _channel_credentials(secret), options=_encrypted_options())


def open_blocking_channel(address: str, secret: ClusterSecret) -> grpc.Channel:
    """Open a channel with blocking calls to another process of the cluster."""
    if not secret.encrypted:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _channel_credentials(secret), options=_encrypted_options())


def add_port(server: grpc.aio.Server, address: str, secret: ClusterSecret) -> int:
    """Have a server listen for other processes of the cluster, and return the port. Raises `RuntimeError` if it is
    taken."""
    if not secret.encrypted:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(secret))


def is_stale(opened_at: float, secret: ClusterSecret, now: float) -> bool:
    """Whether a channel that was opened at `opened_at` should be opened anew before it connects again, because its
    certificate is to be replaced. Times are seconds since the epoch."""
    if not secret.encrypted:
        return False
    if secret.certificates is not None:
        return _leaf(secret).made_at > opened_at
    from disagg.connections.identity import RENEW_AFTER_S

    return not 0 <= now - opened_at < RENEW_AFTER_S


def check_given(files: CertificateFiles) -> None:
    """Check before anything is started that given certificates can be used. Raises `ConfigError` if not."""
    from disagg.connections.operator_certificates import read_leaf

    read_leaf(files, time.time())


def given_until(secret: ClusterSecret) -> float | None:
    """Time at which the given certificate that this process uses expires, in seconds since the epoch; None without
    one."""
    return _leaf(secret).expires_at if secret.encrypted and secret.certificates is not None else None


def _encrypted_options() -> tuple[tuple[str, int | str], ...]:
    from disagg.connections.identity import NAME

    return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME))


def _channel_credentials(secret: ClusterSecret) -> grpc.ChannelCredentials:
    leaf = _leaf(secret)
    return grpc.ssl_channel_credentials(leaf.authority, leaf.key, leaf.certificate)


def _server_credentials(secret: ClusterSecret) -> grpc.ServerCredentials:
    first = _leaf(secret)
    shown = first

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None to keep the present one. gRPC calls this at each handshake, on a thread of its
        own."""
        nonlocal shown
        leaf = _leaf(secret)
        if leaf is shown:
            return None
        shown = leaf
        return _configuration(leaf)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        renewed,  # type: ignore[arg-type]  # the stubs leave out None
        require_client_authentication=True,
    )


def _configuration(leaf: Leaf) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(leaf.key, leaf.certificate)], leaf.authority)


def _leaf(secret: ClusterSecret) -> Leaf:
    """This process's leaf: a new one when there is none or it is due, or the one from the given files. Raises
    `ConfigError` if these cannot be used at first."""
    if secret.certificates is not None:
        return _given_leaf(secret.certificates)
    from disagg.connections.identity import make_leaf  # 0.1 s, for encrypted clusters only

    now = time.time()
    with _lock:
        leaf = _leaves.get(secret)
        if leaf is None or leaf.is_due(now):
            leaf = _leaves[secret] = make_leaf(secret, now)
        return leaf


def _given_leaf(files: CertificateFiles) -> Leaf:
    from disagg.connections.operator_certificates import GivenLeaf

    now = time.time()
    with _lock:
        given = _given.get(files)
        if given is None:
            given = _given[files] = GivenLeaf(files, now)
            return given.leaf
        return given.refresh(now)


async def first_to_end(*coroutines: Coroutine[None, None, None]) -> None:
    """Run all coroutines until one ends; cancel the others, wait for them, and raise the exception of the first one."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
