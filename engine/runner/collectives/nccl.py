"""The ranks' exchange between GPUs, by NCCL: one communicator of all ranks, without a world.

NOT VERIFIED: written from the documentation, on a machine without a GPU; no test has run it. Importable everywhere.

The ranks meet as in `gloo.py`. Exchanges are queued on the current stream, behind what computes their input
and before what reads their result; no thread waits for them. A rank that is lost leaves the others' streams hanging:
rank 0 sees it on its line to that rank, and the processes end.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed

from disagg.engine.runner.collectives.gloo import (
    OPERATION_TIMEOUT_S,
    SET_UP_TIMEOUT_S,
    GroupCollective,
    rank_store,
)
from disagg.engine.sharding.shards import Shard
from disagg.proto.cluster_secret import ClusterSecret

_dist: Any = torch.distributed


class NcclCollective(GroupCollective):
    """See `Collective`. Construction blocks until all ranks are there. `device` is this rank's.

    Raises:
        RuntimeError: without a CUDA device or NCCL, or if the ranks do not all come in time.
    """

    def __init__(self, address: str, secret: ClusterSecret, shard: Shard, device: str) -> None:
        if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
            raise RuntimeError("ranks on GPUs need a CUDA device and a torch that was built with NCCL")
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=OPERATION_TIMEOUT_S)
        with rank_store(address, secret, shard, SET_UP_TIMEOUT_S) as store:
            super().__init__(shard, _dist.ProcessGroupNCCL(store, shard.rank, shard.size, options), store)
            # The communicator is made now, not within the first step.
            self._group.eager_connect_single_device(torch.device(device))

    def close(self) -> None:
        """See `Collective.close`: the communicator is aborted, so that nothing hangs in it."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()
