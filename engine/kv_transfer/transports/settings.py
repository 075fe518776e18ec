"""What the transports between processes are made with, and the two ends of those that meet at a rendezvous server of D.

D    ServerRendezvous(settings, form).accept(pair_name)                     } form(settings, pair_name, address, side)
P    ServerConnector(settings, form, side)(pair_name, address)              }
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.io.rendezvous import RendezvousServer
from disagg.engine.kv_transfer.transport import (
    SET_UP_TIMEOUT_S,
    Checksum,
    PairTransport,
    Rendezvous,
    TransportError,
)
from disagg.proto.handover import Side


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of either end of a transport."""

    host: str
    """The only address to which it binds."""
    secret: ClusterSecret
    set_up_timeout_s: float = SET_UP_TIMEOUT_S
    """How long the set-up of a pair waits for the other side."""

    @property
    def checksum(self) -> Checksum:
        """The checksum of payloads, keyed with the secret."""
        return Checksum.of_secret(self.secret)


T = TypeVar("T", bound=PairTransport)
Form = Callable[[TransportSettings, str, str, Side], T]
"""(settings, pair_name, address of D's rendezvous server, side) -> the end of this side. Blocks until the other side is
there, and raises `TransportError` if it does not come in time."""


class ServerRendezvous(Rendezvous, Generic[T]):
    """A rendezvous server on D, through which the two ends of a pair find each other.

    Raises:
        OSError: if it cannot listen on the host.
    """

    def __init__(self, settings: TransportSettings, form: Form[T]) -> None:
        self._settings = settings
        self._form = form
        self._server = RendezvousServer(settings.host, settings.secret)

    @property
    @override
    def address(self) -> str:
        return self._server.address

    @override
    def accept(self, pair_name: str) -> T:
        if not self._server.is_open:
            raise TransportError("the rendezvous is closed")
        return self._form(self._settings, pair_name, self.address, "receiver")

    @override
    def close(self) -> None:
        self._server.close()


class ServerConnector(Generic[T]):
    """P's way to any D, or that of a rank of D to the ranks of P."""

    def __init__(self, settings: TransportSettings, form: Form[T], side: Side) -> None:
        self._settings = settings
        self._form = form
        self._side: Side = side

    def __call__(self, pair_name: str, address: str) -> T:
        """Join D's rendezvous at `address`. Raises `TransportError` if D does not accept the pair in time."""
        return self._form(self._settings, pair_name, address, self._side)
