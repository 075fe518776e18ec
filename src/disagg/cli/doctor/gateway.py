"""What `disagg doctor` looks at in a running cluster: ports, keys, health, workers, and that KV moves on every pair.

    gRPC port ──> TLS ──> state ──> HTTP ──> keys ──> workers ──> each pair (P, D): see `pairs.py`

A check that others depend on comes before them, and ends the series when it fails. The judging functions are pure.
"""

from __future__ import annotations

import http.client
import socket
import ssl
from collections.abc import Iterator

from disagg.cli.address import UNREACHABLE, speaks_http, where_grpc_is
from disagg.cli.doctor.finding import Finding
from disagg.cli.doctor.pairs import pair_findings
from disagg.cli.operations.operate import open_client
from disagg.client import Client, ClusterState
from disagg.client.credentials import SYSTEM_ROOTS, Credentials, is_local
from disagg.cluster.system.program import command
from disagg.connections.addresses import join_address, split_address
from disagg.proto.errors import AuthenticationError, DisaggError, UnavailableError
from disagg.proto.ids import model_of

CONNECT_TIMEOUT_S = 3.0
HTTP_TIMEOUT_S = 5.0
NO_HTTP = "gateway.http_port: null turned it off"


def gateway_findings(address: str) -> Iterator[Finding]:
    """Check the cluster behind a gateway, and yield findings as they come. Raises `ConfigError` for an invalid
    address."""
    with open_client(address) as client:
        tls = speaks_tls(address)
        yield transport_finding(address, tls)
        try:
            state = client.cluster_state()
        except DisaggError as error:
            lacks_ca = bool(tls) and not Credentials().ca_cert
            yield grpc_failure(address, error, lacks_ca=lacks_ca, is_http=speaks_http(address))
            return
        yield Finding("ok", "gRPC", f"answers at {address}")
        yield keys_finding(address)
        yield from _http(state.http_address, address, tls)
        yield from worker_findings(state)
        yield from pair_findings(client, state)


# ---------------------------------------------------------------- ports


