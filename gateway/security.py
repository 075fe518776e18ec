"""Keys, certificates and rights of a gateway by its configuration: read when the gateway is made, and again when a file
changes."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disagg.connections.addresses import is_loopback
from disagg.gateway.auth.auth import ANONYMOUS, PUBLIC, AnonymousAccess, ApiKeys, Authenticator, CertificateNames
from disagg.gateway.auth.shell.api_keys import load_keys
from disagg.gateway.auth.shell.file_watch import FileWatch, Watched
from disagg.gateway.auth.shell.rights import Rights
from disagg.gateway.auth.shell.tls import ServerTls, http_context
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.config import GatewayConfig
from disagg.proto.errors import ConfigError
from disagg.router.api import TenantLimits


@dataclass(frozen=True, slots=True)
class Security:
    """What one gateway needs to let callers in."""

    authenticator: Authenticator
    rights: Rights
    tls: ServerTls | None
    watch: FileWatch
    """The watch for changed key and certificate files; the gateway starts and stops it."""


def check_files(api_keys: str | None, tls: TlsFiles | None) -> None:
    """Find out before anything is started that a file cannot be used; raises `ConfigError`."""
    if api_keys is not None:
        _load(api_keys, tls)
    if tls is not None:
        http_context(tls)


def secure(
    config: GatewayConfig, limits_changed: Callable[[Mapping[str, TenantLimits]], None] = lambda limits: None
) -> Security:
    """Read keys and certificates.

    Args:
        config: which.
        limits_changed: called on the watch's thread with the limits of all tenants, each time the keys were read again.

    Raises:
        ConfigError: if one of them cannot be used.
    """
    files, path = config.tls, config.api_keys
    is_open = path is None and not is_loopback(config.host) and (files is None or files.client_ca is None)
    authenticator: Authenticator
    watched: list[Watched] = []
    if path is not None:
        authenticator = keys = _load(path, files)
        watched.append(Watched("gateway.api_keys", (path,), lambda: _reload_keys(keys, path, files, limits_changed)))
    elif files is not None and files.client_ca is not None:
        authenticator = CertificateNames()
    else:
        authenticator = AnonymousAccess(PUBLIC if is_open else ANONYMOUS)
    tls = None if files is None else ServerTls(files)
    if files is not None and tls is not None:
        paths = tuple(path for path in (files.cert, files.key, files.client_ca) if path is not None)
        watched.append(Watched("gateway.tls", paths, lambda: _reload_tls(tls, files)))
    return Security(authenticator, Rights(is_open, authenticator), tls, FileWatch(watched))


def _load(path: str, tls: TlsFiles | None) -> ApiKeys:
    keys = load_keys(path)
    if keys.takes_certificates and (tls is None or tls.client_ca is None):
        raise ConfigError(
            f"gateway.api_keys: {path} names certificates, but clients need none; set gateway.tls.client_ca"
        )
    return keys


def _reload_keys(
    keys: ApiKeys, path: str, tls: TlsFiles | None, limits_changed: Callable[[Mapping[str, TenantLimits]], None]
) -> str:
    keys.take(_load(path, tls))
    limits_changed(keys.limits())
    return f"{path} has {len(keys)} keys"


def _reload_tls(tls: ServerTls, files: TlsFiles) -> str:
    tls.reload()
    until = datetime.datetime.fromtimestamp(tls.expires_at, datetime.UTC).isoformat(timespec="seconds")
    return f"new connections get {files.cert}, valid until {until}"
