"""Why hand-overs fail, as kinds that can be counted: the reasons themselves are for people, and may hold anything."""

from __future__ import annotations

from disagg.engine.kv_transfer.effects import LEASE_LOST, PAIR_CLOSED, STUCK

KV_GONE = "its KV is gone on the prefill worker"
CHUNK_REJECTED = "the decode worker rejected"
TRANSPORT_FAILED = "the transport failed"
VIOLATION = "protocol violation"
PAIR_LOST = "pair with"

_KINDS = {
    LEASE_LOST: "lease_lost",
    PAIR_CLOSED: "pair_closed",
    STUCK: "stuck",
    KV_GONE: "kv_gone",
    CHUNK_REJECTED: "chunk_rejected",
    TRANSPORT_FAILED: "transport",
    VIOLATION: "violation",
    PAIR_LOST: "pair_lost",
}
"""Beginning of a reason -> kind."""


def kind_of_failure(reason: str) -> str:
    """The kind of a fault, one of a few words; `other` for what a peer said in words of its own."""
    return next((kind for start, kind in _KINDS.items() if reason.startswith(start)), "other")
