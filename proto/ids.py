"""The names of things that cross process borders. Distinct types, so that one cannot be passed for another."""

from __future__ import annotations

from typing import Final, NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Minted by the gateway, one per sequence; a client's own id is only a label."""

WorkerId = NewType("WorkerId", str)
"""The stable name of a worker's place in its pool, such as `prefill-0`; where the cluster has several models, with the
key of its model: `qwen/prefill-0`."""

Incarnation = NewType("Incarnation", str)
"""Random per start of a worker process, so that messages for an earlier incarnation at the same address are
recognized."""

GatewayId = NewType("GatewayId", str)
"""One per gateway process."""

_PROBE: Final = "probe-"


def probe_gateway_id(suffix: str) -> GatewayId:
    """Of a controller that probes a worker as a gateway would use it."""
    return GatewayId(_PROBE + suffix)


def is_probe(gateway_id: str) -> bool:
    """Whether requests of that gateway are such probes, which are left out of what is counted."""
    return gateway_id.startswith(_PROBE)


BlockHash = NewType("BlockHash", bytes)
"""The chained hash of a full block of tokens, `block_hash.HASH_BYTES` long."""


class AttemptKey(NamedTuple):
    """One try at one request: the key of every piece of state that a worker holds for it."""

    request_id: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


def join_name(model: str, kind: str) -> str:
    """The name of a pool: its kind, and before it the key of its model, unless that is empty."""
    return f"{model}/{kind}" if model else kind


def model_of(name: str) -> str:
    """The key of the model in the name of a pool or worker; empty where it has none."""
    return name.rpartition("/")[0]


def kind_of(pool: str) -> str:
    """The kind in the name of a pool."""
    return pool.rpartition("/")[2]
