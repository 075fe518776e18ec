"""The file of API keys.

    - tenant: team-a
      sha256: 5e88...        # of the key; `disagg key new` writes this form
    - tenant: operators
      key: some-long-random-key
      admin: true
    - tenant: monitoring
      sha256: 9b71...
      metrics: true          # may read /metrics
    - tenant: team-b
      certificate: b.example # the common name of a client certificate (gateway.tls.client_ca) instead of a key

    - tenant: team-c
      sha256: 77aa...
      expires: 2027-06-30    # its last day, in UTC; or a time, such as 2027-06-30T18:00:00+02:00
      models: [qwen3-8b]     # the only ones that it may use
      scopes: [inference]    # of inference, metrics, admin; without it inference, and what `admin` and `metrics` add

A tenant may have several keys, for instance while one is replaced. The file is read when the gateway starts, and again
when it changes.

The limits of a tenant, for all its keys together, stand at any one of them:

    - tenant: team-a
      sha256: 5e88...
      limits: {requests_per_minute: 600, tokens_per_minute: 1000000, running: 64, weight: 2}
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import yaml

from disagg.connections.watched_files import read_private_file
from disagg.gateway.auth.auth import TENANT, ApiKey, ApiKeys, Caller, digest_of
from disagg.proto.errors import ConfigError
from disagg.router.api import TenantLimits

MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 512
MAX_KEYS = 10_000
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")
_TENANT = Annotated[str, msgspec.Meta(pattern=TENANT)]
_SHA256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]


MAX_MODELS = 100
Scope = Literal["inference", "metrics", "admin"]
_MODEL = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?([Zz]|[+-][0-9]{2}:[0-9]{2})"
)
_DAY_S = 86_400.0
_MAX_SHOWN_CHARS = 40
"""Characters of a wrong `expires` that the error shows."""

_COUNT = Annotated[int, msgspec.Meta(ge=1)]
_POSITIVE = Annotated[float, msgspec.Meta(gt=0, le=1000)]


class LimitsEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`limits` of an entry; see `TenantLimits`. Omitted means no limit."""

    requests_per_minute: _COUNT | None = None
    """Answers to prompts: each of `n` is one. A minute's worth may come at once."""
    tokens_per_minute: _COUNT | None = None
    """Prompt tokens and output tokens. An answer is charged `max_tokens` at first."""
    running: _COUNT | None = None
    """Answers that run on workers; further ones wait."""
    queued: _COUNT | None = None
    """Answers that wait; further ones are refused."""
    weight: _POSITIVE = 1.0
    """Share of tokens while others wait, compared with theirs."""
    max_priority: int = 0
    """Requests of a higher priority get this one."""
    min_ttft_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Requests with a tighter `x-slo-ttft-ms` are queued as if they had this one."""
    boosted: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Requests at a time that are queued by an `x-slo-ttft-ms` of their own."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the file; one of `key`, `sha256` and `certificate`."""

    tenant: _TENANT
    key: str | None = None
    """Printable ASCII without spaces."""
    sha256: _SHA256 | None = None
    """SHA-256 of the key, in hex."""
    certificate: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
    """Common name of a client certificate that stands for a key."""
    admin: bool = False
    """May change the cluster, and see every tenant's requests."""
    metrics: bool = False
    """May read `/metrics`, and the load in the state of the cluster. An admin may in any case."""
    expires: str | None = None
    """When it stops to be valid: a time of RFC 3339, or a date, which is its last day in UTC."""
    models: Annotated[tuple[_MODEL, ...], msgspec.Meta(min_length=1, max_length=MAX_MODELS)] | None = None
    """Names of the models that it may use; all without it."""
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1, max_length=3)] | None = None
    """What it may do, instead of `admin` and `metrics`: send prompts, read exact counts, change the cluster (and
    read these). Without it `inference`, and what those two add."""
    limits: LimitsEntry | None = None
    """Limits of the tenant. If several of its keys have limits, they must be equal."""

    def __repr__(self) -> str:
        return f"KeyEntry(tenant={self.tenant!r}, admin={self.admin})"

    def caller(self, limits: TenantLimits) -> Caller:
        """The caller with this entry's key; `limits` are of its tenant. Raises `ConfigError` for a wrong `expires`, and
        for `scopes` beside `admin` or `metrics`."""
        if self.scopes is not None and (self.admin or self.metrics):
            raise ConfigError("scopes stand instead of admin and metrics; give one or the other")
        return Caller(
            tenant=self.tenant,
            is_admin=self.admin if self.scopes is None else "admin" in self.scopes,
            limits=limits,
            metrics=self.metrics if self.scopes is None else "metrics" in self.scopes,
            infers=self.scopes is None or "inference" in self.scopes,
            models=None if self.models is None else frozenset(self.models),
            expires_at=None if self.expires is None else expiry_of(self.expires),
        )


