"""The ranks' exchange over TCP, by gloo: one process group of all ranks, without a world.

    rank 0      point = RendezvousServer(host, secret), which listens on that address only; gives all point.address
    all ranks   collective = make_collective(device, address, secret, shard, host)      blocks until all are there

A rank that is lost fails the others' exchange at once where its connection ends, and after `OPERATION_TIMEOUT_S` where
it stands still; rank 0 sees it sooner, on its line to that rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from disagg.engine.io.process_groups import gloo_group, member_store
from disagg.engine.io.rendezvous import MemberStore
from disagg.engine.sharding.shards import Shard
from disagg.proto.cluster_secret import ClusterSecret

_dist: Any = torch.distributed
"""Untyped: torch's stubs lack half of what is used here."""

SET_UP_TIMEOUT_S = 60.0
"""How long ranks wait for each other to meet; all have loaded their model by then."""
OPERATION_TIMEOUT_S = 120.0
"""Ranks differ by what one of them is delayed within a step, so this is far beyond any honest wait."""
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


class GroupCollective:
    """A `Collective` over a process group of all ranks."""

    def __init__(self, shard: Shard, group: Any, store: MemberStore) -> None:
        self.shard = shard
        self._group = group
        self._store = store
        """The group's C++ side calls it, and does not keep it alive."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See `Collective.all_reduce`; in place."""
        self._open_group().allreduce([tensor]).wait()
        return tensor

    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        """See `Collective.gather_columns`; rank 0 is the root."""
        group, shard = self._open_group(), self.shard
        if shard.rank > 0:
            group.gather([], [tensor_RC], _root_0()).wait()
            return None
        parts = [torch.empty_like(tensor_RC) for _ in range(shard.size)]
        group.gather([parts], [tensor_RC], _root_0()).wait()
        return torch.cat(parts, dim=1)

    def close(self) -> None:
        """See `Collective.close`; idempotent. To be called on the thread that makes the exchanges."""
        self._group = None

    def _open_group(self) -> Any:
        if self._group is None:
            raise RuntimeError("this rank has left the exchange")
        return self._group


class GlooCollective(GroupCollective):
    """See `Collective`. Construction blocks until all ranks are there.

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
