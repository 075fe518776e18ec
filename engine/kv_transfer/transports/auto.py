"""The transport that a pair chooses as it is formed: NIXL where D reads memory of P by it, else the host's (`shm` for
workers that bind to loopback, `gloo`).

    both   say at D's rendezvous whether they have NIXL, and if both do, form a NIXL pair there
    both   say whether it stands; if it does on both sides, it is the pair's, else both close it and form the other one

A pair of NIXL stands once bytes have come through (`nixl.py`), so what is chosen has worked. Each channel of a pair of
several ranks chooses for itself: all of these take the same staging memory, the host's.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from typing_extensions import override

from disagg.engine.io.rendezvous import MemberStore, member_store
from disagg.engine.kv_transfer.transport import (
    RANK_OF,
    Connector,
    PairTransport,
    Rendezvous,
    TransportError,
)
from disagg.engine.kv_transfer.transports import nixl
from disagg.engine.kv_transfer.transports.gloo import GlooConnector, GlooRendezvous
from disagg.engine.kv_transfer.transports.nixl_agent import NixlError, load
from disagg.engine.kv_transfer.transports.settings import ServerRendezvous, TransportSettings
from disagg.proto.handover import Side

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0
"""How long NIXL may take, until the pair does without it."""


class Address(NamedTuple):
    """Addresses of D, as text for `PairWelcome`."""

    choice: str
    """Address of the rendezvous server where both sides choose the transport, and where a NIXL pair meets."""
    fallback: str
    """Name of the transport that is available in any case."""
    fallback_address: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `TransportError` for what is no such address."""
        parts = text.split("|", 2)
        if len(parts) != 3:
            raise TransportError(f"{text!r} is no address of transport auto")
        return cls(*parts)

    def __str__(self) -> str:
        return "|".join(self)


class AutoRendezvous(Rendezvous):
    """D's end of the set-up: a rendezvous server for the choice, and the other transport's own.

    Raises:
        OSError: if it cannot listen on `host`.
    """

    def __init__(self, settings: TransportSettings) -> None:
        self._server = ServerRendezvous(settings, self._form)
        self._fallback: Rendezvous
        if ipaddress.ip_address(settings.host).is_loopback:
            from disagg.engine.kv_transfer.transports.shm import ShmRendezvous

            name, self._fallback = "shm", ShmRendezvous(settings)
        else:
            name, self._fallback = "gloo", GlooRendezvous(settings)
        self._address = Address(self._server.address, name, self._fallback.address)

    @property
    @override
    def address(self) -> str:
        return str(self._address)

    @override
    def accept(self, pair_name: str) -> PairTransport:
        return self._server.accept(pair_name)

    def _form(self, settings: TransportSettings, pair_name: str, address: str, side: Side) -> PairTransport:
        return _choose(settings, pair_name, address, side, lambda: self._fallback.accept(pair_name))

    @override
    def close(self) -> None:
        self._server.close()
        self._fallback.close()


class AutoConnector:
    """P's way to any D, or that of a rank of D to the ranks of P."""

    def __init__(self, settings: TransportSettings, side: Side = "sender") -> None:
        self._settings = settings
        self._side: Side = side

    def __call__(self, pair_name: str, address: str) -> PairTransport:
        """Join D's rendezvous at `address`; blocks until D accepts the pair. Raises `TransportError` if it does not in
        time."""
        parts = Address.parse(address)
        return _choose(
            self._settings,
            pair_name,
            parts.choice,
            self._side,
            lambda: self._other(parts.fallback)(pair_name, parts.fallback_address),
        )

    def _other(self, name: str) -> Connector:
        match name:
            case "gloo":
                return GlooConnector(self._settings, self._side)
            case "shm":
                from disagg.engine.kv_transfer.transports.shm import ShmConnector

                return ShmConnector(self._settings, self._side)
        raise TransportError(f"transport auto has no {name!r}")


def _choose(
    settings: TransportSettings, pair_name: str, address: str, side: Side, form_other: Callable[[], PairTransport]
) -> PairTransport:
    rank, probe = RANK_OF[side], replace(settings, set_up_timeout_s=PROBE_TIMEOUT_S)
    formed: PairTransport | None = None
    try:
        with member_store(f"{pair_name}/choice", address, settings.secret, rank, 2, settings.set_up_timeout_s) as store:
            why = _agreed(store, side, "has", _why_not())
            if not why:
                try:
                    formed = nixl.form(probe, f"{pair_name}/nixl", address, side)
                except TransportError as error:
                    why = str(error)
                why = _agreed(store, side, "stands", why)
    except (OSError, RuntimeError, ValueError) as error:
        if formed is not None:
            formed.close()
        raise TransportError(f"could not form the pair {pair_name!r} at {address!r}: {error}") from error
    if formed is not None and not why:
        return formed
    if formed is not None:
        formed.close()
    logger.info("pair %s: without NIXL, %s", pair_name, why)
    return form_other()


def _agreed(store: MemberStore, side: Side, what: str, why_not: str) -> str:
    """Why one of the sides says no; empty if neither does."""
    own, other = RANK_OF[side], 1 - RANK_OF[side]
    store.set(f"{what}/{own}", why_not.encode()[:1024])
    theirs = store.get(f"{what}/{other}").decode(errors="replace")
    return why_not or theirs


def _why_not() -> str:
    try:
        load()
    except NixlError as error:
        return str(error)
    return ""
