"""The gateway's address on the command line, and the error when no gateway answers there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from disagg.cluster.system.children import LaunchError
from disagg.cluster.system.program import command
from disagg.proto.errors import ConfigError, UnavailableError

DEFAULT_ADDRESS: Final = "127.0.0.1:8470"
"""Address of the gateway that the default configuration starts."""
DEFAULT_HTTP_ADDRESS: Final = "127.0.0.1:8471"
"""Address of that gateway's HTTP server."""
UNREACHABLE = "unreachable"
"""Code of an `UnavailableError` that the client raised because no gateway answered."""


def check_address(address: str) -> str:
    """Check an address and return it; raises `ConfigError` if it is no host:port."""
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise ConfigError(f"--address: expected host:port; got {address!r}")
    return address


@contextmanager
def reaching(address: str) -> Iterator[None]:
    """Turn a missing answer of the gateway at `address` into a `LaunchError` that names the next command."""
    try:
        yield
    except UnavailableError as error:
        if error.code != UNREACHABLE:
            raise
        raise LaunchError(f"no gateway answers at {address}; start one with: {command('up')}") from error
