"""`disagg health`: asks a gateway's probes, for what starts and stops it. Exit status 0 or 1.

The certificate of the gateway is not verified: nothing is sent to it but the question, and a probe of one's own machine
uses an address that no certificate names.
"""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from rich.console import Console

from disagg.cli.address import check_address
from disagg.cli.doctor.gateway import reachable_from_here, speaks_tls
from disagg.client import Client
from disagg.client.health import serving_status
from disagg.proto.errors import AuthenticationError, ConfigError, DisaggError, PermissionDeniedError

READY, ALIVE = "/readyz", "/livez"
TIMEOUT_S = 5.0
_MAX_BYTES = 1024


def run_health(url: str, path: str, environ: Mapping[str, str], console: Console) -> int:
    """Print the answer of the probe at `url` + `path`, and return the exit status.

    Args:
        url: http or https, host and port.
        environ: has the client certificate (`DISAGG_CLIENT_CERT`, `DISAGG_CLIENT_KEY`) where the gateway needs one.

    Raises:
        ConfigError: if it is no such URL, or the certificate cannot be read.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/") or parts.query:
        raise ConfigError(f"--url: expected http://HOST:PORT or https://HOST:PORT; got {url!r}")
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if parts.scheme == "https":
        handlers.append(urllib.request.HTTPSHandler(context=_context(environ)))
    try:
        with urllib.request.build_opener(*handlers).open(f"{url.rstrip('/')}{path}", timeout=TIMEOUT_S) as answer:
            status, body = answer.status, answer.read(_MAX_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read(_MAX_BYTES)
    except (OSError, ValueError) as error:
        console.print(f"{url} does not answer: {error}", highlight=False, markup=False, soft_wrap=True)
        return 1
    console.print(f"{status} {body.decode(errors='replace')}", highlight=False, markup=False, soft_wrap=True)
    return 0 if status == 200 else 1


def run_health_at(address: str, path: str, environ: Mapping[str, str], console: Console) -> int:
    """Do the same for the gateway whose gRPC is at `address`: it says where its HTTP is. Without the key that this
    takes, or without HTTP, the answer is that of gRPC's own probe, which says less: that the gateway answers and does
    not drain.

    Raises:
        ConfigError: if the address is invalid.
    """
    check_address(address)
    try:
        status = serving_status(address, TIMEOUT_S)  # first, because it has a time limit
        http_address = _http_address(address)
    except DisaggError as error:
        console.print(f"{address} does not answer: {error}", highlight=False, markup=False, soft_wrap=True)
        return 1
    if http_address:
        scheme = "https" if speaks_tls(address) else "http"
        return run_health(f"{scheme}://{reachable_from_here(http_address, address)}", path, environ, console)
    console.print(f"{status} (gRPC)", highlight=False, markup=False, soft_wrap=True)
    return 0 if status == "SERVING" else 1


def _http_address(address: str) -> str:
    """host:port of the HTTP of a gateway; empty if it has none, or does not tell it to us."""
    with Client(address) as client:
        try:
            return client.cluster_state().http_address
        except (AuthenticationError, PermissionDeniedError):
            return ""


def _context(environ: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if certificate := environ.get("DISAGG_CLIENT_CERT"):
        try:
            context.load_cert_chain(certificate, environ.get("DISAGG_CLIENT_KEY"))
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"DISAGG_CLIENT_CERT, DISAGG_CLIENT_KEY: cannot be used ({error})") from None
    return context
