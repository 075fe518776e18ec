"""Certificates of a cluster's processes: whom they prove, for how long, and when another one replaces them."""

from __future__ import annotations

import datetime

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from disagg.connections.cluster_secret import ClusterSecret
from disagg.connections.identity import NAME, RENEW_AFTER_S, VALID_S, Leaf, make_leaf
from tests.support.secret import OTHER_SECRET, SECRET

NOW = 1_800_000_000.0


def proven_by(leaf: Leaf, authority: bytes, now: float = NOW) -> bool:
    """Whether a peer that trusts an authority accepts a leaf at a time."""
    trusted = Store([x509.load_pem_x509_certificate(authority)])
    when = datetime.datetime.fromtimestamp(now, datetime.UTC)
    verifier = PolicyBuilder().store(trusted).time(when).build_server_verifier(x509.DNSName(NAME))
    try:
        verifier.verify(x509.load_pem_x509_certificate(leaf.certificate), [])
    except VerificationError:
        return False
    return True


def test_a_process_accepts_what_another_one_with_the_same_secret_made() -> None:
    mine, other = make_leaf(SECRET, NOW), make_leaf(ClusterSecret(SECRET.value), NOW)
    assert proven_by(other, mine.authority)
    assert proven_by(mine, other.authority)
    assert mine.key != other.key


def test_a_process_of_another_cluster_is_not_accepted() -> None:
    assert not proven_by(make_leaf(OTHER_SECRET, NOW), make_leaf(SECRET, NOW).authority)


def test_an_authority_of_the_same_name_with_another_key_signed_nothing_of_ours() -> None:
    ours = x509.load_pem_x509_certificate(make_leaf(SECRET, NOW).authority)
    theirs = x509.load_pem_x509_certificate(make_leaf(OTHER_SECRET, NOW).certificate)
    assert theirs.issuer == ours.subject
    with pytest.raises(InvalidSignature):
        theirs.verify_directly_issued_by(ours)


@pytest.mark.parametrize(
    ("later_s", "accepted"), [(-VALID_S - 1, False), (-VALID_S + 1, True), (VALID_S - 1, True), (VALID_S + 1, False)]
)
def test_a_leaf_is_valid_around_the_time_it_was_made(later_s: float, accepted: bool) -> None:
    leaf = make_leaf(SECRET, NOW)
    assert proven_by(leaf, leaf.authority, NOW + later_s) is accepted


@pytest.mark.parametrize(
    ("later_s", "due"), [(-1, True), (0, False), (RENEW_AFTER_S - 1, False), (RENEW_AFTER_S, True)]
)
def test_a_leaf_is_replaced_when_it_is_old_or_the_clock_went_back(later_s: float, due: bool) -> None:
    assert make_leaf(SECRET, NOW).is_due(NOW + later_s) is due


def test_a_leaf_can_sign_no_other_one() -> None:
    certificate = x509.load_pem_x509_certificate(make_leaf(SECRET, NOW).certificate)
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False


def test_the_key_belongs_to_the_certificate_and_is_not_shown() -> None:
    leaf = make_leaf(SECRET, NOW)
    key = load_pem_private_key(leaf.key, None)
    assert key.public_key() == x509.load_pem_x509_certificate(leaf.certificate).public_key()
    assert repr(leaf) == f"Leaf(made_at={NOW})"
