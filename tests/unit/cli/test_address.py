"""Addresses on the command line."""

from __future__ import annotations

import pytest

from disagg.cli.address import check_address, check_http_address
from disagg.proto.errors import ConfigError


@pytest.mark.parametrize("address", ["127.0.0.1:8470", "[::1]:1", "gateway.example:65535"])
def test_an_address_stays_as_it_is(address: str) -> None:
    assert check_address(address) == check_http_address(address) == address


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("http://127.0.0.1:8471", "127.0.0.1:8470"),
        ("https://gateway.example/", "gateway.example:8470"),
        ("HTTP://[::1]:8471/v1", "[::1]:8470"),
    ],
)
def test_a_url_says_where_grpc_is(url: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_address(url)
    assert str(caught.value) == f"--address: {url} is HTTP; gRPC is at {where}, unless gateway.port says otherwise"


@pytest.mark.parametrize("address", ["", "box", "box:", ":1x", "grpc://box:1"])
def test_what_is_no_address(address: str) -> None:
    for check in (check_address, check_http_address):
        with pytest.raises(ConfigError, match=r"^--address: expected host:port; got "):
            check(address)


def test_the_http_address_of_a_command_may_be_a_url() -> None:
    assert check_http_address("http://127.0.0.1:8471/") == "127.0.0.1:8471"
