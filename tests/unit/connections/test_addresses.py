from __future__ import annotations

import pytest

from disagg.connections.addresses import join_address, split_address


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:8470"), ("::1", "[::1]:8470"), ("a.example", "a.example:8470")]
)
def test_there_and_back(host: str, address: str) -> None:
    assert join_address(host, 8470) == address
    assert split_address(address) == (host, "8470")


def test_without_a_port() -> None:
    assert split_address("a.example") == ("", "a.example")
