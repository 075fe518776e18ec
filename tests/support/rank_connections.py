"""Lines between ranks without sockets, and whole groups of ranks as threads of this process.

with fake_group(size=4, num_kv_heads=2) as group:      rank 0's runner, and real `Follower`s on threads
    group.runner.run(plan)
with rank_group(runners, num_blocks) as group:         the same of any runners
carry(moved, nbytes, sent, received)                   a payload from the ranks of one group to those of another
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from typing_extensions import override

from disagg.connections.shell.connection import Connection, ConnectionFailedError
from disagg.engine.config import WorkerConfig
from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.parallel.follower import Follower
from disagg.engine.parallel.followers import ConnectedFollowers
from disagg.engine.parallel.interfaces import RankTransports, Reply, ShardRunner
from disagg.engine.parallel.leader import GroupRunner
from disagg.engine.parallel.staging import GroupBuffer
from disagg.engine.plan import Buffer
from disagg.engine.rank_messages import Begin, Done, ReceivePart, TransportCommand
from disagg.engine.sharding.kv_routes import PairGroup
from disagg.engine.sharding.shards import Shard
from disagg.proto.messages import MAX_FRAME_BYTES, encode
from tests.support.engine import VOCAB_SIZE
from tests.support.secret import SECRET, checksum

WAIT_S = 60.0
"""How long a test waits for another thread before it fails."""
R = TypeVar("R", bound=ShardRunner)


class MemoryConnection(Connection):
    """One end of a connection within the process. Made in pairs by `memory_connections`."""

    def __init__(self, inbox: queue.SimpleQueue[bytes | None], outbox: queue.SimpleQueue[bytes | None]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.peer: MemoryConnection
        self.is_closed = False

    @override
    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Whatever it holds."""
        if self.is_closed or self.peer.is_closed:
            raise ConnectionFailedError("cannot write: the connection is closed")
        self._outbox.put(frame)

    @override
    def receive(self, max_bytes: int = MAX_FRAME_BYTES) -> bytes | None:
        if self.is_closed:
            raise ConnectionFailedError("the connection is closed")
        frame = self._inbox.get()
        if frame is None:
            self._inbox.put(None)
            if self.is_closed:
                raise ConnectionFailedError("the connection is closed")
        elif len(frame) > max_bytes:
            raise ConnectionFailedError(f"a frame of {len(frame)} bytes is more than {max_bytes}")
        return frame

    @override
    def close(self) -> None:
        self.is_closed = True
        self._inbox.put(None)
        self._outbox.put(None)


def memory_connections() -> tuple[MemoryConnection, MemoryConnection]:
    """Both ends of a connection."""
    one: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    other: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    first, second = MemoryConnection(one, other), MemoryConnection(other, one)
    first.peer, second.peer = second, first
    return first, second


