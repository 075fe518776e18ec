"""The names of things that cross process borders. Distinct types, so that one cannot be passed for another."""

from __future__ import annotations

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Minted by the gateway, one per sequence; a client's own id is only a label."""

WorkerId = NewType("WorkerId", str)
"""The stable name of a worker's place in its pool, such as `prefill-0`."""

Incarnation = NewType("Incarnation", str)
"""Random per start of a worker process, so that messages for an earlier incarnation at the same address are
recognized."""

GatewayId = NewType("GatewayId", str)
"""One per gateway process."""

BlockHash = NewType("BlockHash", bytes)
"""The chained hash of a full block of tokens, `block_hash.HASH_BYTES` long."""


class AttemptKey(NamedTuple):
    """One try at one request: the key of every piece of state that a worker holds for it."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"
