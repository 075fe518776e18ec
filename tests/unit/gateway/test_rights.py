from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from disagg.proto.errors import ConfigError, PermissionDeniedError
from disagg.router.gateway.auth import ANONYMOUS, CALLER, STRANGER, Caller
from disagg.router.gateway.config import GatewayConfig, TlsFiles
from disagg.router.gateway.rights import Rights, is_local_peer
from disagg.router.gateway.security import check_files, secure
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
        (STRANGER, Rights(local_is_admin=True), LOCAL),
    ],
    indirect=["caller"],
)
@pytest.mark.usefixtures("caller")
def test_who_is_an_admin(rights: Rights, peer: str) -> None:
    rights.require_admin(context(peer))
    assert rights.may_see("anybody", context(peer))


@pytest.mark.parametrize(
    ("caller", "rights", "peer", "message"),
    [
        (Caller("a", False), Rights(), LOCAL, "this needs the key of an admin"),
        (
            STRANGER,
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
    assert not rights.may_see("another", context(peer))


@pytest.mark.parametrize("caller", [Caller("a", False)], indirect=True)
@pytest.mark.usefixtures("caller")
def test_a_tenant_sees_its_own_requests() -> None:
    assert Rights().may_see("a", context(REMOTE))
    assert not Rights().may_see("", context(REMOTE))


# ---------------------------------------------------------------- what a configuration means


def config(**values: Any) -> GatewayConfig:
    return GatewayConfig(model_name="m", model_path="fake", fingerprint="f", **values)


@pytest.mark.parametrize(
    ("host", "caller", "local_is_admin"),
    [("127.0.0.1", ANONYMOUS, False), ("::1", ANONYMOUS, False), ("0.0.0.0", STRANGER, True)],
)
def test_without_keys_the_address_decides(host: str, caller: Caller, local_is_admin: bool) -> None:
    security = secure(config(host=host))
    assert security.authenticator.authenticate(None) == caller
    assert (security.http_tls, security.grpc_tls) == (None, None)
    token = CALLER.set(caller)
    try:
        security.rights.require_admin(context(LOCAL))
        if local_is_admin:
            with pytest.raises(PermissionDeniedError):
                security.rights.require_admin(context(REMOTE))
    finally:
        CALLER.reset(token)


def test_a_client_certificate_is_as_good_as_a_key(tmp_path: Any) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    with_clients = TlsFiles(cert=cert, key=key, client_ca=authority.ca)
    assert secure(config(host="0.0.0.0", tls=with_clients)).authenticator.authenticate(None) == ANONYMOUS
    assert secure(config(host="0.0.0.0", tls=TlsFiles(cert=cert, key=key))).authenticator.authenticate(None) == STRANGER


def test_keys_are_asked_for_on_loopback_too(tmp_path: Any) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("[{tenant: a, key: aaaaaaaaaaaaaaaaaaaa}]")
    file.chmod(0o600)
    security = secure(config(api_keys=str(file)))
    assert security.authenticator.authenticate("Bearer aaaaaaaaaaaaaaaaaaaa") == Caller("a", False)


def test_files_are_checked_before_anything_starts(tmp_path: Any) -> None:
    check_files(None, None)
    with pytest.raises(ConfigError, match=r"^gateway\.api_keys: cannot read"):
        check_files(str(tmp_path / "none"), None)
    with pytest.raises(ConfigError, match=r"^gateway\.tls\.key: cannot read"):
        check_files(None, TlsFiles(cert=str(tmp_path / "none"), key=str(tmp_path / "none")))
