"""What a gateway's configuration means for who gets in, and how: read once, when the gateway is made."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

import grpc

from disagg.router.gateway.api_keys import load_keys
from disagg.router.gateway.auth import ANONYMOUS, STRANGER, Authenticator, Everybody
from disagg.router.gateway.config import GatewayConfig, TlsFiles, is_loopback
from disagg.router.gateway.rights import Rights
from disagg.router.gateway.tls import grpc_credentials, http_context


@dataclass(frozen=True, slots=True)
class Security:
    """Of one gateway."""

    authenticator: Authenticator
    rights: Rights
    http_tls: ssl.SSLContext | None
    grpc_tls: grpc.ServerCredentials | None


def check_files(api_keys: str | None, tls: TlsFiles | None) -> None:
    """Find out before anything is started that a file cannot be used; raises `ConfigError`."""
    if api_keys is not None:
        load_keys(api_keys)
    if tls is not None:
        http_context(tls)


def secure(config: GatewayConfig) -> Security:
    """Read keys and certificates. Raises `ConfigError` where one of them cannot be used."""
    tls = config.tls
    strangers_come = not is_loopback(config.host) and (tls is None or tls.client_ca is None)
    is_open = config.api_keys is None and strangers_come
    return Security(
        load_keys(config.api_keys) if config.api_keys is not None else Everybody(STRANGER if is_open else ANONYMOUS),
        Rights(local_is_admin=is_open),
        http_context(tls) if tls is not None else None,
        grpc_credentials(tls) if tls is not None else None,
    )
