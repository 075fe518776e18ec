"""The gateway's address on the command line, and the error when no gateway answers there."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.connections.addresses import join_address, split_address
from disagg.proto.errors import ConfigError, UnavailableError

DEFAULT_ADDRESS: Final = "127.0.0.1:8470"
"""Address of the gateway that the default configuration starts."""
DEFAULT_HTTP_ADDRESS: Final = "127.0.0.1:8471"
"""Address of that gateway's HTTP server."""
UNREACHABLE = "unreachable"
"""Code of an `UnavailableError` that the client raised because no gateway answered."""


PROBE_TIMEOUT_S = 1.0
"""Seconds that a port may take to show that it speaks HTTP."""
_PORT = DEFAULT_ADDRESS.rpartition(":")[2]


def check_address(address: str) -> str:
    """Check the address of a gateway's gRPC and return it; raises `ConfigError` if it is no host:port."""
    if address.lower().startswith(("http://", "https://")):
        raise ConfigError(f"--address: {address} is HTTP; {where_grpc_is(urlsplit(address).hostname or '')}")
    return _check(address)


def check_http_address(address: str) -> str:
    """Check the address of a gateway's HTTP, which may begin with `http://`, and return it as host:port; raises
    `ConfigError` if it is none."""
    return _check(address.removeprefix("http://").removesuffix("/"))


def _check(address: str) -> str:
    if "://" in address or not re.fullmatch(r".+:\d{1,5}", address):
        raise ConfigError(f"--address: expected host:port; got {address!r}")
    return address


def where_grpc_is(host: str) -> str:
    """Text that says where the gRPC of a gateway is whose HTTP is on `host`."""
    return f"gRPC is at {join_address(host, int(_PORT))}, unless gateway.port says otherwise"


def speaks_http(address: str) -> bool:
    """Whether the server at host:port answers in HTTP/1; False where none listens."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, int(port)), PROBE_TIMEOUT_S) as connection:
            connection.settimeout(PROBE_TIMEOUT_S)
            connection.sendall(b"GET /livez HTTP/1.0\r\nHost: localhost\r\n\r\n")
            return connection.recv(5) == b"HTTP/"
    except (OSError, OverflowError, ValueError):
        return False


@contextmanager
def reaching(address: str) -> Iterator[None]:
    """Turn a missing answer of the gateway at `address` into a `LaunchError` that names the next command."""
    try:
        yield
    except UnavailableError as error:
        if error.code != UNREACHABLE:
            raise
        if speaks_http(address):
            text = f"{address} speaks HTTP; {where_grpc_is(split_address(address)[0])}"
            raise LaunchError(text) from error
        raise LaunchError(f"no gateway answers at {address}; start one with: {command('up')}") from error
