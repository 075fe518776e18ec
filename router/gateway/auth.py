"""Who calls. One authenticator stands before both protocols; what it found is in `CALLER` for as long as a call runs.

header ──Authenticator.authenticate──> Caller          nobody, or an unknown key: AuthenticationError
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import NamedTuple, Protocol


class Caller(NamedTuple):
    """Whom a request is for."""

    tenant: str
    """Prefixes are cached per tenant; empty where there are no keys."""
    is_admin: bool
    """Whether it may change the cluster and see other tenants' requests."""


ANONYMOUS = Caller("", True)
"""Everybody, on a gateway without keys."""

CALLER: ContextVar[Caller] = ContextVar("caller", default=ANONYMOUS)
"""Of the running call; set by the outermost layer of each protocol."""


class Authenticator(Protocol):
    """Knows the keys."""

    def authenticate(self, authorization: str | None) -> Caller:
        """The owner of a key, as the header `authorization: Bearer KEY` brings it. Raises `AuthenticationError`."""
        ...


class Everybody:
    """Implements `Authenticator` where no keys are configured."""

    def authenticate(self, authorization: str | None) -> Caller:
        """See `Authenticator`."""
        return ANONYMOUS
