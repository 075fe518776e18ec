"""Exchange between the ranks of a worker: sums and gathered columns within a stage, tensors from one rank to another
between stages.

    rank 0      server = RendezvousServer(host, secret)       listens on that address only; its address goes to all
    all ranks   collective = make_collective(device, address, secret, shard, host)      blocks until all are there

    one stage         a process group of all ranks
    several stages    a process group of all ranks for what goes between stages, and one of each stage of several ranks

The ranks of a stage make the same collective calls in the same order; who sends and who receives on a lane do so in the
same order. Gloo is for CPU tensors, over TCP; NCCL for GPUs. With gloo, a lost
rank fails the others' operation at once where its connection ends, and after `OPERATION_TIMEOUT_S` where it hangs; rank
0 finds out sooner, on its connection to that rank. With NCCL, operations are queued on the current stream, no thread
waits for them, and a lost rank leaves the others' streams hanging: rank 0 finds out on its connection, and the
processes end.

A send does not wait for its receiver. Its tensor is kept until it is over, and of those to one rank at most as many as
there are stages are under way: one more waits for the oldest. Receives are posted, and waited for where their tensor is
needed. With NCCL each lane has a process group of its own, so that a receive of results never stands on a stream in
front of a send that it waits for. That path has been written and never run.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal, Protocol

import torch
import torch.distributed
from torch import Tensor
from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine.io.rendezvous import MemberStore, gloo_group, member_store
from disagg.engine.runner.device import NCCL_CALLS, torch_device
from disagg.engine.sharding.shards import Shard

Lane = Literal["rows", "results"]
"""Hidden rows from a stage to the next one, or what the last one gives to rank 0."""


class Receiving(Protocol):
    """A receive that was posted."""

    def wait(self) -> Tensor:
        """The tensor, once it is there (on a GPU: for whatever is queued behind).

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...


class Collective(Protocol):
    """Exchange of tensors among the ranks. Owner: the engine thread."""

    shard: Shard
    captures: bool
    """Whether its exchanges can be part of a captured step. Those between stages never are."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks of the stage, on each of them; may be in place. Shapes and dtypes must agree.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        """On the stage's rank 0 its ranks' columns side by side, [R, C * size]; None elsewhere.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        """Begin to send a tensor, which nobody may change from now on, to the rank of that number.

        Raises:
            RuntimeError: if a rank is lost.
        """
        ...

    def receive(self, tensor: Tensor, source: int, lane: Lane) -> Receiving:
        """Begin to receive the next tensor that the rank of that number sends on a lane into this one, of the same
        size.

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
    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        pass

    @override
    def receive(self, tensor: Tensor, source: int, lane: Lane) -> Receiving:
        return _Received(tensor.zero_())

    @override
    def close(self) -> None:
        pass


class _Received(Receiving):
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @override
    def wait(self) -> Tensor:
        return self._tensor


_dist: Any = torch.distributed
"""Untyped: torch's stubs lack half of what is used here."""

SET_UP_TIMEOUT_S = 60.0
"""How long ranks wait for each other to meet; all have loaded their model by then."""
OPERATION_TIMEOUT_S = 600.0
"""Beyond any time for which a machine stands still, which the library counts. A rank that hangs is known long before by
the length of the step (`recovery.stuck_after_s`)."""
GROUP_NAME = "ranks"
_TAGS: Final[Mapping[Lane, int]] = {"rows": 1, "results": 2}


@contextlib.contextmanager
def rank_store(
    address: str, secret: ClusterSecret, rank: int, size: int, timeout_s: float, name: str = GROUP_NAME
) -> Iterator[MemberStore]:
    """Wait at the rendezvous server until all `size` ranks of a group are there; their store, until their group is
    made.

    Raises:
        RuntimeError: if they do not all come in time, or there is no rendezvous server.
    """
    try:
        with member_store(name, address, secret, rank, size, timeout_s) as store:
            yield store
    except (OSError, RuntimeError, ValueError) as error:
        raise RuntimeError(f"the {size} ranks did not all meet at {address!r}: {error}") from error


class GroupCollective(Collective):
    """A `Collective` over process groups.

    Args:
        group: of the ranks of the stage; None for one rank.
        lanes: of all ranks, for each lane; none for one stage.
        stores: of these groups, whose C++ side calls them and does not keep them alive.
    """

    captures = False

    def __init__(self, shard: Shard, group: Any, lanes: Mapping[Lane, Any], stores: tuple[MemberStore, ...]) -> None:
        self.shard = shard
        self._group = group
        self._lanes = dict(lanes)
        self._stores = stores
        self._sent: dict[tuple[int, Lane], deque[tuple[Any, Tensor]]] = {}
        """Sends that may be under way, oldest first, by receiver and lane."""
        self._is_closed = False

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
    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        """Waits for the oldest send to that rank where as many as there are stages are under way."""
        group = self._open_lane(lane)
        sent = self._sent.setdefault((to, lane), deque())
        while len(sent) >= self.shard.stages:
            sent.popleft()[0].wait()
        tensor = tensor.contiguous()
        sent.append((group.send([tensor], to, _TAGS[lane]), tensor))

    @override
    def receive(self, tensor: Tensor, source: int, lane: Lane) -> Receiving:
        return _PostedReceive(self._open_lane(lane).recv([tensor], source, _TAGS[lane]), tensor)

    @override
    def close(self) -> None:
        """Idempotent. To be called on the thread that makes the exchanges."""
        self._is_closed = True
        self._sent.clear()
        self._group = None
        self._lanes.clear()

    def _open_group(self) -> Any:
        self._check_open()
        assert self._group is not None, "a stage of one rank adds up nothing"
        return self._group

    def _open_lane(self, lane: Lane) -> Any:
        self._check_open()
        return self._lanes[lane]

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this rank has left the exchange")


