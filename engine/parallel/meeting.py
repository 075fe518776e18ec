"""Where the ranks of a worker meet to compute together. Torch is loaded only where there is something to exchange: the
`fake` model has nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from disagg.engine.config import WorkerConfig
from disagg.engine.sharding.shards import Shard
from disagg.proto.cluster_secret import ClusterSecret

if TYPE_CHECKING:
    from disagg.engine.runner.collectives.collective import Collective

NO_RENDEZVOUS = ""
"""The address where nobody meets."""


class MeetingPlace(Protocol):
    """What rank 0 keeps open for as long as the ranks compute."""

    address: str

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        ...


def open_rendezvous(config: WorkerConfig, secret: ClusterSecret) -> MeetingPlace | None:
    """Rank 0's meeting point, which listens on `config.host` only; None where no rank needs to meet another.

    Raises:
        OSError: if it cannot listen there.
    """
    if config.is_fake:
        return None
    from disagg.engine.io.rendezvous import RendezvousServer

    return RendezvousServer(config.host, secret)


def join_collective(config: WorkerConfig, secret: ClusterSecret, shard: Shard, address: str) -> Collective | None:
    """Wait for all other ranks; None at `NO_RENDEZVOUS`.

    Raises:
        RuntimeError: if they do not all come in time.
    """
    if address == NO_RENDEZVOUS:
        return None
    from disagg.engine.runner.collectives.factory import make_collective

    return make_collective(config.device, address, secret, shard, config.host)
