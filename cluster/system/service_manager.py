"""Reports to a service manager (`Type=notify` of systemd) that this service is ready, or stops: the datagrams of
sd_notify(3)."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
VARIABLE: Final = "NOTIFY_SOCKET"


def notify(state: str, environ: Mapping[str, str]) -> bool:
    """Send a state to the manager that `environ` names; returns whether there is one and it accepted the state."""
    address = environ.get(VARIABLE, "")
    if not address.startswith(("/", "@")):
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(state.encode())
    except OSError as error:
        logger.warning("the service manager at %s did not take %s: %s", address, state, error)
        return False
    return True
