"""Certificates that an operator gives to the processes of a cluster (`network.certificates`), instead of those made
from its secret (`identity.py`): three PEM files that each host has at the same paths.

    first use ──> read and checked, or `ConfigError`
    later, at each handshake and channel: changed? ──> read and checked ──> used from then on
                                                          └─ unusable: logged once, the earlier ones stay in use

Every certificate names `identity.NAME`, whatever the host; callers compare with that.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from disagg.connections.cluster_secret import CertificateFiles
from disagg.connections.identity import NAME, Leaf
from disagg.connections.watched_files import Stamp, read_private_file, stamp
from disagg.proto.errors import ConfigError

logger = logging.getLogger(__name__)

_WHERE: Final = "network.certificates"
_BOTH_ENDS: Final = {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}


class GivenLeaf:
    """The leaf in the files. Owner: the one caller at a time that has the lock of `channels.py`.

    Args:
        now: seconds since the epoch.

    Raises:
        ConfigError: if the files cannot be used.
    """

    def __init__(self, files: CertificateFiles, now: float) -> None:
        self._files = files
        self._seen = _stamps(files)
        self.leaf = read_leaf(files, now)

    def refresh(self, now: float) -> Leaf:
        """The leaf to use: that of the files if they have changed and can be used, else the previous one."""
        stamps = _stamps(self._files)
        if stamps == self._seen:
            return self.leaf
        self._seen = stamps
        try:
            self.leaf = read_leaf(self._files, now)
        except ConfigError as error:
            logger.error(
                "%s: changed files cannot be used, what was read at %s and is valid until %s stays in use: %s",
                _WHERE,
                _shown(self.leaf.made_at),
                _shown(self.leaf.expires_at),
                error,
            )
        else:
            logger.info(
                "%s: files changed and were read again: new connections get %s, valid until %s",
                _WHERE,
                self._files.cert,
                _shown(self.leaf.expires_at),
            )
        return self.leaf


def read_leaf(files: CertificateFiles, now: float) -> Leaf:
    """The files' certificate with its key, as a process of the cluster shows it.

    Raises:
        ConfigError: if a file cannot be read, is no PEM of its kind, or the certificate is not the key's, not of the
            CA, not valid at `now`, not for both ends, or does not name `identity.NAME`.
    """
    key_bytes = read_private_file(files.key, f"{_WHERE}.key")
    chain, chain_bytes = _certificates(files.cert, f"{_WHERE}.cert")
    authorities, ca_bytes = _certificates(files.ca, f"{_WHERE}.ca")
    try:
        key = serialization.load_pem_private_key(key_bytes, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{_WHERE}.key: {files.key} is no private key in PEM without a passphrase") from None
    own = chain[0]
    if key.public_key() != own.public_key():
        raise ConfigError(f"{_WHERE}: {files.key} is not the key of {files.cert}")
    _check_chain(chain, authorities, files)
    _check_use(own, files.cert)
    begins, ends = own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
    if not begins <= now <= ends:
        raise ConfigError(f"{_WHERE}.cert: {files.cert} is valid from {_shown(begins)} to {_shown(ends)} only")
    return Leaf(authority=ca_bytes, certificate=chain_bytes, key=key_bytes, made_at=now, expires_at=ends)


def _certificates(path: str, name: str) -> tuple[list[x509.Certificate], bytes]:
    """All certificates of a file, at least one, and the content of the file."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path} ({error.strerror})") from None
    try:
        return x509.load_pem_x509_certificates(content), content
    except ValueError:
        raise ConfigError(f"{name}: {path} has no certificate in PEM") from None


def _check_chain(
    chain: Sequence[x509.Certificate], authorities: Sequence[x509.Certificate], files: CertificateFiles
) -> None:
    """Check that each certificate of the chain is signed by the next one, and the last one by one of the CA file,
    unless it is in that file itself."""
    for signed, signer in itertools.pairwise(chain):
        if not _is_issued_by(signed, signer):
            raise ConfigError(f"{_WHERE}.cert: the certificates in {files.cert} are no chain")
    last = chain[-1]
    if last not in authorities and not any(_is_issued_by(last, authority) for authority in authorities):
        raise ConfigError(f"{_WHERE}: {files.cert} was not signed by a CA in {files.ca}")


def _is_issued_by(signed: x509.Certificate, signer: x509.Certificate) -> bool:
    try:
        signed.verify_directly_issued_by(signer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_use(own: x509.Certificate, path: str) -> None:
    try:
        alternatives = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = alternatives.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        names = []
    if NAME not in names:
        raise ConfigError(f"{_WHERE}.cert: {path} has no DNS name {NAME}, by which callers know a process")
    try:
        usages = set(own.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    except x509.ExtensionNotFound:
        return
    if not usages >= _BOTH_ENDS:
        raise ConfigError(f"{_WHERE}.cert: {path} must be good for servers and clients (extended key usage)")


def _stamps(files: CertificateFiles) -> tuple[Stamp, ...]:
    return stamp(files.ca), stamp(files.cert), stamp(files.key)


def _shown(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")
