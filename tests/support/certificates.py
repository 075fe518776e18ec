"""A certificate authority for tests, in a folder."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID_FOR = datetime.timedelta(days=1)


class Authority:
    """Signs certificates. `ca` is its own, as a PEM file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca = str(folder / f"{name}.pem")
        Path(self.ca).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        passphrase: bytes | None = None,
        *,
        dns: str = "localhost",
        valid_for: datetime.timedelta = _VALID_FOR,
        usages: tuple[x509.ObjectIdentifier, ...] = (),
    ) -> tuple[str, str]:
        """A certificate for 127.0.0.1 and a name; the PEM files of it and its key.

        Args:
            name: its common name, and that of the files.
            passphrase: of the key.
            dns: the name that servers have.
            valid_for: from now; negative for one that has expired.
            usages: of the key; for servers and clients without.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName(dns)]
        builder = self._builder(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key(), valid_for
        ).add_extension(x509.SubjectAlternativeName(names), critical=False)
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        encryption = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        pem = serialization.Encoding.PEM
        cert_file, key_file = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(pem))
        key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
        key_file.chmod(0o600)
        return str(cert_file), str(key_file)

    def _builder(
        self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey, valid_for: datetime.timedelta = _VALID_FOR
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _VALID_FOR)
            .not_valid_after(now + valid_for)
        )
