"""The files of the public server's TLS. Pure."""

from __future__ import annotations

import msgspec


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of the server and its clients' CA (`gateway.tls`)."""

    cert: str
    """The server's certificate, and those between it and its CA."""
    key: str
    """The server's private key, without a passphrase; others must not be able to read it."""
    client_ca: str | None = None
    """Let in only clients with a certificate that this CA signed (mutual TLS)."""