class NoTransports:
    """`RankTransports` that post receives and answer at once, and record their calls."""

    def __init__(self) -> None:
        self.commands: list[TransportCommand] = []
        self.is_closed = False

    def handle(self, command: TransportCommand, reply: Reply, on_posted: Callable[[], None]) -> None:
        self.commands.append(command)
        if isinstance(command, ReceivePart):
            on_posted()
        reply(Done(call=command.call, ok=True, checksums=(command.call,)))

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Rank(Generic[R]):
    """A follower on a thread."""

    follower: Follower
    runner: R
    transports: NoTransports
    thread: threading.Thread
    statuses: list[int] = field(default_factory=list)
    """Its exit status, once it has ended."""
    ends: list[int] = field(default_factory=list)
    """With which status it ended its process the hard way."""

    def join(self) -> int:
        """Its exit status."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the follower did not end"
        return self.statuses[0]


def start_rank(runner: R, connection: MemoryConnection, grace_s: float = WAIT_S, **changes: Any) -> Rank[R]:
    """A follower with this runner on one end of a connection; `changes` are arguments of `Follower`."""
    config = WorkerConfig(
        worker_id="test-0", roles=("decode",), model_path="fake", tp=runner.shard.size, pp=runner.shard.stages
    )
    transports = NoTransports()

    def make_transports(*_: object) -> RankTransports:
        return transports

    ends: list[int] = []
    arguments: dict[str, Any] = {
        "make_runner": lambda *_: runner,
        "make_transports": make_transports,
        "end_process": ends.append,
        "grace_s": grace_s,
    }
    follower = Follower(config, runner.shard, connection, SECRET, **{**arguments, **changes})
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(follower.serve()), name="follower")
    thread.start()
    return Rank(follower, runner, transports, thread, statuses, ends)


@dataclass
class RankGroup(Generic[R]):
    """Rank 0's runner over real followers."""

    runner: GroupRunner
    followers: ConnectedFollowers
    ranks: Sequence[Rank[R]]
    connections: Sequence[MemoryConnection]
    """The followers' ends."""
    faults: list[BaseException]
    lost: list[BaseException]

    def part(self, buffer: GroupBuffer, rank: int) -> Buffer:
        """What a rank has of a staging buffer."""
        if rank == 0:
            return buffer.local
        staging: Any = self.ranks[rank - 1].follower._staging
        return staging(buffer.number, buffer.whole_bytes)


FakeGroup = RankGroup[FakeModelRunner]


@contextmanager
def rank_group(runners: Sequence[R], num_blocks: int) -> Iterator[RankGroup[R]]:
    """A group of these runners, one for each rank, which have not joined; closed in the end."""
    lost: list[BaseException] = []
    faults: list[BaseException] = []
    first, *others = runners
    first.checksum = checksum
    followers = ConnectedFollowers(len(runners), lost.append)
    ranks, ends = [], []
    for runner in others:
        own, other = memory_connections()
        followers.attach(runner.shard.number, own)
        ranks.append(start_rank(runner, other))
        ends.append(other)
    try:
        followers.wait_joined(WAIT_S, WAIT_S)
        followers.broadcast(Begin(num_blocks=num_blocks, collective_address=""))
        first.join(None, num_blocks)
        yield RankGroup(GroupRunner(first, followers, faults.append), followers, ranks, ends, faults, lost)
    finally:
        followers.close()
        for each in ranks:
            each.join()


@contextmanager
def fake_group(
    size: int,
    num_kv_heads: int = 1,
    num_blocks: int = 10,
    block_size: int = 16,
    make: Callable[..., FakeModelRunner] = FakeModelRunner,
    pp: int = 1,
    **options: Any,
) -> Iterator[FakeGroup]:
    """A group of fake runners of `VOCAB_SIZE` tokens, `pp` stages of `size` ranks, which `make` makes; `options` are
    further arguments of it."""
    new = partial(make, num_blocks, block_size, 4096, VOCAB_SIZE, num_kv_heads=num_kv_heads, **options)
    shards = [Shard.of_number(number, size, pp) for number in range(size * pp)]
    with rank_group([new(shard=shard) for shard in shards], num_blocks) as group:
        yield group


def carry(
    moved: PairGroup, nbytes: int, sent: Callable[[int], Buffer], received: Callable[[int], Buffer]
) -> list[Buffer]:
    """Copy each slice of a payload from the part of the rank that sends it to that of the rank that receives it, as the
    channels between them do. `sent` and `received` give the part of a rank. The slices, in order."""
    element_bytes, slices = moved.element_bytes(nbytes), []
    for rank in moved.ranks("receiver"):
        for place, route in enumerate(moved.routes("receiver", rank)):
            # Slices between two ranks follow each other in one order.
            before = [each.peer for each in moved.routes("receiver", rank)[:place]].count(route.peer)
            origin = [each for each in moved.routes("sender", route.peer) if each.peer == rank][before]
            assert origin.num_elements == route.num_elements
            size = element_bytes * route.num_elements
            slices.append(sent(route.peer)[element_bytes * origin.first :][:size])
            received(rank)[element_bytes * route.first :][:size] = slices[-1]
    return slices