class _PostedReceive(Receiving):
    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    @override
    def wait(self) -> Tensor:
        self._work.wait()
        return self._tensor


class _Meeting:
    """Makes the process groups of a rank, each when all its ranks are at the rendezvous server.

    Args:
        make: (store, name, rank, size) -> a group.
    """

    def __init__(
        self,
        address: str,
        secret: ClusterSecret,
        shard: Shard,
        timeout_s: float,
        make: Callable[[MemberStore, str, int, int], Any],
    ) -> None:
        self._rendezvous = address, secret
        self._shard = shard
        self._timeout_s = timeout_s
        self._make = make
        self.stores: list[MemberStore] = []
        """Of the groups that were made."""

    def of_stage(self) -> Any:
        """The group of the ranks of this rank's stage; None where it is alone there."""
        shard = self._shard
        return None if shard.size == 1 else self._group(f"{GROUP_NAME}/{shard.stage}", shard.rank, shard.size)

    def of_all(self, name: str = GROUP_NAME, use: Callable[[Any], None] = lambda group: None) -> Any:
        """A group of all ranks. `use` is called with it while its store is there."""
        return self._group(name, self._shard.number, self._shard.num_ranks, use)

    def _group(self, name: str, rank: int, size: int, use: Callable[[Any], None] = lambda group: None) -> Any:
        with rank_store(*self._rendezvous, rank, size, self._timeout_s, name) as store:
            self.stores.append(store)
            group = self._make(store, name, rank, size)
            use(group)
            return group


class GlooCollective(GroupCollective):
    """Over gloo process groups, for CPU tensors. Construction blocks until all ranks are there.

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
        def make(store: MemberStore, name: str, rank: int, size: int) -> Any:
            return gloo_group(store, secret, name, rank, size, host, operation_timeout_s)

        meeting = _Meeting(address, secret, shard, set_up_timeout_s, make)
        lanes: dict[Lane, Any] = dict.fromkeys(_TAGS, meeting.of_all()) if shard.stages > 1 else {}
        super().__init__(shard, meeting.of_stage(), lanes, tuple(meeting.stores))


def _root_0() -> Any:
    options = _dist.GatherOptions()
    options.rootRank = 0
    return options


class NcclCollective(GroupCollective):
    """Construction blocks until all ranks are there. `device` is this rank's, with its index. Within a worker of one
    stage, operations can be captured in a CUDA graph, which all ranks then replay in the same order.

    Raises:
        RuntimeError: without NCCL, or if the ranks do not all come in time.
    """

    def __init__(self, address: str, secret: ClusterSecret, shard: Shard, device: torch.device) -> None:
        if not torch.distributed.is_nccl_available():
            raise RuntimeError("ranks on GPUs need a torch that was built with NCCL")
        self.captures = shard.stages == 1
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=OPERATION_TIMEOUT_S)

        def make(store: MemberStore, name: str, rank: int, size: int) -> Any:
            group = _dist.ProcessGroupNCCL(store, rank, size, options)
            # The communicators are made now, not within the first step.
            group.eager_connect_single_device(device)
            return group

        meeting = _Meeting(address, secret, shard, SET_UP_TIMEOUT_S, make)
        lanes: dict[Lane, Any] = {}
        for lane in _TAGS if shard.stages > 1 else ():
            use = partial(_try_lane, shard=shard, lane=lane, device=device)
            lanes[lane] = meeting.of_all(f"{GROUP_NAME}/{lane}", use)
        super().__init__(shard, meeting.of_stage(), lanes, tuple(meeting.stores))

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
    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        with NCCL_CALLS:
            super().send(tensor, to, lane)

    @override
    def receive(self, tensor: Tensor, source: int, lane: Lane) -> Receiving:
        with NCCL_CALLS:
            return super().receive(tensor, source, lane)

    @override
    def close(self) -> None:
        """The communicators are aborted, so that nothing hangs in them. NCCL waits there for the end of every CUDA
        graph that holds an operation of one."""
        groups = [group for group in (self._group, *self._lanes.values()) if group is not None]
        super().close()
        for group in groups:
            group.abort()


def _try_lane(group: Any, shard: Shard, lane: Lane, device: torch.device) -> None:
    """One number the way that tensors take on a lane: where torch makes a communicator for each two ranks, the store
    has to be there."""
    number = torch.zeros(1, device=device)
    for source in senders(shard, lane):
        group.recv([number], source, _TAGS[lane]).wait()
    for to in receivers(shard, lane):
        group.send([number], to, _TAGS[lane]).wait()


def senders(shard: Shard, lane: Lane) -> tuple[int, ...]:
    """The numbers of the ranks from which a rank receives on a lane, in order."""
    if lane == "rows":
        return () if shard.is_first else (shard.number - shard.size,)
    last = (shard.stages - 1) * shard.size
    return tuple(range(last, last + shard.size)) if shard.number == 0 else ()


def receivers(shard: Shard, lane: Lane) -> tuple[int, ...]:
    """The numbers of the ranks to which a rank sends on a lane."""
    if lane == "rows":
        return () if shard.is_last else (shard.number + shard.size,)
    return (0,) if shard.is_last else ()


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
