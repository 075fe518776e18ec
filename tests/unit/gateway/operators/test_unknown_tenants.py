from __future__ import annotations

import pytest

from disagg.gateway.auth.auth import AnonymousAccess, ApiKey, ApiKeys, Caller, CertificateNames, digest_of
from disagg.gateway.operators.unknown_tenants import unknown_tenant
from disagg.router.api import NO_LIMITS

KNOWN = {"team-a", "team-b", "ops"}


@pytest.mark.parametrize(
    ("tenant", "known", "expected"),
    [
        ("team-a", KNOWN, None),
        ("anyone", None, None),
        ("", ("",), None),
        ("opps", KNOWN, "no key has the tenant 'opps'; similar: ops"),
        ("x", KNOWN, "no key has the tenant 'x'"),
        ("", KNOWN, "no key has the tenant ''"),
        ("x" * 10_000, KNOWN, f"no key has the tenant '{'x' * 64}'"),
        ("team-a", ("",), "callers have no keys here; all that they have is under the empty name"),
    ],
)
def test_a_name_that_no_caller_has_is_named_with_similar_ones(
    tenant: str, known: set[str] | None, expected: str | None
) -> None:
    assert unknown_tenant(tenant, known) == expected


def test_tenants_are_those_of_the_keys() -> None:
    keys = [ApiKey(digest_of(name), Caller(name[0], False, NO_LIMITS)) for name in ("a1", "a2", "b1")]
    assert ApiKeys(keys).tenants() == {"a", "b"}
    assert AnonymousAccess().tenants() == ("",)
    assert CertificateNames().tenants() is None