def is_open(address: str) -> bool:
    """Whether a server listens at the address."""
    try:
        with socket.create_connection(_host_port(address), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def speaks_tls(address: str) -> bool | None:
    """Whether the server at the address begins with a TLS handshake; None where no server listens. Checks no
    certificate: the call that follows does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        connection = socket.create_connection(_host_port(address), CONNECT_TIMEOUT_S)
    except OSError:
        return None
    with connection:
        try:
            with context.wrap_socket(connection):
                return True
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")  # it has TLS, and requires a certificate
        except OSError:
            return False


def _host_port(address: str) -> tuple[str, int]:
    host, port = split_address(address)
    return host, int(port)


def transport_finding(address: str, tls: bool | None) -> Finding:
    """Finding about the connection to the gRPC port."""
    if tls is None:
        return Finding("FAIL", "port", f"no server listens at {address}", command("up"))
    if tls:
        return Finding("ok", "TLS", "on")
    if is_local(address):
        return Finding("ok", "TLS", "off; only this machine can reach the gateway")
    text = f"off; what goes to {address} can be read on the way, keys too"
    return Finding("warn", "TLS", text, "set gateway.tls in the configuration")


def grpc_failure(address: str, error: DisaggError, *, lacks_ca: bool, is_http: bool = False) -> Finding:
    """Finding about a gateway that does not return its state. `lacks_ca`: it has TLS, and our environment names no
    CA. `is_http`: the server answers in HTTP."""
    if isinstance(error, AuthenticationError):
        return Finding("FAIL", "gRPC", f"{address} requires an API key", "export DISAGG_API_KEY=...")
    if isinstance(error, UnavailableError) and error.code == UNREACHABLE:
        if lacks_ca:
            step = "export DISAGG_CA_CERT=FILE, of the CA that signed its certificate; or =system"
            return Finding("FAIL", "gRPC", f"{address} has TLS, and DISAGG_CA_CERT names no CA for it", step)
        if is_http:
            text = f"{address} speaks HTTP; {where_grpc_is(_host_port(address)[0])}"
            return Finding("FAIL", "gRPC", text, "check DISAGG_ADDRESS and --address")
        text = f"something listens at {address}, but no gRPC answers: {error.message}"
        return Finding("FAIL", "gRPC", text, "check DISAGG_ADDRESS, and with TLS the certificates")
    return Finding("FAIL", "gRPC", f"{error.code}: {error.detail}")


def _http(http_address: str, address: str, tls: bool | None) -> Iterator[Finding]:
    if not http_address:
        yield Finding("warn", "HTTP", "off, or its address is unknown", NO_HTTP)
        return
    where = reachable_from_here(http_address, address)
    if not tls and not is_local(where) and Credentials().api_key:
        text = f"not checked: {where} is another machine, to which the key would go in clear text"
        yield Finding("warn", "HTTP", text, "run this there, or set gateway.tls in the configuration")
        return
    try:
        yield health_finding(where, _get(where, "/health", bool(tls)))
    except (OSError, http.client.HTTPException) as error:
        yield Finding("FAIL", "HTTP", f"no answer at {where}: {error}", "check that the port is open")


def keys_finding(address: str) -> Finding:
    """Finding about API keys, from a call to the gateway without one."""
    with Client(address, api_key="") as anonymous:
        try:
            anonymous.models()
        except AuthenticationError:
            return Finding("ok", "API keys", "required")
        except DisaggError as error:
            return Finding("warn", "API keys", f"unclear: {error.code}: {error.detail}")
    return Finding("ok", "API keys", "not required; whoever reaches the gateway may use it")


def reachable_from_here(http_address: str, address: str) -> str:
    """Address of the HTTP server for a client of `address`: a gateway on all interfaces reports 0.0.0.0."""
    host, port = _host_port(http_address)
    if host in ("0.0.0.0", "::"):
        host = _host_port(address)[0]
    return join_address(host, port)


def _get(where: str, path: str, tls: bool) -> int:
    """HTTP status of the answer to a GET."""
    host, port = _host_port(where)
    credentials = Credentials()
    connection: http.client.HTTPConnection
    if tls:
        connection = http.client.HTTPSConnection(host, port, timeout=HTTP_TIMEOUT_S, context=_tls_context(credentials))
    else:
        connection = http.client.HTTPConnection(host, port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=dict(credentials.metadata))
        return connection.getresponse().status
    finally:
        connection.close()


def _tls_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS context that verifies the gateway with the credentials' CA and presents their certificate, if any."""
    own_ca = credentials.ca_cert if credentials.ca_cert != SYSTEM_ROOTS else None
    context = ssl.create_default_context(cafile=own_ca or None)
    if credentials.client_cert:
        context.load_cert_chain(credentials.client_cert, credentials.client_key)
    return context


def health_finding(where: str, status: int) -> Finding:
    """Finding about the answer to `GET /health`."""
    if status == http.client.OK:
        return Finding("ok", "HTTP", f"answers at {where}, and is healthy")
    if status == http.client.UNAUTHORIZED:
        return Finding("FAIL", "HTTP", f"{where} requires an API key", "export DISAGG_API_KEY=...")
    return Finding("FAIL", "HTTP", f"{where} is not healthy (status {status})", command("status"))


# ---------------------------------------------------------------- workers


def worker_findings(state: ClusterState) -> Iterator[Finding]:
    """Findings about the pools, the phases and the models."""
    if not state.pools:
        yield Finding("warn", "controller", "does not answer; the gateway serves on with its present workers")
    unready = [worker for worker in state.workers if worker.phase not in ("ready", "")]
    short = [pool for pool in state.pools if pool.ready < pool.desired]
    if unready or short:
        parts = [f"{w.worker_id} is {w.phase}" + (f" ({w.detail})" if w.detail else "") for w in unready]
        parts += [f"pool {pool.name} has {pool.ready} of {pool.desired}" for pool in short]
        yield Finding("FAIL" if short else "warn", "workers", "; ".join(parts), command("status"))
    else:
        yield Finding("ok", "workers", f"{len(state.workers)}, all ready")
    for note in state.notes:
        yield Finding("warn", "note", note, command("status"))
    for model in dict.fromkeys(model_of(worker.worker_id) for worker in state.workers):
        workers = [worker for worker in state.workers if model_of(worker.worker_id) == model]
        what = f"model {model}" if model else "model"
        prints = {worker.fingerprint for worker in workers if worker.fingerprint}
        if len(prints) > 1:
            texts = [f"{w.worker_id} {w.fingerprint}" for w in workers]
            yield Finding("FAIL", what, f"not the same everywhere: {', '.join(texts)}", "restart the cluster")
        elif prints:
            yield Finding("ok", what, f"the same everywhere ({next(iter(prints))})")
