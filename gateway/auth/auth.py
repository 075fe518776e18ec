"""Authentication. One authenticator for both protocols; its result is in `CALLER` for as long as a call runs.

header, certificate ──Authenticator.authenticate──> Caller     no key, or an unknown one: RefusedError

With keys, a caller is identified by its key, or by the name in its client certificate where the key file has that name.
With client certificates alone, a certificate's name is its tenant, which is no admin. Without both all callers are one
anonymous caller, which may do everything where only this machine can reach the gateway, and change nothing on an
address that others reach: see `rights`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Final, Literal, NamedTuple, Protocol

from typing_extensions import override

from disagg.proto.errors import AuthenticationError
from disagg.router.api import NO_LIMITS, TenantLimits

TENANT: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Pattern of the names of tenants."""

_DIGEST: Final = "sha256:"
_CERTIFICATE: Final = "certificate:"
"""What `Caller.credential` begins with."""

Reason = Literal["missing", "malformed", "unknown", "certificate", "expired"]
"""Why a call was refused, for the operator: no key, no `Bearer KEY`, a key that is not in the file, a certificate whose
name is no tenant's, an entry of the file that has expired."""


class Caller(NamedTuple):
    """The authenticated caller of a request."""

    tenant: str
    """Prefixes are cached per tenant; empty where there are no keys."""
    is_admin: bool
    """Whether it may change the cluster and see other tenants' requests."""
    limits: TenantLimits = NO_LIMITS
    """Limits of its tenant."""
    metrics: bool = False
    """Whether it may read exact counts of all tenants, such as `/metrics`; an admin may in any case."""

    infers: bool = True
    """Whether it may send prompts."""
    models: frozenset[str] | None = None
    """The only ones that it may use, by name; None for all."""
    expires_at: float | None = None
    """Expiry in seconds since the epoch."""
    credential: str = ""
    """What authenticated it, as `Authenticator.find` reads it: `sha256:HEX` of a key, `certificate:NAME`; empty where
    callers have neither. It is kept with work that is done later."""

    @property
    def sees_counts(self) -> bool:
        """Whether exact counts over all tenants are for it."""
        return self.is_admin or self.metrics

    def may_see(self, tenant: str) -> bool:
        """Whether a tenant's requests are for it."""
        return self.is_admin or self.tenant == tenant


