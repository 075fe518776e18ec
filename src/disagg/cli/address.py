"""Where a gateway is, as the command line has it, and the error when there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from disagg.cluster.system.children import LaunchError
from disagg.proto.errors import ConfigError, UnavailableError

DEFAULT_ADDRESS: Final = "127.0.0.1:8470"
"""Of the gateway that the default configuration starts."""
DEFAULT_HTTP_ADDRESS: Final = "127.0.0.1:8471"
"""The same of HTTP."""
UNREACHABLE = "unreachable"
"""The code of an `UnavailableError` that no gateway sent."""


def check_address(address: str) -> str:
    """The address; raises `ConfigError` if it is no host:port."""
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise ConfigError(f"--address: expected host:port; got {address!r}")
    return address


@contextmanager
def reaching(address: str) -> Iterator[None]:
    """For calls to the gateway there: no answer becomes a `LaunchError` with the next command."""
    try:
        yield
    except UnavailableError as error:
        if error.code != UNREACHABLE:
            raise
        raise LaunchError(f"no gateway answers at {address}; start one with: disagg up") from error
