"""Where a gateway is, as the command line has it."""

from __future__ import annotations

import re
from typing import Final

from disagg.proto.errors import ConfigError

DEFAULT_ADDRESS: Final = "127.0.0.1:8470"
"""Of the gateway that the default configuration starts."""


def check_address(address: str) -> str:
    """The address; raises `ConfigError` if it is no host:port."""
    if not re.fullmatch(r".+:\d{1,5}", address):
        raise ConfigError(f"--address: expected host:port; got {address!r}")
    return address
