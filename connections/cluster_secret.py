"""The secret by which the processes of one cluster authenticate each other: random bytes, made once by its launcher.

    launcher ──start message, not a command line──> worker, gateway, controller
    caller ──metadata `disagg-cluster-token-bin`──> server, which compares before it reads anything

It shows that the caller was started by the same launcher. Where the cluster is encrypted, the certificates of its
processes are made from it, too (`connections/`); else who can read the network can read it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Annotated, Any, Final

import msgspec

NUM_BYTES: Final = 32
METADATA_KEY: Final = "disagg-cluster-token-bin"


class CertificateFiles(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`network.certificates`: PEM files that every host of the cluster has at these paths."""

    ca: str
    """Certificates of the authorities that are accepted for other processes of the cluster."""
    cert: str
    """Certificate of this process, valid for servers and clients and with the DNS name `process.disagg.internal`,
    followed by the certificates between it and the authority."""
    key: str
    """Private key of the certificate, without a passphrase; other users must not be able to read it."""


class ClusterSecret(msgspec.Struct, frozen=True):
    """The bytes, which nothing shows: neither `repr` nor `str` holds them.

    Raises:
        ValueError: if there are not exactly `NUM_BYTES` of them.
    """

    value: Annotated[bytes, msgspec.Meta(min_length=NUM_BYTES, max_length=NUM_BYTES)]
    encrypted: bool = False
    """Whether the gRPC connections between the cluster's processes use TLS. Decided once, where the secret is made."""
    certificates: CertificateFiles | None = None
    """Certificates that are used instead of those made from the secret; None for the latter."""

    def __post_init__(self) -> None:
        if len(self.value) != NUM_BYTES:
            raise ValueError(f"a cluster's secret has {NUM_BYTES} bytes, not {len(self.value)}")

    def __repr__(self) -> str:
        return "ClusterSecret(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("value", "...")]

    def sign(self, *what: str | bytes | int) -> bytes:
        """HMAC-SHA256 of these values in this order, keyed with the secret; the first one is the purpose."""
        return hmac.digest(self.value, msgspec.msgpack.encode(what), "sha256")

    @property
    def metadata(self) -> tuple[tuple[str, bytes]]:
        """Metadata that authenticates a call to another process of the cluster."""
        return ((METADATA_KEY, self.value),)

    def matches(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Whether a call carries this secret exactly once. The time does not depend on what else it carries."""
        brought = [value for key, value in metadata if key == METADATA_KEY]
        if len(brought) != 1:
            return False
        value = brought[0]
        return isinstance(value, bytes) and hmac.compare_digest(value, self.value)
