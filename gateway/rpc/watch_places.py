"""Limits of the streams without a key that are open at a time, in all and for one address. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from disagg.proto.errors import OverloadedError

RETRY_AFTER_S: Final = 10.0


class WatchPlaces:
    """Places of `Health/Watch` streams whose caller brought no valid key.

    Args:
        max_total: streams at a time.
        max_of_address: of them, from one address.
    """

    def __init__(self, max_total: int, max_of_address: int) -> None:
        self._max_total = max_total
        self._max_of_address = max_of_address
        self._taken: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, address: str) -> None:
        """Raises `OverloadedError` where there is no place."""
        if len(self) >= self._max_total:
            raise OverloadedError(
                f"{len(self)} streams of Health/Watch without a key are open, at most gateway.max_keyless_watches "
                f"({self._max_total}): bring a key, or call Health/Check",
                RETRY_AFTER_S,
            )
        if self._taken[address] >= self._max_of_address:
            raise OverloadedError(
                f"{self._taken[address]} streams of Health/Watch without a key are open from this address, at most "
                f"{self._max_of_address}: bring a key, or call Health/Check",
                RETRY_AFTER_S,
            )
        self._taken[address] += 1

    def give_back(self, address: str) -> None:
        """A stream of `address` has ended."""
        self._taken[address] -= 1
        if not self._taken[address]:
            del self._taken[address]


def address_of(peer: str) -> str:
    """The address in gRPC's name of a peer, such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`: without the port."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
