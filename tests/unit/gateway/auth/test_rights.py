from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from disagg.gateway.auth.auth import ANONYMOUS, CALLER, PUBLIC, UNAUTHENTICATED, Caller, RefusedError
from disagg.gateway.auth.shell.rights import Rights, is_local_peer, require_counts
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.gateway.config import GatewayConfig, ModelSource
from disagg.gateway.security import check_files, secure
from disagg.proto.errors import ConfigError, PermissionDeniedError
from disagg.router.api import NO_LIMITS, TenantLimits
from tests.support.certificates import Authority

LOCAL, REMOTE = "ipv4:127.0.0.1:5", "ipv4:10.0.0.1:5"


class From:
    """The part of a call's context that matters here."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


def context(peer: str) -> Any:
    return cast(Any, From(peer))


def calling(caller: Caller) -> Iterator[None]:
    token = CALLER.set(caller)
    yield
    CALLER.reset(token)


@pytest.fixture
def caller(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from calling(request.param)


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (LOCAL, True),
        ("ipv4:127.9.9.9:5", True),
        ("ipv6:[::1]:5", True),
        ("ipv6:%5B::1%5D:5", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:5", True),
        (REMOTE, False),
        ("ipv6:[2001:db8::1]:5", False),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", False),
        ("ipv4:localhost:5", False),
        ("dns:127.0.0.1:5", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_who_is_on_this_machine(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local


@pytest.mark.parametrize(
    ("caller", "rights", "peer"),
    [
        (Caller("a", True), Rights(), REMOTE),
        (ANONYMOUS, Rights(), REMOTE),
        (UNAUTHENTICATED, Rights(local_is_admin=True), LOCAL),
    ],
    indirect=["caller"],
)
@pytest.mark.usefixtures("caller")
def test_who_is_an_admin(rights: Rights, peer: str) -> None:
    rights.require_admin(context(peer))
    assert rights.caller(context(peer)).may_see("anybody")


@pytest.mark.parametrize(
    ("caller", "rights", "peer", "message"),
    [
        (Caller("a", False), Rights(), LOCAL, "this needs a key with the scope admin"),
        (
            UNAUTHENTICATED,
            Rights(local_is_admin=True),
            REMOTE,
            "this gateway has no API keys and others can reach it, so it takes this from its own machine only; "
            "set gateway.api_keys in its configuration",
        ),
    ],
    indirect=["caller"],
)
@pytest.mark.usefixtures("caller")
def test_who_is_none(rights: Rights, peer: str, message: str) -> None:
    with pytest.raises(PermissionDeniedError) as caught:
        rights.require_admin(context(peer))
    assert str(caught.value) == message
    assert not rights.caller(context(peer)).may_see("another")


@pytest.mark.parametrize("caller", [Caller("a", False)], indirect=True)
@pytest.mark.usefixtures("caller")
def test_a_tenant_sees_its_own_requests() -> None:
    assert Rights().caller(context(REMOTE)).may_see("a")
    assert not Rights().caller(context(REMOTE)).may_see("")


# ---------------------------------------------------------------- what a configuration means


def config(**values: Any) -> GatewayConfig:
    return GatewayConfig(models=(ModelSource(name="m", path="fake", prefix_root="f"),), **values)


@pytest.mark.parametrize(
    ("host", "caller", "local_is_admin"),
    [("127.0.0.1", ANONYMOUS, False), ("::1", ANONYMOUS, False), ("0.0.0.0", PUBLIC, True)],
)
def test_without_keys_the_address_decides(host: str, caller: Caller, local_is_admin: bool) -> None:
    security = secure(config(host=host))
    assert security.authenticator.authenticate(None) == caller
    assert security.tls is None
    token = CALLER.set(caller)
    try:
        security.rights.require_admin(context(LOCAL))
        if local_is_admin:
            with pytest.raises(PermissionDeniedError):
                security.rights.require_admin(context(REMOTE))
    finally:
        CALLER.reset(token)


def test_the_name_of_a_client_certificate_is_a_tenant_who_is_no_admin(tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    with_clients = TlsFiles(cert=cert, key=key, client_ca=authority.ca)
    authenticator = secure(config(host="0.0.0.0", tls=with_clients)).authenticator
    assert authenticator.takes_certificates
    assert authenticator.authenticate("Bearer x", "team-a") == Caller(
        "team-a", False, TenantLimits(is_sole=False, max_priority=0), credential="certificate:team-a"
    )
    for name in ("", "team a", "x" * 65):
        with pytest.raises(RefusedError, match=r"^the common name of your certificate is no tenant's name$"):
            authenticator.authenticate(None, name)
    assert secure(config(host="0.0.0.0", tls=TlsFiles(cert=cert, key=key))).authenticator.authenticate(None) == PUBLIC


def test_certificates_in_the_file_of_keys_need_a_ca(tmp_path: Any) -> None:
    file = tmp_path / "keys.yaml"
    file.touch(mode=0o600)
    file.write_text("[{tenant: a, certificate: team-a.example, admin: true}]")
    with pytest.raises(ConfigError, match=r"names certificates, but clients need none; set gateway\.tls\.client_ca$"):
        secure(config(api_keys=str(file)))
    with pytest.raises(ConfigError, match=r"set gateway\.tls\.client_ca$"):
        check_files(str(file), None)
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tls = TlsFiles(cert=cert, key=key, client_ca=authority.ca)
    authenticator = secure(config(api_keys=str(file), tls=tls)).authenticator
    caller = authenticator.authenticate(None, "team-a.example")
    assert caller._replace(limits=NO_LIMITS) == Caller("a", True, credential="certificate:team-a.example")
    for header, name in ((None, "other.example"), ("Bearer wrong-key-0000000", "team-a.example")):
        with pytest.raises(RefusedError, match=r"^a valid API key is needed"):
            authenticator.authenticate(header, name)


@pytest.mark.parametrize(
    ("caller", "sees"),
    [
        (ANONYMOUS, True),
        (PUBLIC, True),
        (UNAUTHENTICATED, False),
        (Caller("a", False), False),
        (Caller("a", False, metrics=True), True),
    ],
)
def test_who_sees_exact_counts(caller: Caller, sees: bool) -> None:
    assert caller.sees_counts is sees
    if not sees:
        with pytest.raises(PermissionDeniedError, match=r"^this needs a key with the scope metrics or admin$"):
            require_counts(caller)


def test_keys_are_asked_for_on_loopback_too(tmp_path: Any) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[{tenant: a, key: aaaaaaaaaaaaaaaaaaaa}]")
    file.chmod(0o600)
    security = secure(config(api_keys=str(file)))
    assert security.authenticator.authenticate("Bearer aaaaaaaaaaaaaaaaaaaa")[:2] == ("a", False)


def test_files_are_checked_before_anything_starts(tmp_path: Any) -> None:
    check_files(None, None)
    with pytest.raises(ConfigError, match=r"^gateway\.api_keys: cannot read"):
        check_files(str(tmp_path / "none"), None)
    with pytest.raises(ConfigError, match=r"^gateway\.tls\.key: cannot read"):
        check_files(None, TlsFiles(cert=str(tmp_path / "none"), key=str(tmp_path / "none")))
