"""Which exchange the ranks of a worker use."""

from __future__ import annotations

import torch

from disagg.engine.runner.collectives.collective import Collective
from disagg.engine.runner.collectives.gloo import GlooCollective
from disagg.engine.runner.collectives.nccl import NcclCollective
from disagg.engine.sharding.shards import Shard
from disagg.proto.cluster_secret import ClusterSecret


def make_collective(device: str, address: str, secret: ClusterSecret, shard: Shard, host: str) -> Collective:
    """Meet the other ranks at the `RendezvousServer` at `address`: gloo for CPU tensors, bound to `host`; NCCL for a
    GPU's.

    Raises:
        RuntimeError: if they do not all come in time, or this machine lacks what the exchange needs.
    """
    if torch.device(device).type == "cpu":
        return GlooCollective(address, secret, shard, host)
    return NcclCollective(address, secret, shard, device)
