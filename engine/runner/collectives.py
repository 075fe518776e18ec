"""Collective operations between the ranks of a worker, over one process group of all ranks.

    rank 0      server = RendezvousServer(host, secret)       listens on that address only; its address goes to all
    all ranks   collective = make_collective(device, address, secret, shard, host)      blocks until all are there

Every rank makes the same calls in the same order. Gloo is for CPU tensors, over TCP; NCCL for GPUs. With gloo, a lost
rank fails the others' operation at once where its connection ends, and after `OPERATION_TIMEOUT_S` where it hangs; rank
0 finds out sooner, on its connection to that rank. With NCCL, operations are queued on the current stream, no thread
waits for them, and a lost rank leaves the others' streams hanging: rank 0 finds out on its connection, and the
processes end.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor
from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.io.rendezvous import MemberStore, gloo_group, member_store
from disagg.engine.runner.device import NCCL_CALLS, torch_device
from disagg.engine.sharding.shards import Shard


class Collective(Protocol):
    """Exchange of tensors among the ranks. Owner: the engine thread."""

    shard: Shard
    captures: bool
    """Whether its exchanges can be part of a captured step."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; may be in place. Shapes and dtypes must agree.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        """On rank 0 the ranks' columns side by side, [R, C * size]; None elsewhere.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def close(self) -> None:
        """Leave; who still waits for this rank fails. Captured steps that exchange tensors must be dropped before.
        Idempotent."""
        ...


class Alone(Collective):
    """Lets a rank compute without the others, to measure what it needs: shapes are right, numbers are not."""

    captures = True

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    @override
    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        return tensor_RC.repeat(1, self.shard.size) if self.shard.rank == 0 else None

    @override
    def close(self) -> None:
        pass


_dist: Any = torch.distributed
"""Untyped: torch's stubs lack half of what is used here."""

SET_UP_TIMEOUT_S = 60.0
"""How long ranks wait for each other to meet; all have loaded their model by then."""
OPERATION_TIMEOUT_S = 600.0
"""Beyond any time for which a machine stands still, which the library counts. A rank that hangs is known long before by
the length of the step (`recovery.stuck_after_s`)."""
GROUP_NAME = "ranks"


@contextlib.contextmanager
def rank_store(address: str, secret: ClusterSecret, shard: Shard, timeout_s: float) -> Iterator[MemberStore]:
    """Wait at the rendezvous server until all ranks are there; their store, until their group is made.

    Raises:
        RuntimeError: if they do not all come in time, or there is no rendezvous server.
    """
    try:
        with member_store(GROUP_NAME, address, secret, shard.rank, shard.size, timeout_s) as store:
            yield store
    except (OSError, RuntimeError, ValueError) as error:
        raise RuntimeError(f"the {shard.size} ranks did not all meet at {address!r}: {error}") from error


class GroupCollective(Collective):
    """A `Collective` over a process group of all ranks."""

    captures = False

    def __init__(self, shard: Shard, group: Any, store: MemberStore) -> None:
        self.shard = shard
        self._group = group
        self._store = store
        """The group's C++ side calls it, and does not keep it alive."""

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        self._open_group().allreduce([tensor]).wait()
        return tensor

    @override
    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        """Rank 0 is the root."""
        group, shard = self._open_group(), self.shard
        if shard.rank > 0:
            group.gather([], [tensor_RC], _root_0()).wait()
            return None
        parts = [torch.empty_like(tensor_RC) for _ in range(shard.size)]
        group.gather([parts], [tensor_RC], _root_0()).wait()
        return torch.cat(parts, dim=1)

    @override
    def close(self) -> None:
        """Idempotent. To be called on the thread that makes the exchanges."""
        self._group = None

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("this rank has left the exchange")
        return self._group


class GlooCollective(GroupCollective):
    """Over a gloo process group, for CPU tensors. Construction blocks until all ranks are there.

    Raises:
        RuntimeError: if they do not all come in time.
    """

    def __init__(
        self,
        address: str,
        secret: ClusterSecret,
        shard: Shard,
        host: str,
        set_up_timeout_s: float = SET_UP_TIMEOUT_S,
        operation_timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> None:
        with rank_store(address, secret, shard, set_up_timeout_s) as store:
            group = gloo_group(store, secret, GROUP_NAME, shard.rank, shard.size, host, operation_timeout_s)
        super().__init__(shard, group, store)


def _root_0() -> Any:
    options = _dist.GatherOptions()
    options.rootRank = 0
    return options


class NcclCollective(GroupCollective):
    """Construction blocks until all ranks are there. `device` is this rank's, with its index. Operations can be
    captured in a CUDA graph, which all ranks then replay in the same order.

    Raises:
        RuntimeError: without NCCL, or if the ranks do not all come in time.
    """

    captures = True

    def __init__(self, address: str, secret: ClusterSecret, shard: Shard, device: torch.device) -> None:
        if not torch.distributed.is_nccl_available():
            raise RuntimeError("ranks on GPUs need a torch that was built with NCCL")
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=OPERATION_TIMEOUT_S)
        with rank_store(address, secret, shard, SET_UP_TIMEOUT_S) as store:
            super().__init__(shard, _dist.ProcessGroupNCCL(store, shard.rank, shard.size, options), store)
            # The communicator is made now, not within the first step.
            self._group.eager_connect_single_device(device)

    @override
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        with NCCL_CALLS:
            return super().all_reduce(tensor)

    @override
    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        """Rank 0 is the root."""
        with NCCL_CALLS:
            return super().gather_columns(tensor_RC)

    @override
    def close(self) -> None:
        """The communicator is aborted, so that nothing hangs in it. NCCL waits there for the end of every CUDA graph
        that holds an operation of it."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def make_collective(device: str, address: str, secret: ClusterSecret, shard: Shard, host: str) -> Collective:
    """Meet the other ranks at the `RendezvousServer` at `address`: gloo for CPU tensors, bound to `host`; NCCL for a
    GPU's.

    Raises:
        ConfigError: this torch does not see the device.
        RuntimeError: if they do not all come in time, or this machine lacks what the exchange needs.
    """
    of_rank = torch_device(device)
    if of_rank.type == "cpu":
        return GlooCollective(address, secret, shard, host)
    return NcclCollective(address, secret, shard, of_rank)
