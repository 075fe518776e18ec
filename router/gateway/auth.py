"""Who calls. One authenticator stands before both protocols; what it found is in `CALLER` for as long as a call runs.

header ──Authenticator.authenticate──> Caller          nobody, or an unknown key: AuthenticationError

With keys, the key says who it is. Without keys everybody is the same nameless caller, and may do everything where only
this machine, or holders of a client certificate, can reach the gateway. On an address that others reach, that caller
may change nothing: see `rights`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple, Protocol

from disagg.proto.errors import AuthenticationError


class Caller(NamedTuple):
    """Whom a request is for."""

    tenant: str
    """Prefixes are cached per tenant; empty where there are no keys."""
    is_admin: bool
    """Whether it may change the cluster and see other tenants' requests."""


ANONYMOUS = Caller("", True)
"""Everybody, on a gateway without keys that only trusted ones can reach."""

STRANGER = Caller("", False)
"""Everybody, on a gateway without keys that others can reach."""

CALLER: ContextVar[Caller] = ContextVar("caller", default=STRANGER)
"""Of the running call; set by the outermost layer of each protocol. Where none did, nobody knows who calls."""

KEY_NEEDED = "a valid API key is needed, as `authorization: Bearer KEY`"
"""The one answer to a missing, a malformed and an unknown key."""


class Authenticator(Protocol):
    """Knows the keys."""

    def authenticate(self, authorization: str | None) -> Caller:
        """The owner of a key, as the header `authorization: Bearer KEY` brings it. Raises `AuthenticationError`."""
        ...


class Everybody:
    """Implements `Authenticator` where no keys are configured."""

    def __init__(self, caller: Caller = ANONYMOUS) -> None:
        self._caller = caller

    def authenticate(self, authorization: str | None) -> Caller:
        """See `Authenticator`."""
        return self._caller


class ApiKey(NamedTuple):
    """A key that is let in."""

    digest: bytes
    """`digest_of` the key; the key itself is not kept."""
    caller: Caller


class ApiKeys:
    """Implements `Authenticator`: a caller is who its key says."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)

    def authenticate(self, authorization: str | None) -> Caller:
        """See `Authenticator`. Compares with every key, so that the time taken tells nothing about any."""
        scheme, _, key = (authorization or "").partition(" ")
        brought = digest_of(key.strip())
        found: Caller | None = None
        for known, caller in self._keys:
            if hmac.compare_digest(known, brought):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise AuthenticationError(KEY_NEEDED)
        return found


def digest_of(key: str) -> bytes:
    """SHA-256 of a key. That is enough for keys that are long and random: nobody guesses their way back."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
