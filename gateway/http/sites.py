"""Which web sites' pages may call the gateway from a browser. Pure.

A browser sends whatever a page asks for to a server on its own machine, with the page's origin in a header. A page may
also have its own name resolve to this machine (DNS rebinding): then the request looks as if it came from the same
site, but for the name in `Host`. Where a key is required, neither helps a page, which has none; where none is
required, both headers are checked. A client certificate is sent by the browser itself, whatever page asks: so where
one is enough, the origin is checked too. The name in `Host` is that of the server's own certificate then. A body must
be declared as JSON, which no page can send to another site without a preflight request, or is the form of an upload.

A page of another site may read an answer only if the answer names that site (the CORS protocol of the Fetch standard).
Answers name the sites that the operator allowed, with keys and without.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from disagg.gateway.http.errors import ContentTypeError, ForeignSiteError, Headers

_EXPOSED: Final = ", ".join(
    (
        "x-request-id",
        "x-disagg-request-id",
        "request-id",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        "traceparent",
        *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    )
)
"""Response headers that a page of another site may read."""
_HEADER_NAMES: Final = re.compile(r"[!#-'*+.0-9A-Z^-z|~, \t-]{1,4096}")
"""A list of names of headers, as a browser asks for them."""
_MAX_AGE_S: Final = 7200
"""Seconds for which a browser need not ask again; browsers keep an answer no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sites:
    """Which `Host` and `Origin` are accepted.

    Args:
        checks_host: whether only loopback names and `hosts` may stand in `Host`: without keys, on loopback or where
            names are configured. Elsewhere the names under which a gateway is reached are unknown.
        takes_addresses: whether any IP address may stand there too: off loopback. No name is rebound to one.
        checks_origin: whether only `origins` and the site itself may stand in `Origin`: where a browser may send a
            request that is authenticated without a key.
        hosts: further names, without a port.
        origins: further origins, such as `https://chat.example`.
    """

    checks_host: bool = False
    takes_addresses: bool = False
    checks_origin: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def check(self, host: str | None, origin: str | None) -> None:
        """Check the two headers of a request. Raises `ForeignSiteError`."""
        if self.checks_host and host is not None and not self._is_ours(_name_of(host)):
            raise ForeignSiteError(
                f"Host: this gateway is not known as {host[:64]!r}; use 127.0.0.1 or localhost, or set "
                "gateway.allowed_hosts"
            )
        if self.checks_origin and origin is not None and origin.lower() not in self._allowed_origins(host):
            raise _foreign_origin(origin)

    def headers(self, origin: str | None) -> Headers:
        """CORS headers of every response to a request from `origin`."""
        if not self.origins:
            return []
        varies = [(b"vary", b"Origin")]
        if origin is None or origin.lower() not in self.origins:
            return varies
        return [
            *varies,
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED.encode()),
        ]

    def is_preflight(self, method: str, headers: Mapping[str, str]) -> bool:
        """Whether a browser asks for an allowed site, before it sends what a page wants, whether it may. Raises
        `ForeignSiteError` where it asks for another site: without a key, which it never has for that question."""
        origin = headers.get("origin")
        if method != "OPTIONS" or origin is None or "access-control-request-method" not in headers:
            return False
        if origin.lower() not in self._allowed_origins(headers.get("host")):
            raise _foreign_origin(origin)
        return origin.lower() in self.origins

    def _is_ours(self, name: str) -> bool:
        if name == "localhost" or name in self.hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or self.takes_addresses
        except ValueError:
            return False

    def _allowed_origins(self, host: str | None) -> tuple[str, ...]:
        own = () if host is None else (f"http://{host.lower()}", f"https://{host.lower()}")
        return (*own, *self.origins)


def preflight_headers(methods: str, asked: str | None) -> Headers:
    """Headers of the answer to a preflight request: a page may use these methods, and all headers that it asks for."""
    headers = [
        (b"access-control-allow-methods", methods.encode()),
        (b"access-control-max-age", b"%d" % _MAX_AGE_S),
    ]
    if asked is not None and _HEADER_NAMES.fullmatch(asked):
        headers.append((b"access-control-allow-headers", asked.encode()))
    return headers


def _foreign_origin(origin: str) -> ForeignSiteError:
    return ForeignSiteError(f"Origin: pages of {origin[:64]!r} may not call this gateway; set gateway.allowed_origins")


def check_content_type(given: str | None, coding: str | None = None) -> None:
    """Raises `ContentTypeError` for the headers of a body that is not JSON's, or is compressed.

    Args:
        given: `Content-Type`.
        coding: `Content-Encoding`.
    """
    if coding is not None and coding.strip().lower() not in ("", "identity"):
        raise ContentTypeError(f"content-encoding: bodies are taken as they are, not in {coding[:64]!r}")
    kind = (given or "").partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = "nothing" if given is None else repr(given[:64])
        raise ContentTypeError(f"content-type: must be application/json, not {shown}")


def _name_of(host: str) -> str:
    """The name or address in a `Host` header, lower case, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
