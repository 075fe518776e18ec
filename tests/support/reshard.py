"""Workers of several ranks in one process, and the byte channel of a pair between two of them.

Every rank has a fake runner with its own heads; followers are objects that are called instead of processes that are
told. The pages of P hold noise, so that an element in a wrong place shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from disagg.engine.fake_runner import FakeModelRunner
from disagg.engine.kv_transfer.transport import PairTransport, Rendezvous
from disagg.engine.kv_transfer.transports.factory import make_connector, make_rendezvous
from disagg.engine.parallel.interfaces import Followers, NoFollowers, Reply
from disagg.engine.parallel.leader import GroupRunner
from disagg.engine.parallel.staging import StagingParts
from disagg.engine.parallel.transport import PairEnd, ShardTransports, form_pair
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.rank_messages import (
    Capture,
    ClearBuffer,
    Done,
    FreeBuffer,
    GatherPart,
    RankCall,
    RankCommand,
    ReadAdapter,
    ScatterPart,
)
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.engine.sharding.shards import Shard
from disagg.proto.handover import Side
from tests.support.secret import SECRET, checksum

U32 = npt.NDArray[np.uint32]
HOST = "127.0.0.1"
NUM_BLOCKS, BLOCK_SIZE = 12, 4
UNWRITTEN = 0xFFFFFFFF
WAIT_S = 60.0
P_TABLE = [7, 2, 9, 4, 0, 11]
D_TABLE = [1, 10, 3, 8, 5, 6]


def fake_rank(num_kv_heads: int, shard: Shard) -> FakeModelRunner:
    runner = FakeModelRunner(NUM_BLOCKS, BLOCK_SIZE, 64, num_kv_heads=num_kv_heads, shard=shard)
    runner.checksum = checksum
    return runner


def noise(num_kv_heads: int) -> U32:
    """What the pages of all heads hold on P, [k|v][head][block][offset]."""
    shape = (2, num_kv_heads, NUM_BLOCKS, BLOCK_SIZE)
    return np.random.default_rng(num_kv_heads).integers(0, UNWRITTEN, shape, dtype=np.uint32)


def fill(runner: FakeModelRunner) -> None:
    """Give a rank of P its heads of the noise."""
    heads = runner.shard.kv_heads(runner.layout.groups[0].num_heads)
    runner._pages_2HNB[...] = noise(runner.layout.groups[0].num_heads)[:, heads.start : heads.stop]


def arrived(runner: FakeModelRunner, tokens: range) -> U32:
    """What the pages of a rank of D must hold when exactly `tokens` came over from P."""
    heads = runner.shard.kv_heads(runner.layout.groups[0].num_heads)
    source = noise(runner.layout.groups[0].num_heads)[:, heads.start : heads.stop]
    pages = np.full_like(runner._pages_2HNB, UNWRITTEN)
    for token in tokens:
        block, offset = divmod(token, BLOCK_SIZE)
        pages[:, :, D_TABLE[block], offset] = source[:, :, P_TABLE[block], offset]
    return pages


@dataclass
class PlayedFollower:
    """One rank above 0, without a process."""

    runner: FakeModelRunner
    transports: ShardTransports
    staging: StagingParts

    def carry_out(self, command: RankCall, reply: Reply, on_posted: Callable[[], None]) -> None:
        match command:
            case GatherPart():
                table = np.frombuffer(command.block_table, "<i4").tolist()
                part = self.staging(command.buffer, command.buffer_bytes)
                checksums = self.runner.gather_part(table, command.start, command.end, part, command.peer_tp)
                reply(Done(call=command.call, ok=True, checksums=tuple(checksums)))
            case ScatterPart():
                table = np.frombuffer(command.block_table, "<i4").tolist()
                part = self.staging(command.buffer, command.buffer_bytes)
                self.runner.scatter_part(table, command.start, command.end, part, command.peer_tp)
                reply(Done(call=command.call, ok=True))
            case Capture() | ReadAdapter():
                raise AssertionError("nothing is captured here, and no adapter read")
            case _:
                self.transports.handle(command, reply, on_posted)


class PlayedFollowers(Followers):
    """Followers on the caller's thread. Commands go through msgspec, as they would through a socket."""

    def __init__(self, ranks: list[PlayedFollower]) -> None:
        self.ranks = ranks
        self.size = 1 + len(ranks)
        self.asked: list[tuple[int, RankCall]] = []

    @override
    def broadcast(self, command: RankCommand) -> None:
        assert isinstance(command, FreeBuffer | ClearBuffer), command

    @override
    def call(self, rank: int, command: RankCall, reply: Reply, on_posted: Callable[[], None] | None = None) -> None:
        self.asked.append((rank, command))
        numbered: Any = msgspec.structs.replace(command, call=len(self.asked))
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(numbered), type=type(numbered))
        self.ranks[rank - 1].carry_out(copy, reply, on_posted or (lambda: None))


