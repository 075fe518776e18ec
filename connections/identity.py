"""The certificates by which the processes of one cluster authenticate each other, made from the cluster's secret.

    secret ──HKDF-SHA256──> key of the cluster's authority ──signs──> a leaf of each process's own

Each process that holds the secret can make the authority's certificate: it derives the same key, and gRPC compares
subject and key, not the signature of a root. So no certificate has to be sent or stored, and a process that starts
again needs no other one. A leaf stays in the process's memory, is valid for `VALID_S` around the time at which it
was made, and is replaced after `RENEW_AFTER_S` at the next connection. Both ends show a leaf, and both check the
other's: a connection without one ends in the handshake.

A leaf names no host: any process of the cluster may listen anywhere. Callers compare with `NAME`.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from disagg.connections.cluster_secret import ClusterSecret

NAME: Final = "process.disagg.internal"
"""Name in every leaf, whatever the host."""
RENEW_AFTER_S: Final = 24 * 3600.0
VALID_S: Final = 30 * 24 * 3600.0
"""Seconds before and after its making for which a leaf is valid: longer than the clocks of hosts differ, and than
`RENEW_AFTER_S`."""

_CURVE: Final = ec.SECP256R1()
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the curve's group (SEC 2, version 2.0, 2.4.2)."""
_AUTHORITY_NAME: Final = "disagg cluster"
_AUTHORITY_FROM: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_AUTHORITY_UNTIL: Final = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Certificate of one process, in PEM; `repr` does not show the key."""

    authority: bytes
    """Certificate of the authority that every peer's certificate must lead to."""
    certificate: bytes
    key: bytes
    made_at: float
    """Time at which it was made or read, in seconds since the epoch."""
    expires_at: float
    """Time at which it expires, in seconds since the epoch."""

    def __repr__(self) -> str:
        return f"Leaf(made_at={self.made_at})"

    def is_due(self, now: float) -> bool:
        """Whether a new leaf is due: this one is old, or the clock was set back behind its making."""
        return not 0 <= now - self.made_at < RENEW_AFTER_S


def make_leaf(secret: ClusterSecret, now: float) -> Leaf:
    """Make a new key and its certificate.

    Args:
        secret: the cluster's secret.
        now: seconds since the epoch.
    """
    authority_key = _authority_key(secret)
    authority = _authority(authority_key)
    key = ec.generate_private_key(_CURVE)
    made = datetime.datetime.fromtimestamp(now, datetime.UTC)
    span = datetime.timedelta(seconds=VALID_S)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(NAME))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(made - span)
        .not_valid_after(made + span)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return Leaf(
        authority=authority.public_bytes(serialization.Encoding.PEM),
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        made_at=now,
        expires_at=now + VALID_S,
    )


def _authority_key(secret: ClusterSecret) -> ec.EllipticCurvePrivateKey:
    # 48 bytes for a group of 256 bits: the remainder is uniform to 2^-128 (FIPS 186-5, A.2.1).
    stretched = HKDF(algorithm=hashes.SHA256(), length=48, salt=None, info=b"disagg authority 1").derive(secret.value)
    return ec.derive_private_key(int.from_bytes(stretched, "big") % (_ORDER - 1) + 1, _CURVE)


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name(_AUTHORITY_NAME)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_AUTHORITY_FROM)
        .not_valid_after(_AUTHORITY_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