def expiry_of(text: str) -> float:
    """Seconds since the epoch from which on a key is not valid. Raises `ConfigError`."""
    try:
        if _DATE.fullmatch(text):
            day = datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)
            return day.timestamp() + _DAY_S
        if _TIME.fullmatch(text):
            return datetime.datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        "expires must be a date, such as 2027-06-30, or a time with its offset from UTC, such as "
        f"2027-06-30T18:00:00Z, not {text[:_MAX_SHOWN_CHARS]!r}"
    )


def load_keys(path: str) -> ApiKeys:
    """The keys in the file.

    Raises:
        ConfigError: if it cannot be read, others can read it, or an entry is wrong. No message repeats a key.
    """
    try:
        text = read_private_file(path, "gateway.api_keys").decode()
    except UnicodeDecodeError:
        raise ConfigError(f"gateway.api_keys: {path} is not UTF-8") from None
    entries = parse_entries(text, path)
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"gateway.api_keys: {path} has {len(entries)} keys; at most {MAX_KEYS}")
    if not entries:
        raise ConfigError(f"gateway.api_keys: {path} has no key; next: disagg key new TENANT --file {path}")
    limits = _limits_of(entries, path)
    places: dict[bytes | str, int] = {}
    keys: list[ApiKey] = []
    certificates: dict[str, Caller] = {}
    for index, entry in enumerate(entries):
        credential = _credential(entry, f"{path}[{index}]")
        if (first := places.setdefault(credential, index)) != index:
            kind = "certificate" if isinstance(credential, str) else "key"
            raise ConfigError(f"gateway.api_keys: {path}[{index}] is the same {kind} as [{first}]; each needs its own")
        try:
            caller = entry.caller(limits[entry.tenant])
        except ConfigError as error:
            raise ConfigError(f"gateway.api_keys: {path}[{index}].{error}") from None
        if isinstance(credential, str):
            certificates[credential] = caller
        else:
            keys.append(ApiKey(credential, caller))
    return ApiKeys(keys, certificates, time.time)


def parse_entries(text: str, path: str) -> list[KeyEntry]:
    """The entries of a file, each by itself of the right form. Raises `ConfigError` as `load_keys` does."""
    try:
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its own words quote the file
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 0
        raise ConfigError(f"gateway.api_keys: {path} is not valid YAML, line {line}") from None
    except yaml.YAMLError:
        raise ConfigError(f"gateway.api_keys: {path} is not valid YAML") from None
    for entry in raw if isinstance(raw, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("expires"), datetime.date):  # as YAML reads it
            entry["expires"] = entry["expires"].isoformat()
    try:
        return msgspec.convert([] if raw is None else raw, list[KeyEntry])
    except msgspec.ValidationError as error:
        raise ConfigError(f"gateway.api_keys: {path}: {str(error).replace('`', '')}") from None


def _limits_of(entries: Sequence[KeyEntry], path: str) -> dict[str, TenantLimits]:
    """Limits by tenant. Raises `ConfigError` where two keys of one have different limits."""
    found: dict[str, LimitsEntry] = {}
    for index, entry in enumerate(entries):
        if entry.limits is not None and found.setdefault(entry.tenant, entry.limits) != entry.limits:
            raise ConfigError(
                f"gateway.api_keys: {path}[{index}].limits differ from those of another key of {entry.tenant}; one "
                "tenant has one set of limits, so set them at one of its keys"
            )
    tenants = {entry.tenant for entry in entries}
    return {tenant: _limits(found.get(tenant, LimitsEntry()), is_sole=len(tenants) == 1) for tenant in tenants}


def _limits(entry: LimitsEntry, is_sole: bool) -> TenantLimits:
    return TenantLimits(
        requests_per_minute=entry.requests_per_minute,
        tokens_per_minute=entry.tokens_per_minute,
        running=entry.running,
        queued=entry.queued,
        weight=entry.weight,
        max_priority=entry.max_priority,
        min_ttft_s=entry.min_ttft_ms / 1000,
        boosted=entry.boosted,
        is_sole=is_sole,
    )


def _credential(entry: KeyEntry, where: str) -> bytes | str:
    """The digest of the entry's key, or the name of its certificate."""
    if sum(given is not None for given in (entry.key, entry.sha256, entry.certificate)) != 1:
        raise ConfigError(f"gateway.api_keys: {where} needs one of key, sha256 and certificate")
    if entry.certificate is not None:
        return entry.certificate
    if entry.sha256 is not None:
        return bytes.fromhex(entry.sha256)
    key = entry.key or ""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"gateway.api_keys: {where}.key must have {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters "
            "and no space"
        )
    return digest_of(key)
