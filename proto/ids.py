"""The names of things that cross process borders. Distinct types, so that one cannot be passed for another."""

from __future__ import annotations

from typing import Final, NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Id of a request, made by the gateway, one for each sequence. A client's own id is only a label."""

WorkerId = NewType("WorkerId", str)
"""The stable name of a worker's place in its pool, such as `prefill-0`; where the cluster has several models, with the
key of its model: `qwen/prefill-0`."""

Incarnation = NewType("Incarnation", str)
"""Id of one start of a worker process, random, so that messages for an earlier incarnation at the same address are
recognized."""

GatewayId = NewType("GatewayId", str)
"""Id of a gateway process."""

_PROBE: Final = "probe-"


def probe_gateway_id(suffix: str) -> GatewayId:
    """Gateway id of a controller that probes a worker in the way a gateway would use it."""
    return GatewayId(_PROBE + suffix)


def is_probe(gateway_id: str) -> bool:
    """Whether a gateway id belongs to such a probe. Its requests are left out of statistics."""
    return gateway_id.startswith(_PROBE)


BlockHash = NewType("BlockHash", bytes)
"""The chained hash of a full block of tokens, `block_hash.HASH_BYTES` long."""


class AttemptKey(NamedTuple):
    """One attempt at a request: the key of all state that a worker holds for it."""

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
