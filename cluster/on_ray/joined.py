"""A Ray cluster that this process joins: the address, the token, the connection.

Ray takes a token from `RAY_AUTH_TOKEN`, from the file at `RAY_AUTH_TOKEN_PATH`, or from `~/.ray/auth_token`, in that
order, but only where `RAY_AUTH_MODE=token` is set: with an explicit address it does not look by itself. We set the mode
where there is a token and the user has not set one. A cluster without authentication ignores a token (tried).

A refusal costs Ray's own client 20 s of log lines and ends in "failed to connect". One call to Ray's server, made
before, shows it at once.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

import grpc
from typing_extensions import override

from disagg.cluster.on_ray.private import TOKEN_MODE
from disagg.cluster.on_ray.session import INIT_OPTIONS, Session, be_quiet, refuse_if_connected, signals_stay_ours
from disagg.cluster.system.children import LaunchError

CLIENT_SCHEME: Final = "ray://"
AUTO: Final = "auto"
"""Address of the Ray cluster that this machine is a node of."""
CONNECT_TIMEOUT_S: Final = 5.0
PROBE_TIMEOUT_S = 5.0
_GET_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_WHERE = "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"


class JoinedSession(Session):
    """A driver in a Ray cluster that others keep.

    Args:
        address: host:port of its head, or `auto` for the one that this machine is a node of.
    """

    def __init__(self, address: str) -> None:
        self._asked = address
        self.is_open = False

    @override
    def settle(self) -> None:
        """Does nothing: Ray's processes belong to others."""

    @property
    @override
    def has_head(self) -> bool:
        return True  # not ours to end

    @override
    def open(self) -> None:
        if self._asked.startswith(CLIENT_SCHEME):
            raise LaunchError(
                f"ray.address: {self._asked} is for Ray's client; run this on a node of the cluster, with auto"
            )
        prepare_token()  # before Ray is imported
        if self._asked != AUTO:
            check_reachable(self._asked)
        import ray

        refuse_if_connected()
        address = find_cluster(self._asked)
        check_accepted(address)
        try:
            with signals_stay_ours():
                ray.init(address=address, **INIT_OPTIONS)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(f"ray.address: cannot join {address} ({' '.join(str(error).split())})") from None
        self.is_open = True
        be_quiet()

    @override
    def close(self) -> None:
        if self.is_open:
            import ray

            self.is_open = False
            ray.shutdown()


def find_cluster(address: str) -> str:
    """host:port of a cluster's head. For `auto`: the value of `RAY_ADDRESS`, or where this machine last became a node.
    Ray's own `auto` takes any Ray process of the machine first, such as that of a private cluster.

    Raises:
        LaunchError: if there is none.
    """
    from ray._private.services import canonicalize_bootstrap_address, find_bootstrap_address

    if address == AUTO:
        address = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None) or AUTO
    try:
        found = canonicalize_bootstrap_address(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address != AUTO:
            raise LaunchError(f"ray.address: {address}: {' '.join(str(error).split())}") from None
        found = None
    if found is None:
        raise LaunchError(
            "ray.address: this machine is no node of a running Ray cluster; --ray-address or RAY_ADDRESS names one"
        )
    return str(found)


def check_reachable(address: str) -> None:
    """Check that a server listens at a cluster's host:port, because Ray would try for ten minutes.

    Raises:
        LaunchError: if none does. Other forms of address are left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise LaunchError(f"ray.address: no Ray cluster answers at {address} ({error})") from None


def prepare_token() -> None:
    """Let Ray's client use the token if there is one. To be called before `ray` is imported for the first time: its
    compiled half reads the mode when it loads."""
    if "RAY_AUTH_MODE" not in os.environ and has_token():
        os.environ["RAY_AUTH_MODE"] = TOKEN_MODE


def check_accepted(address: str) -> None:
    """Check with one call that the Ray cluster whose server is at host:port accepts this process.

    Raises:
        LaunchError: if it refuses, or is no server of Ray.
    """
    token = _raw_token()
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(address, options=options) as channel:
        call = channel.unary_unary(_GET_CLUSTER_ID, None, None)
        try:
            call(b"", metadata=metadata, timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            raise LaunchError(f"ray.address: {_why_not(address, bool(token), error)}") from None


def _why_not(address: str, has_token: bool, error: Exception) -> str:
    code = error.code() if isinstance(error, grpc.Call) else None
    if code is not grpc.StatusCode.UNAUTHENTICATED:
        details = error.details() if isinstance(error, grpc.Call) else str(error)
        return f"no Ray cluster answers at {address} ({details})"
    if has_token:
        return f"the Ray cluster at {address} refused our token; the one in {_WHERE} must be the cluster's own"
    mode = os.environ.get("RAY_AUTH_MODE", "")
    off = f" RAY_AUTH_MODE={mode} is set, so none was sent." if mode and mode.lower() != TOKEN_MODE else ""
    return f"the Ray cluster at {address} requires a token.{off} Put the cluster's own into {_WHERE}"


def _raw_token() -> str:
    """The token that Ray's client would send; empty for none. Raises `LaunchError` where it cannot be read."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != TOKEN_MODE:
        return ""
    from ray._raylet import AuthenticationTokenLoader
    from ray.exceptions import AuthenticationError

    try:
        return str(AuthenticationTokenLoader.instance().get_raw_token(ignore_auth_mode=True) or "")
    except AuthenticationError as error:
        raise LaunchError(f"ray.address: no token can be read ({' '.join(str(error).split())})") from None


def has_token() -> bool:
    """Whether Ray's client would find a token."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return True
    return Path("~/.ray/auth_token").expanduser().is_file()
