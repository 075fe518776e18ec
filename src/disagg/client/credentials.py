"""How a client proves who it is, and who the gateway must be: arguments, or else the environment.

    DISAGG_API_KEY        sent with each call
    DISAGG_CA_CERT        TLS: PEM file of the CA that signed the gateway's certificate, or `system`
    DISAGG_CLIENT_CERT    mutual TLS: PEM files of the client's certificate
    DISAGG_CLIENT_KEY         and private key

Without a CA the connection is in clear text, and a key goes over it only to this machine.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from disagg.connections.addresses import split_address
from disagg.proto.errors import ConfigError

SYSTEM_ROOTS = "system"
"""Value of `ca_cert` for the public CAs that gRPC comes with."""

_KEY = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Credentials of `Client` and `AsyncClient`. `None` takes the value of the environment, an empty text none.

    Raises:
        ConfigError: for a key that cannot be sent, or half of a client certificate.
    """

    api_key: str | None = None
    ca_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    allow_plaintext_key: bool = False
    """Whether to send the key in clear text to other machines, too."""

    def __post_init__(self) -> None:
        for name in ("api_key", "ca_cert", "client_cert", "client_key"):
            value = getattr(self, name)
            object.__setattr__(self, name, os.environ.get(f"DISAGG_{name.upper()}", "") if value is None else value)
        if self.api_key and not _KEY.fullmatch(self.api_key):
            raise ConfigError("api_key (DISAGG_API_KEY): expected printable ASCII without spaces")
        if bool(self.client_cert) != bool(self.client_key):
            raise ConfigError(
                "client_cert and client_key (DISAGG_CLIENT_CERT, DISAGG_CLIENT_KEY): one is of no use without the other"
            )
        if self.client_cert and not self.ca_cert:
            raise ConfigError(
                "ca_cert (DISAGG_CA_CERT): needed with a client certificate; `system` takes the public CAs"
            )

    def __repr__(self) -> str:
        return f"Credentials(api_key={'...' if self.api_key else None}, ca_cert={self.ca_cert!r})"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel(self, address: str) -> grpc.ChannelCredentials | None:
        """Credentials of a connection to host:port; None for one in clear text.

        Raises:
            ConfigError: if a file cannot be read, or the key would go to another machine in clear text.
        """
        if self.ca_cert:
            roots = None if self.ca_cert == SYSTEM_ROOTS else _read("ca_cert", self.ca_cert)
            pair = (_read("client_key", self.client_key), _read("client_cert", self.client_cert))
            return grpc.ssl_channel_credentials(roots, *pair)
        if self.api_key and not self.allow_plaintext_key and not is_local(address):
            raise ConfigError(
                f"api_key (DISAGG_API_KEY): {address} is another machine and the connection is in clear text, so that "
                "others could read the key; set ca_cert (DISAGG_CA_CERT), or pass allow_plaintext_key=True"
            )
        return None


def is_local(address: str) -> bool:
    """Whether host:port is on this machine, as far as its name shows."""
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def _read(name: str, path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} (DISAGG_{name.upper()}): cannot read {path} ({error.strerror})") from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{name} (DISAGG_{name.upper()}): {path} is not a PEM file")
    return content
