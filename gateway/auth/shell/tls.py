"""TLS of the public server, for both protocols from the same files.

    cert, key            the server's chain and private key       clients check the name and the chain
    client_ca            mutual TLS: callers need a certificate signed by this CA

`ServerTls.reload` reads the files again: later handshakes use the new ones, existing connections continue.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import grpc

from disagg.connections.watched_files import read_private_file
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.proto.errors import ConfigError


class ServerTls:
    """What both servers use of the files. Raises `ConfigError` as `http_context` does."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._current = http_context(files)
        self.expires_at = _expiry(files)
        """Expiry of the certificate in use, in seconds since the epoch."""
        self.http = http_context(files)
        """SSL context of the HTTP server."""
        self.http.sni_callback = self._use_current
        configuration = _grpc_configuration(files)
        self._changed: grpc.ServerCertificateConfiguration | None = None
        """What gRPC has to use from its next handshake on."""
        self.grpc = grpc.dynamic_ssl_server_credentials(
            configuration,
            self._take_changed,  # type: ignore[arg-type]  # None is allowed, but missing in the stubs
            require_client_authentication=files.client_ca is not None,
        )
        """Credentials of the gRPC server, whose library takes TLS 1.2 or newer."""

    def reload(self) -> None:
        """Read the files and use them from now on. Raises `ConfigError` and keeps those of before if they cannot be
        used."""
        current, configuration = http_context(self._files), _grpc_configuration(self._files)
        expires_at = _expiry(self._files)
        self._current, self._changed, self.expires_at = current, configuration, expires_at

    def _use_current(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, _: ssl.SSLContext) -> None:
        """Called by OpenSSL at each handshake, also for clients without a server name."""
        connection.context = self._current

    def _take_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake; None keeps the last configuration."""
        changed, self._changed = self._changed, None
        return changed


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or newer.

    Raises:
        ConfigError: if a file cannot be read, is no PEM of its kind, or the key is not the certificate's.
    """
    read_private_file(files.key, "gateway.tls.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"gateway.tls: {files.cert} and {files.key} cannot be used ({_reason(error)})") from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except (OSError, ValueError) as error:
            raise ConfigError(f"gateway.tls.client_ca: {files.client_ca} cannot be used ({_reason(error)})") from None
        context.verify_mode = ssl.CERT_REQUIRED
        context.options |= ssl.OP_NO_TICKET  # a client that is no longer trusted could come back with one
        context.num_tickets = 0
    return context


def name_in(certificate: Mapping[str, Any]) -> str:
    """The common name in a certificate as `ssl` gives it; empty where it has none, or several."""
    names = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return names[0] if len(names) == 1 else ""


def name_of_peer(auth_context: Mapping[str, Any]) -> str:
    """The common name in the certificate of a gRPC peer, as `name_in`."""
    names = [*auth_context.get("x509_common_name", ())]
    return names[0].decode(errors="replace") if len(names) == 1 else ""


def _grpc_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    """To be called after `http_context`, because gRPC does not report what is wrong."""
    try:
        client_ca = None if files.client_ca is None else Path(files.client_ca).read_bytes()
        pair = (read_private_file(files.key, "gateway.tls.key"), Path(files.cert).read_bytes())
    except OSError as error:
        raise ConfigError(f"gateway.tls: {error.filename} cannot be read ({error.strerror})") from None
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)


def _expiry(files: TlsFiles) -> float:
    """Expiry of the first certificate. To be called after `http_context`."""
    from cryptography import x509  # 0.1 s, for those with TLS only

    try:
        first = x509.load_pem_x509_certificates(Path(files.cert).read_bytes())[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"gateway.tls.cert: {files.cert} cannot be read ({error})") from None
    return first.not_valid_after_utc.timestamp()


def _no_password() -> NoReturn:
    """Without it, OpenSSL would prompt on the terminal."""
    raise ValueError("the key has a passphrase; store it without one, readable by its owner only")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
