"""TLS of the public server, for both protocols from the same files.

    cert, key            the server's chain and private key       clients check the name and the chain
    client_ca            mutual TLS: who calls needs a certificate that this CA signed

Files are read when the gateway starts; a new certificate takes effect at its next start.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

import grpc

from disagg.proto.errors import ConfigError
from disagg.router.gateway.api_keys import read_private_file
from disagg.router.gateway.config import TlsFiles


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """For the HTTP server: TLS 1.2 or newer.

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
    return context


def grpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For the gRPC server, whose library takes TLS 1.2 or newer. Raises `ConfigError` as `http_context` does: gRPC
    itself does not say what is wrong."""
    http_context(files)
    client_ca = None if files.client_ca is None else Path(files.client_ca).read_bytes()
    pair = (read_private_file(files.key, "gateway.tls.key"), Path(files.cert).read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=client_ca, require_client_auth=client_ca is not None)


def _no_password() -> NoReturn:
    """Without it, OpenSSL would ask for one on the terminal."""
    raise ValueError("the key has a passphrase; store it without one, readable by its owner only")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "not PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
