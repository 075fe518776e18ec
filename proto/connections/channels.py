"""How our own processes connect by gRPC: the one place where a channel to, or a port for, another process of the
cluster is opened. With `ClusterSecret.encrypted` it is TLS 1.2 or newer with certificates at both ends
(`identity.py`), else plain.

Certificates of a listening process are renewed while it listens. One that calls takes its own when it opens a channel:
a channel that is open for longer than `identity.VALID_S` and then breaks has to be opened anew (`is_stale`).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

import grpc

from disagg.proto.cluster_secret import ClusterSecret
from disagg.proto.services import CHANNEL_OPTIONS

if TYPE_CHECKING:
    from disagg.proto.connections.identity import Leaf

_lock: Final = threading.Lock()
_leaves: Final[dict[ClusterSecret, Leaf]] = {}
"""Of this process; guarded by the lock. One entry in a process that serves."""


def open_channel(address: str, secret: ClusterSecret) -> grpc.aio.Channel:
    """A channel of asyncio to another process of the cluster."""
    if not secret.encrypted:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _channel_credentials(secret), options=_encrypted_options())


def open_blocking_channel(address: str, secret: ClusterSecret) -> grpc.Channel:
    """The same with blocking calls."""
    if not secret.encrypted:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _channel_credentials(secret), options=_encrypted_options())


def add_port(server: grpc.aio.Server, address: str, secret: ClusterSecret) -> int:
    """Have a server listen for other processes of the cluster; the port. Raises `RuntimeError` if it is taken."""
    if not secret.encrypted:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _server_credentials(secret))


def is_stale(opened_at: float, secret: ClusterSecret, now: float) -> bool:
    """Whether a channel that was opened at a time (seconds since the epoch) should be opened anew before it connects
    again, because its certificate is to be replaced."""
    if not secret.encrypted:
        return False
    from disagg.proto.connections.identity import RENEW_AFTER_S

    return not 0 <= now - opened_at < RENEW_AFTER_S


def _encrypted_options() -> tuple[tuple[str, int | str], ...]:
    from disagg.proto.connections.identity import NAME

    return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", NAME))


def _channel_credentials(secret: ClusterSecret) -> grpc.ChannelCredentials:
    leaf = _leaf(secret)
    return grpc.ssl_channel_credentials(leaf.authority, leaf.key, leaf.certificate)


def _server_credentials(secret: ClusterSecret) -> grpc.ServerCredentials:
    first = _leaf(secret)
    shown = first

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake, on a thread of its own; None keeps the present one."""
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
    """This process's leaf, made when there is none or it is due."""
    from disagg.proto.connections.identity import make_leaf  # 0.1 s, for encrypted clusters only

    now = time.time()
    with _lock:
        leaf = _leaves.get(secret)
        if leaf is None or leaf.is_due(now):
            leaf = _leaves[secret] = make_leaf(secret, now)
        return leaf
