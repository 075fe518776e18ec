"""Certificates that are given to a cluster's processes: which are taken, and what happens when the files change."""

from __future__ import annotations

import datetime
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509.oid import ExtendedKeyUsageOID

from disagg.cluster.config.cluster_config import NetworkConfig, load_config, parse_config
from disagg.cluster.control.plan import new_secret
from disagg.connections.cluster_secret import CertificateFiles
from disagg.connections.identity import NAME
from disagg.connections.operator_certificates import GivenLeaf, read_leaf
from disagg.proto.errors import ConfigError
from tests.support.certificates import Authority

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files_of(authority: Authority, **options: Any) -> CertificateFiles:
    cert, key = authority.issue("process", **{"dns": NAME, **options})
    return CertificateFiles(ca=authority.ca, cert=cert, key=key)


@pytest.mark.parametrize("usages", [(), (SERVER, CLIENT)])
def test_good_files(authority: Authority, usages: tuple[object, ...]) -> None:
    files, now = files_of(authority, usages=usages), time.time()
    leaf = read_leaf(files, now)
    assert (leaf.certificate, leaf.key) == (Path(files.cert).read_bytes(), Path(files.key).read_bytes())
    assert leaf.authority == Path(authority.ca).read_bytes()
    assert 0 <= now + 86_400 - leaf.expires_at < 60
    assert "PRIVATE" not in repr(leaf)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dns": "localhost"}, "has no DNS name process.disagg.internal, by which callers know a process"),
        ({"usages": (SERVER,)}, "must be good for servers and clients"),
        ({"valid_for": -datetime.timedelta(hours=1)}, "is valid from .* only"),
        ({"passphrase": b"secret"}, "is no private key in PEM without a passphrase"),
    ],
)
def test_files_that_cannot_be_used(authority: Authority, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^network.certificates.*{message}"):
        read_leaf(files_of(authority, **options), time.time())


def test_files_that_do_not_belong_together(authority: Authority, tmp_path: Path) -> None:
    files = files_of(authority)
    (tmp_path / "x").mkdir()
    others = files_of(Authority(tmp_path / "x"))
    for wrong, message in (
        (CertificateFiles(ca=files.ca, cert=files.cert, key=others.key), "is not the key of"),
        (CertificateFiles(ca=others.ca, cert=files.cert, key=files.key), "was not signed by a CA in"),
        (CertificateFiles(ca=files.key, cert=files.cert, key=files.key), "ca: .* has no certificate in PEM"),
        (CertificateFiles(ca=files.ca, cert="/nowhere.crt", key=files.key), "cert: cannot read /nowhere.crt"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_leaf(wrong, time.time())
    Path(files.key).chmod(0o644)
    with pytest.raises(ConfigError, match=r"network.certificates.key: others can use .* chmod 600"):
        read_leaf(files, time.time())


def test_a_chain_through_another_authority(authority: Authority) -> None:
    """Whoever trusts the certificate's own CA, by whatever file, takes it; a second one that signed nothing does not
    belong into the chain."""
    files = files_of(authority)
    Path(files.cert).write_bytes(Path(files.cert).read_bytes() + Path(authority.ca).read_bytes())
    assert read_leaf(files, time.time()).certificate == Path(files.cert).read_bytes()
    Path(files.cert).write_bytes(Path(files.cert).read_bytes() + Path(files.cert).read_bytes())
    with pytest.raises(ConfigError, match="are no chain"):
        read_leaf(files, time.time())


def test_changed_files_are_read_and_unusable_ones_change_nothing(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files, now = files_of(authority), time.time()
    given = GivenLeaf(files, now)
    first = given.leaf
    assert given.refresh(now + 1) is first
    good = Path(files.cert).read_bytes()
    Path(files.cert).write_text("not PEM")
    assert given.refresh(now + 2) is first
    assert given.refresh(now + 3) is first
    Path(files.cert).write_bytes(good)
    files_of(authority)  # a new certificate and key in the same files
    second = given.refresh(now + 4)
    assert second.certificate != first.certificate
    assert second.made_at == now + 4
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.ERROR, logging.INFO]
    read_at = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat(timespec="seconds")
    assert f"what was read at {read_at} and is valid until" in caplog.records[0].getMessage()
    assert f"cert: {files.cert} has no certificate in PEM" in caplog.records[0].getMessage()


def test_the_section_of_the_configuration(tmp_path: Path) -> None:
    section = {"ca": "ca.pem", "cert": "p.crt", "key": "p.key"}
    config = parse_config({"network": {"certificates": section}})
    assert config.network.is_encrypted
    assert new_secret(config.network).certificates == CertificateFiles(**section)
    assert new_secret(NetworkConfig()).certificates is None
    with pytest.raises(ConfigError, match=r"^network.certificates: are not used with network.encryption off"):
        parse_config({"network": {"certificates": section, "encryption": "off"}})
    with pytest.raises(ConfigError, match=r"network.certificates"):
        parse_config({"network": {"certificates": {"ca": "ca.pem", "cert": "p.crt"}}})
    file = tmp_path / "disagg.yaml"
    file.write_text("network: {certificates: {ca: ca.pem, cert: /etc/p.crt, key: keys/p.key}}")
    assert load_config(file).network.certificates == CertificateFiles(
        ca=str(tmp_path / "ca.pem"), cert="/etc/p.crt", key=str(tmp_path / "keys" / "p.key")
    )
