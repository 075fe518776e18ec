"""Process groups of torch without a world: some processes meet in a store, and are a group of their own.

one of them   host = StoreHost(...)          tells the others `host.address`
all           store = meet(...)              blocks until all are there
              group = gloo_group(...)        or NCCL's, by whoever needs that
"""

from __future__ import annotations

import datetime
import socket
from typing import Any

import torch.distributed

from disagg.proto.addresses import split_address

_dist: Any = torch.distributed
"""Untyped: torch's stubs lack half of what is used here."""

_STORE_TIMEOUT_S = 20.0
"""Of the host's own calls, of which there are none that wait."""


class StoreHost:
    """The TCPStore in which others meet. `host` is an IPv4 address or a name of one; nothing else is
    listened on.

    Raises:
        OSError: if it cannot listen there.
    """

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0), backlog=128)
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        # The store owns the descriptor from here on.
        self._store: Any = _dist.TCPStore(
            host,
            port,
            None,
            is_master=True,
            timeout=datetime.timedelta(seconds=_STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    @property
    def is_open(self) -> bool:
        """Whether it still listens."""
        return self._store is not None

    def close(self) -> None:
        """Stop listening; who waits here fails."""
        self._store = None


def meet(prefix: str, address: str, rank: int, size: int, timeout_s: float) -> Any:
    """Wait in the store at `address` until all `size` ranks are there; their own part of the store, under `prefix`.

    Raises:
        OSError, RuntimeError, ValueError: if they do not all come in time, or there is no store.
    """
    host, port = split_address(address)
    timeout = datetime.timedelta(seconds=timeout_s)
    # A store's client tries again until its time is up; nobody listening is known at once.
    socket.create_connection((host, int(port)), timeout=timeout_s).close()
    # A client of its own: a wait in the store blocks all others that use the same client.
    client = _dist.TCPStore(host, int(port), None, is_master=False, timeout=timeout, wait_for_workers=False)
    store = _dist.PrefixStore(prefix, client)
    store.set(f"here/{rank}", "1")
    store.wait([f"here/{other}" for other in range(size)], timeout)
    return store


def gloo_group(store: Any, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """A group over TCP that is bound to `host` only; `timeout_s` is for its set-up and, by default, each operation.

    Raises:
        RuntimeError: if it cannot be formed.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = datetime.timedelta(seconds=timeout_s)
    return _dist.ProcessGroupGloo(store, rank, size, options)