class RankedWorker:
    """All ranks of one worker."""

    def __init__(self, num_kv_heads: int, tp: int) -> None:
        self.tp = tp
        self.ranks = [fake_rank(num_kv_heads, Shard(rank, tp)) for rank in range(tp)]
        self.layout = self.ranks[0].layout
        self.others: list[PlayedFollower] = []
        for runner in self.ranks[1:]:
            staging = StagingParts(runner.new_staging)
            self.others.append(
                PlayedFollower(runner, ShardTransports(runner.layout, runner.shard, staging, SECRET), staging)
            )
        self.played = PlayedFollowers(self.others)
        self.followers: Followers = self.played if tp > 1 else NoFollowers()
        self.faults: list[BaseException] = []
        self.runner: ModelRunner = self.ranks[0]
        if tp > 1:
            self.runner = GroupRunner(self.ranks[0], self.followers, self.faults.append)

    def close(self) -> None:
        for other in self.others:
            other.transports.close()
            assert not other.transports._pairs
        assert self.faults == []


class Answer:
    """The outcome of one operation; wait with `result`."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._posted = threading.Event()
        self.results: list[tuple[bool, str, int]] = []

    def __call__(self, ok: bool, error: str, checksum: int = 0) -> None:
        self.results.append((ok, error, checksum))
        self._told.set()

    def posted(self) -> None:
        assert not self._posted.is_set()
        assert not self.results
        self._posted.set()

    @property
    def was_posted(self) -> bool:
        return self._posted.is_set()

    def wait_posted(self) -> None:
        assert self._posted.wait(WAIT_S)

    def result(self) -> tuple[bool, str, int]:
        assert self._told.wait(WAIT_S)
        (result,) = self.results
        return result


@dataclass
class Pair:
    """Two workers and both ends of their channel."""

    p: RankedWorker
    d: RankedWorker
    rendezvous: Rendezvous
    transport: str = "local"
    sending: PairTransport = field(init=False)
    receiving: PairTransport = field(init=False)

    def __post_init__(self) -> None:
        self.plan = plan_pair(self.p.layout, self.p.tp, self.d.tp)

    def end(self, side: Side, pair_name: str = "pair") -> PairEnd:
        return PairEnd(
            plan=self.plan,
            side=side,
            pair_name=pair_name,
            transport=self.transport,
            host=HOST,
            store_address=self.rendezvous.address,
            checksum=checksum,
        )

    def form_p(self, pair_name: str = "pair") -> PairTransport:
        connect, address = make_connector(self.transport, HOST, SECRET), self.rendezvous.address
        end = self.end("sender", pair_name)
        return form_pair(end, lambda name: connect(name, address), self.p.followers)

    def form_d(self, pair_name: str = "pair") -> PairTransport:
        return form_pair(self.end("receiver", pair_name), self.rendezvous.accept, self.d.followers)

    def form(self) -> None:
        """Both ends at once."""
        made: list[PairTransport] = []
        thread = threading.Thread(target=lambda: made.append(self.form_d()))
        thread.start()
        self.sending = self.form_p()
        thread.join(WAIT_S)
        (self.receiving,) = made

    def nbytes(self, tokens: range) -> int:
        return len(tokens) * self.plan.groups[0].token_bytes

    def gather(self, tokens: range) -> tuple[Buffer, int]:
        """P's copy of these tokens, and its checksum."""
        buffer = self.p.runner.new_staging(self.nbytes(tokens))
        checksum = self.p.runner.gather(P_TABLE, tokens.start, tokens.stop, buffer, self.d.tp)
        return buffer, checksum

    def scatter(self, tokens: range, buffer: Buffer) -> None:
        self.d.runner.scatter(D_TABLE, tokens.start, tokens.stop, buffer, self.p.tp)

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()


@contextmanager
def formed_pair(num_kv_heads: int, p_tp: int, d_tp: int, transport: Any = "local") -> Iterator[Pair]:
    """A pair that stands; afterwards nothing of it is left on any rank."""
    p, d = RankedWorker(num_kv_heads, p_tp), RankedWorker(num_kv_heads, d_tp)
    for runner in p.ranks:
        fill(runner)
    pair = Pair(p, d, make_rendezvous(transport, HOST, SECRET), transport)
    pair.form()
    try:
        yield pair
    finally:
        pair.close()
        pair.rendezvous.close()
        p.close()
        d.close()