class RefusedError(AuthenticationError):
    """What `Authenticator` raises. `reason` is for the operator: a client without a key that is known reads the same
    words in each case."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(_MESSAGES.get(reason, KEY_NEEDED))
        self.reason: Reason = reason
        if reason == "expired":
            self.code = EXPIRED


ANONYMOUS = Caller("", True)
"""All callers of a gateway without keys that only this machine can reach."""

UNAUTHENTICATED = Caller("", False)
"""A caller before or without authentication: no rights."""

PUBLIC = Caller("", False, metrics=True)
"""All callers of a gateway without keys that others can reach: its owner allowed requests of all."""

AUTHORIZATION: Final = "authorization"
"""Name of the header, or metadata entry, that carries a key."""

CALLER: ContextVar[Caller] = ContextVar("caller", default=UNAUTHENTICATED)
"""Caller of the running call; set by the outermost layer of each protocol."""

KEY_NEEDED = "a valid API key is needed, as `authorization: Bearer KEY`"
"""The one answer to a missing, a malformed and an unknown key."""

CERTIFICATE_NEEDED = "the common name of your certificate is no tenant's name"

EXPIRED: Final = "expired_api_key"
"""Code of the error of a key, or of the entry of a certificate, that has expired."""

_MESSAGES: Final[Mapping[Reason, str]] = {
    "certificate": CERTIFICATE_NEEDED,
    "expired": "this API key, or the key file's entry of this certificate, has expired",
}


class Authenticator(Protocol):
    """Authenticates callers by API key or certificate."""

    @property
    def takes_certificates(self) -> bool:
        """Whether a certificate can stand for a key."""
        ...

    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        """The owner of a key, as the header `authorization: Bearer KEY` brings it, or of a certificate.

        Args:
            authorization: the header.
            certificate: common name of the client's certificate, which TLS has verified; empty without one.

        Raises:
            RefusedError: for an unknown caller.
        """
        ...

    def find(self, tenant: str, credential: str | None) -> Caller:
        """The caller, as it is now, whose work was ordered before.

        Args:
            tenant: of the caller then.
            credential: of the caller then; None where that was not kept. Then it may use what every key of the tenant
                may.

        Raises:
            RefusedError: if `authenticate` would refuse it now, or its credential is another tenant's.
        """
        ...

    def tenants(self) -> Collection[str] | None:
        """The names of all tenants; the empty one for callers without a key. None where every name may be one."""
        ...


class AnonymousAccess(Authenticator):
    """Implements `Authenticator` where neither keys nor client certificates are configured."""

    takes_certificates = False

    def __init__(self, caller: Caller = ANONYMOUS) -> None:
        self._caller = caller

    @override
    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        return self._caller

    @override
    def find(self, tenant: str, credential: str | None) -> Caller:
        if tenant or credential:
            raise RefusedError("unknown")
        return self._caller

    @override
    def tenants(self) -> Collection[str]:
        return ("",)


_ONE_OF_SEVERAL: Final = TenantLimits(is_sole=False, max_priority=0)


class CertificateNames(Authenticator):
    """Implements `Authenticator` for client certificates without a file of keys: the name is the tenant."""

    takes_certificates = True

    @override
    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        if not re.match(TENANT, certificate):
            raise RefusedError("certificate")
        return Caller(certificate, False, _ONE_OF_SEVERAL, credential=_CERTIFICATE + certificate)

    @override
    def find(self, tenant: str, credential: str | None) -> Caller:
        if credential not in (None, _CERTIFICATE + tenant):
            raise RefusedError("certificate")
        return self.authenticate(None, tenant)

    @override
    def tenants(self) -> None:
        return None


class ApiKey(NamedTuple):
    """A key that is let in."""

    digest: bytes
    """`digest_of` the key; the key itself is not kept."""
    caller: Caller


class ApiKeys(Authenticator):
    """Implements `Authenticator`: by key, or without a key by certificate.

    Args:
        keys: all that are let in.
        certificates: callers by the common name of their certificate.
        wall_clock: seconds since the epoch; without it no key expires.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey],
        certificates: Mapping[str, Caller] | None = None,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        named = {name: caller._replace(credential=_CERTIFICATE + name) for name, caller in (certificates or {}).items()}
        self._known = _index(keys), named
        self._wall_clock = wall_clock

    def __len__(self) -> int:
        return sum(len(known) for known in self._known)

    @property
    @override
    def takes_certificates(self) -> bool:
        return bool(self._known[1])

    def limits(self) -> dict[str, TenantLimits]:
        """Limits of each tenant, by its name."""
        return {caller.tenant: caller.limits for caller in self._callers()}

    @override
    def tenants(self) -> Collection[str]:
        return {caller.tenant for caller in self._callers()}

    def take(self, other: ApiKeys) -> None:
        """Use the keys of `other` instead, from the next call on. From any thread."""
        self._known = other._known

    @override
    def authenticate(self, authorization: str | None, certificate: str = "") -> Caller:
        """Keys are found by digest. The time of the search depends on digests only, from which a key cannot be
        computed; the digest that was found is compared in constant time."""
        keys, certificates = self._known
        if not authorization and certificate in certificates:
            return self._unexpired(certificates[certificate])
        scheme, _, key = (authorization or "").partition(" ")
        brought = digest_of(key.strip())
        known, caller = keys.get(brought, _NO_KEY)
        is_known = hmac.compare_digest(known, brought)
        if not authorization:
            raise RefusedError("missing")
        if scheme.lower() != "bearer" or not key.strip():
            raise RefusedError("malformed")
        if not is_known:
            raise RefusedError("unknown")
        return self._unexpired(caller)

    def _callers(self) -> list[Caller]:
        keys, certificates = self._known
        return [*(key.caller for key in keys.values()), *certificates.values()]

    def _of_credential(self, credential: str) -> Caller | None:
        keys, certificates = self._known
        if credential.startswith(_CERTIFICATE):
            return certificates.get(credential.removeprefix(_CERTIFICATE))
        known = keys.get(bytes.fromhex(credential.removeprefix(_DIGEST)))
        return None if known is None else known.caller

    def _has_expired(self, caller: Caller) -> bool:
        return caller.expires_at is not None and self._wall_clock() >= caller.expires_at

    def _unexpired(self, caller: Caller) -> Caller:
        if self._has_expired(caller):
            raise RefusedError("expired")
        return caller

    @override
    def find(self, tenant: str, credential: str | None) -> Caller:
        if credential is not None:
            caller = self._of_credential(credential)
            if caller is None or caller.tenant != tenant:
                raise RefusedError("unknown")
            return self._unexpired(caller)
        own = [one for one in self._callers() if one.tenant == tenant and not self._has_expired(one)]
        if not own:
            raise RefusedError("unknown")
        lists = [one.models for one in own if one.models is not None]
        models = frozenset.intersection(*lists) if lists else None
        return Caller(tenant, False, own[0].limits, infers=all(one.infers for one in own), models=models)


_NO_KEY: Final = ApiKey(bytes(hashlib.sha256().digest_size), UNAUTHENTICATED)


def _index(keys: Sequence[ApiKey]) -> dict[bytes, ApiKey]:
    named = (key._replace(caller=key.caller._replace(credential=_DIGEST + key.digest.hex())) for key in keys)
    return {key.digest: key for key in named}


def digest_of(key: str) -> bytes:
    """SHA-256 of a key. Sufficient for keys that are long and random, which cannot be guessed."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
