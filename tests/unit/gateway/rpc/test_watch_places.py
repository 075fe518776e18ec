"""Few streams without a key."""

from __future__ import annotations

import pytest

from disagg.gateway.rpc.watch_places import WatchPlaces, address_of
from disagg.proto.errors import OverloadedError


def test_places_of_one_address_and_of_all() -> None:
    places = WatchPlaces(3, 2)
    places.take("a")
    places.take("a")
    with pytest.raises(OverloadedError, match=r"2 streams .* from this address, at most 2"):
        places.take("a")
    places.take("b")
    with pytest.raises(OverloadedError, match=r"3 streams .* at most gateway.max_keyless_watches \(3\)"):
        places.take("c")
    places.give_back("a")
    places.take("c")
    for address in ("a", "b", "c"):
        places.give_back(address)
    assert len(places) == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5000", "ipv4:10.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "ipv6:%5B::1%5D"),
        ("unix:/run/socket", "unix:/run/socket"),
    ],
)
def test_the_address_of_a_peer(peer: str, address: str) -> None:
    assert address_of(peer) == address
