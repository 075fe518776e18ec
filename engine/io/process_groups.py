"""Process groups of torch without a world: some processes meet, and are a group of their own.

one of them   point = RendezvousServer(...)      gives the others `point.address`
all           with member_store(...) as store:       blocks until all are there
                  group = gloo_group(...)    or NCCL's, by whoever needs that
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import secrets
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed

from disagg.engine.io.rendezvous import MemberStore, join_rendezvous
from disagg.proto.cluster_secret import ClusterSecret

_dist: Any = torch.distributed
"""Untyped: torch's stubs lack half of what is used here."""

_PROOF_TAG: Final = 0
_PROOF_BYTES: Final = 32


@contextlib.contextmanager
def member_store(
    name: str, address: str, secret: ClusterSecret, rank: int, size: int, timeout_s: float
) -> Iterator[MemberStore]:
    """Wait at the `RendezvousServer` at `address` until all `size` ranks of the group `name` are there; their store,
    until the group is made.

    Raises:
        OSError, RuntimeError, ValueError: if they do not all come in time, or there is no rendezvous server.
    """
    store = join_rendezvous(address, secret, name, rank, timeout_s)
    try:
        store.set(f"here/{rank}", b"1")
        store.wait([f"here/{other}" for other in range(size)], datetime.timedelta(seconds=timeout_s))
        yield store
    finally:
        store.close()


def gloo_group(
    store: MemberStore, secret: ClusterSecret, name: str, rank: int, size: int, host: str, timeout_s: float
) -> Any:
    """A group over TCP that is bound to `host` only, whose members have proved to each other over its own connections
    that they know the cluster's secret. `timeout_s` is for its set-up and, by default, each operation.

    Raises:
        RuntimeError: if it cannot be formed, or a member proves nothing.
    """
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = datetime.timedelta(seconds=timeout_s)
    group = _dist.ProcessGroupGloo(store, rank, size, options)
    prove_members(group, secret, name, rank, size)
    return group


def prove_members(group: Any, secret: ClusterSecret, name: str, rank: int, size: int) -> None:
    """Challenge each other member over the group's own connections: gloo takes whoever comes first to a port of its.
    Each sends 32 random bytes, and gets them back in an HMAC with the cluster's secret.

    Raises:
        RuntimeError: a member does not know the secret, or the connection broke.
    """
    others = [other for other in range(size) if other != rank]
    sent = {other: secrets.token_bytes(_PROOF_BYTES) for other in others}
    received = _exchange(group, sent)
    proofs = _exchange(
        group, {other: _proof(secret, name, rank, other, received[other] + sent[other]) for other in others}
    )
    for other in others:
        expected = _proof(secret, name, other, rank, sent[other] + received[other])
        if not hmac.compare_digest(proofs[other], expected):
            raise RuntimeError(f"rank {other} of {name!r} does not know the cluster's secret")


def _proof(secret: ClusterSecret, name: str, giver: int, taker: int, nonces: bytes) -> bytes:
    return secret.sign("disagg group connection", name, giver, taker, nonces)


def _exchange(group: Any, outgoing: dict[int, bytes]) -> dict[int, bytes]:
    """Send each other member its `_PROOF_BYTES` bytes; theirs for this one."""
    sending = {other: torch.frombuffer(bytearray(data), dtype=torch.uint8) for other, data in outgoing.items()}
    incoming = {other: torch.empty(_PROOF_BYTES, dtype=torch.uint8) for other in outgoing}
    works = [group.recv([tensor], other, _PROOF_TAG) for other, tensor in incoming.items()]
    works += [group.send([tensor], other, _PROOF_TAG) for other, tensor in sending.items()]
    for work in works:
        work.wait()
    return {other: tensor.numpy().tobytes() for other, tensor in incoming.items()}
