"""Pages of which web sites may call the gateway, and what a body must say that it is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.config import GatewayOptions
from disagg.gateway.http.errors import ContentTypeError, ForeignSiteError
from disagg.gateway.http.sites import Sites, check_content_type
from disagg.gateway.server import sites_of

KEYLESS = Sites(checks_host=True, checks_origin=True, hosts=("llm.local",), origins=("https://chat.example",))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8471",
        "127.0.0.1",
        "127.1.2.3:1",
        "localhost:8471",
        "LOCALHOST",
        "[::1]:8471",
        "[::1]",
        "llm.local:1",
        None,
    ],
)
def test_names_of_this_machine_are_accepted(host: str | None) -> None:
    KEYLESS.check(host, None)


@pytest.mark.parametrize("host", ["evil.example:8471", "evil.example", "10.0.0.1", "127.0.0.1.evil.example", "[::2]"])
def test_a_name_that_may_be_rebound_is_refused(host: str) -> None:
    with pytest.raises(ForeignSiteError, match="Host: this gateway is not known as"):
        KEYLESS.check(host, None)
    Sites(checks_origin=True).check(host, None)


NAMED = Sites(checks_host=True, takes_addresses=True, checks_origin=True, hosts=("llm.local",))
"""Of a gateway that others reach without keys, and whose names are configured."""


@pytest.mark.parametrize("host", ["10.0.0.1:8471", "[fd00::1]:8471", "[fe80::1%eth0]", "llm.local", "localhost"])
def test_no_page_is_rebound_to_an_address(host: str) -> None:
    NAMED.check(host, None)


@pytest.mark.parametrize("host", ["evil.example:8471", "10.0.0.1.evil.example", "", "999.0.0.1"])
def test_where_names_are_configured_others_are_refused(host: str) -> None:
    with pytest.raises(ForeignSiteError, match="Host: this gateway is not known as"):
        NAMED.check(host, None)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8471", "http://127.0.0.1:8471"),
        ("localhost:8471", "https://localhost:8471"),
        ("localhost:8471", "https://CHAT.example"),
    ],
)
def test_its_own_pages_and_configured_sites_may_call(host: str, origin: str) -> None:
    KEYLESS.check(host, origin)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:9", "http://localhost:8471", "null", ""])
def test_pages_of_other_sites_may_not(origin: str) -> None:
    with pytest.raises(ForeignSiteError, match="Origin: pages of"):
        KEYLESS.check("127.0.0.1:8471", origin)


@pytest.mark.parametrize(
    ("keys", "client_ca", "checked"),
    [(None, None, True), ("keys", None, False), (None, "ca", True), ("keys", "ca", True)],
)
def test_pages_are_told_apart_where_a_browser_needs_no_key(
    keys: str | None, client_ca: str | None, checked: bool
) -> None:
    """It sends a client certificate by itself."""
    tls = TlsFiles(cert="c", key="k", client_ca=client_ca)
    sites = sites_of(GatewayOptions(host="10.0.0.1", api_keys=keys, tls=tls))
    with pytest.raises(ForeignSiteError) if checked else nullcontext():
        sites.check("llm.example", "https://evil.example")
    sites.check("llm.example", "https://llm.example")


def test_where_a_key_is_asked_for_neither_is_looked_at() -> None:
    Sites().check("evil.example", "https://evil.example")


@pytest.mark.parametrize("given", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_accepted(given: str) -> None:
    check_content_type(given)


@pytest.mark.parametrize("coding", [None, "", "identity", " Identity"])
def test_bodies_as_they_are_are_accepted(coding: str | None) -> None:
    check_content_type("application/json", coding)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity, gzip"])
def test_compressed_bodies_are_refused(coding: str) -> None:
    with pytest.raises(ContentTypeError, match=f"content-encoding: bodies are taken as they are, not in '{coding}'"):
        check_content_type("application/json", coding)


@pytest.mark.parametrize("given", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_what_a_page_can_send_without_asking_is_refused(given: str | None) -> None:
    with pytest.raises(ContentTypeError, match=r"content-type: must be application/json, not"):
        check_content_type(given)
