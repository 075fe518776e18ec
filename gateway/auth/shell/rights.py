"""Authorization: who may send prompts, to which models, use which part of `AdminService`, and read `/metrics`.

    send prompts, tokenize               the scope `inference`, and the key's `models`
    see workers and pools                every authenticated caller, of the key's `models`
    addresses and processes of workers   an admin
    counts and load over all tenants     the scope `metrics`, an admin; others see none
    explain a request                    its tenant, an admin
    read what a tenant used              its tenant, an admin
    change the cluster, list requests    an admin: the scope `admin`

On a gateway without keys that others can reach, callers on this machine are admins.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import unquote

import grpc

from disagg.connections.addresses import split_address
from disagg.gateway.auth.auth import AUTHORIZATION, CALLER, Authenticator, Caller
from disagg.gateway.auth.shell.tls import name_of_peer
from disagg.proto.errors import ModelDeniedError, PermissionDeniedError

_MAX_SHOWN_CHARS: Final = 100
"""Characters of a model's name from a client that the error shows."""

Context = grpc.aio.ServicerContext[Any, Any]


class Rights:
    """What the caller of the running call may do.

    Args:
        local_is_admin: whether callers on this machine are admins, whatever the authenticator found.
        authenticator: of the callers, for calls without an end.
    """

    def __init__(self, local_is_admin: bool = False, authenticator: Authenticator | None = None) -> None:
        self._local_is_admin = local_is_admin
        self._authenticator = authenticator

    def authenticate_again(self, context: Context) -> Caller:
        """The caller of a call that runs on and on, by the keys of now. Raises `RefusedError` once its key is no longer
        valid."""
        if self._authenticator is not None:
            brought = (value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION)
            header = next((value for value in brought if isinstance(value, str)), None)
            name = name_of_peer(context.auth_context()) if header is None else ""
            CALLER.set(self._authenticator.authenticate(header, name))
        return self.caller(context)

    def require_admin(self, context: Context) -> None:
        """Raises `PermissionDeniedError` unless the caller is an admin."""
        if self.caller(context).is_admin:
            return
        if self._local_is_admin:
            raise PermissionDeniedError(
                "this gateway has no API keys and others can reach it, so it takes this from its own machine only; "
                "set gateway.api_keys in its configuration"
            )
        raise PermissionDeniedError("this needs a key with the scope admin")

    def tenants(self) -> Collection[str] | None:
        """The names of all tenants; None where every name may be one. For admins."""
        return None if self._authenticator is None else self._authenticator.tenants()

    def caller(self, context: Context) -> Caller:
        """The caller of the running call, with its rights here."""
        caller = CALLER.get()
        if self._local_is_admin and is_local_peer(context.peer()):
            return caller._replace(is_admin=True)
        return caller


def require_counts(caller: Caller) -> None:
    """Raises `PermissionDeniedError` for a caller who may not see exact counts over all tenants."""
    if not caller.sees_counts:
        raise PermissionDeniedError("this needs a key with the scope metrics or admin")


def usage_of(caller: Caller, tenant: str) -> str | None:
    """Whose use is read where `tenant` is asked for, or where it is empty all that the caller may see: None is of all.
    Raises `PermissionDeniedError`."""
    if caller.is_admin:
        return tenant or None
    if tenant and not caller.may_see(tenant):
        raise PermissionDeniedError("this needs a key with the scope admin, or of that name")
    return caller.tenant


def require_inference(caller: Caller) -> None:
    """Raises `PermissionDeniedError` for a caller who may send no prompts."""
    if not caller.infers:
        raise PermissionDeniedError("this needs a key with the scope inference")


def may_use(caller: Caller, model: str) -> bool:
    """Whether the caller's key is for a model."""
    return caller.models is None or model in caller.models


def require_model(caller: Caller, name: str) -> None:
    """Raises `ModelDeniedError` for a model that the caller's key is not for."""
    if caller.models is not None and not may_use(caller, name):
        allowed = ", ".join(sorted(caller.models))
        raise ModelDeniedError(f"model: this key is not for {name[:_MAX_SHOWN_CHARS]!r}, but for {allowed}")


def is_local_peer(peer: str) -> bool:
    """Whether gRPC's name of a peer (`ipv4:127.0.0.1:5`, `ipv6:[::1]:5`, `ipv6:%5B::1%5D:5`) is of this machine."""
    kind, _, rest = unquote(peer).partition(":")
    host, _ = split_address(rest)
    if kind not in ("ipv4", "ipv6"):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
