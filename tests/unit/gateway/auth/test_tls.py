from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from disagg.gateway.auth.shell.tls import ServerTls, http_context, name_in, name_of_peer
from disagg.gateway.auth.tls_files import TlsFiles
from disagg.proto.errors import ConfigError
from tests.support.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refusal(files: TlsFiles) -> str:
    with pytest.raises(ConfigError) as of_http:
        http_context(files)
    with pytest.raises(ConfigError) as of_both:
        ServerTls(files)
    assert str(of_http.value) == str(of_both.value)
    return str(of_http.value)


def test_the_server_s_certificate_alone(authority: Authority) -> None:
    cert, key = authority.issue("server")
    context = http_context(TlsFiles(cert=cert, key=key))
    assert (context.minimum_version, context.verify_mode) == (ssl.TLSVersion.TLSv1_2, ssl.CERT_NONE)
    assert ServerTls(TlsFiles(cert=cert, key=key)).grpc is not None


def test_clients_need_one_of_the_ca(authority: Authority) -> None:
    cert, key = authority.issue("server")
    context = http_context(TlsFiles(cert=cert, key=key, client_ca=authority.ca))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert [ca["subject"] for ca in context.get_ca_certs()] == [((("commonName", "ca"),),)]


def test_a_key_that_others_can_read(authority: Authority) -> None:
    cert, key = authority.issue("server")
    Path(key).chmod(0o644)
    said = refusal(TlsFiles(cert=cert, key=key))
    assert said == f"gateway.tls.key: others can use {key} (mode 0644); next: chmod 600 {key}"


def test_a_key_of_another_certificate(authority: Authority) -> None:
    (cert, _), (_, key) = authority.issue("server"), authority.issue("other")
    assert refusal(TlsFiles(cert=cert, key=key)) == (
        f"gateway.tls: {cert} and {key} cannot be used (KEY_VALUES_MISMATCH)"
    )


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(authority: Authority) -> None:
    cert, key = authority.issue("server", passphrase=b"secret")
    assert refusal(TlsFiles(cert=cert, key=key)) == (
        f"gateway.tls: {cert} and {key} cannot be used "
        "(the key has a passphrase; store it without one, readable by its owner only)"
    )


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_files_that_are_no_pem(authority: Authority, tmp_path: Path, which: str) -> None:
    cert, key = authority.issue("server")
    bad = tmp_path / "bad"
    bad.write_text("not PEM")
    bad.chmod(0o600)
    files = {"cert": cert, "key": key, "client_ca": authority.ca, which: str(bad)}
    said = refusal(TlsFiles(**files))
    place = "gateway.tls.client_ca" if which == "client_ca" else "gateway.tls"
    assert said.startswith(f"{place}: ")
    assert str(bad) in said


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
def test_files_that_are_not_there(authority: Authority, tmp_path: Path, which: str) -> None:
    cert, key = authority.issue("server")
    files = {"cert": cert, "key": key, "client_ca": authority.ca, which: str(tmp_path / "none")}
    assert "No such file or directory" in refusal(TlsFiles(**files))


def test_the_name_in_a_certificate() -> None:
    subject = ((("organizationName", "o"),), (("commonName", "team-a"),))
    assert [name_in(given) for given in ({"subject": subject}, {}, {"subject": subject[:1]})] == ["team-a", "", ""]
    assert name_in({"subject": (*subject, (("commonName", "team-b"),))}) == ""
    assert name_of_peer({"x509_common_name": [b"team-a"], "transport_security_type": [b"ssl"]}) == "team-a"
    assert (name_of_peer({}), name_of_peer({"x509_common_name": [b"a", b"b"]})) == ("", "")


def test_files_that_cannot_be_used_change_nothing(authority: Authority) -> None:
    cert, key = authority.issue("server")
    tls = ServerTls(TlsFiles(cert=cert, key=key, client_ca=authority.ca))
    before = vars(tls).copy()
    Path(cert).write_text("not PEM")
    with pytest.raises(ConfigError):
        tls.reload()
    assert vars(tls) == before
    authority.issue("server")
    tls.reload()
    assert vars(tls).keys() - {name for name in before if vars(tls)[name] is before[name]} == {
        "_current",
        "_changed",
        "expires_at",
    }
