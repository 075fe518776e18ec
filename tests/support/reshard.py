"""Workers of several ranks in one process, and the byte channel of a pair between two of them.

Every rank has a fake runner with its own heads of its stage's layers; followers are objects that are called instead of
processes that are told. The pages of P hold noise, so that an element in a wrong place shows.
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
from disagg.engine.parallel.staging import StagingParts, own_part
from disagg.engine.parallel.transport import PairEnd, ShardTransports, form_pair
from disagg.engine.plan import Buffer, ModelRunner
from disagg.engine.rank_messages import (
    Capture,
    ClearBuffer,
    Done,
    FreeBuffer,
    GatherPart,
    Mark,
    RankCall,
    RankCommand,
    ReadAdapter,
    ScatterPart,
    StateBuffers,
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


@dataclass(frozen=True, kw_only=True)
class Model:
    """A fake model."""

    heads: int
    layers: int = 1
    """Of each cache group."""
    windows: tuple[int, ...] = ()
    """Of each cache group beside the first."""


def fake_rank(model: Model, shard: Shard, stage_ends: tuple[int, ...] = ()) -> FakeModelRunner:
    runner = FakeModelRunner(
        NUM_BLOCKS,
        BLOCK_SIZE,
        64,
        num_kv_heads=model.heads,
        num_layers=model.layers,
        windows=[(window, NUM_BLOCKS) for window in model.windows],
        shard=shard,
        stage_ends=stage_ends,
    )
    runner.checksum = checksum
    return runner


def noise(runner: FakeModelRunner, group: int) -> U32:
    """What the pages of this rank must hold on P, of a cache group: its share of what all ranks together have."""
    layers, heads = runner.layout.groups[group].layers, runner.layout.groups[group].num_heads
    shape = (2, len(layers), heads, NUM_BLOCKS, BLOCK_SIZE)
    whole = np.random.default_rng(heads + 100 * group).integers(0, UNWRITTEN, shape, dtype=np.uint32)
    ends = runner.shape.stage_ends or (1 + max(layers),)
    first, last = (0, *ends)[runner.shard.stage], ends[runner.shard.stage]
    mine = [place for place, layer in enumerate(layers) if first <= layer < last]
    held = runner.shard.kv_heads(heads)
    return whole[:, mine, held.start : held.stop].reshape(2, -1, NUM_BLOCKS, BLOCK_SIZE)


def fill(runner: FakeModelRunner) -> None:
    """Give a rank of P its share of the noise."""
    for group, pages in enumerate(runner._group_pages):
        pages[...] = noise(runner, group)


def arrived(runner: FakeModelRunner, tokens: range, group: int = 0) -> U32:
    """What the pages of a rank of D must hold of a cache group when exactly `tokens` came over from P."""
    source = noise(runner, group)
    pages = np.full_like(runner._group_pages[group], UNWRITTEN)
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
                checksums = self.runner.gather_part(
                    table, command.start, command.end, part, command.peer, command.group
                )
                reply(Done(call=command.call, ok=True, checksums=tuple(checksums)))
            case ScatterPart():
                table = np.frombuffer(command.block_table, "<i4").tolist()
                part = self.staging(command.buffer, command.buffer_bytes)
                self.runner.scatter_part(table, command.start, command.end, part, command.peer, command.group)
                reply(Done(call=command.call, ok=True))
            case Capture() | Mark() | StateBuffers() | ReadAdapter():
                raise AssertionError("nothing is captured here, no step marked, no buffer stated, and no adapter read")
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
    """All ranks of one worker, `pp` stages of `tp`."""

    def __init__(self, model: Model, tp: int, pp: int = 1, stage_ends: tuple[int, ...] = ()) -> None:
        shards = [Shard.of_number(number, tp, pp) for number in range(tp * pp)]
        self.ranks = [fake_rank(model, shard, stage_ends) for shard in shards]
        self.layout, self.shape = self.ranks[0].layout, self.ranks[0].shape
        self.others: list[PlayedFollower] = []
        for runner in self.ranks[1:]:
            staging = StagingParts(runner.new_staging, own_part(runner))
            transports = ShardTransports(HOST, runner.layout, runner.shape, runner.shard, staging, SECRET)
            self.others.append(PlayedFollower(runner, transports, staging))
        self.played = PlayedFollowers(self.others)
        self.followers: Followers = self.played if len(shards) > 1 else NoFollowers()
        self.faults: list[BaseException] = []
        self.runner: ModelRunner = self.ranks[0]
        if len(shards) > 1:
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
        self.plan = plan_pair(self.p.layout, self.p.shape, self.d.shape)

    def end(self, side: Side, pair_name: str = "pair") -> PairEnd:
        return PairEnd(
            plan=self.plan,
            side=side,
            pair_name=pair_name,
            transport=self.transport,
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

    def nbytes(self, tokens: range, group: int = 0) -> int:
        return len(tokens) * self.plan.groups[group].token_bytes

    def gather(self, tokens: range, group: int = 0) -> tuple[Buffer, int]:
        """P's copy of these tokens of a cache group, and its checksum."""
        buffer = self.p.runner.new_staging(self.nbytes(tokens, group))
        checksum = self.p.runner.gather(P_TABLE, tokens.start, tokens.stop, buffer, self.d.shape, group)
        return buffer, checksum

    def scatter(self, tokens: range, buffer: Buffer, group: int = 0) -> None:
        self.d.runner.scatter(D_TABLE, tokens.start, tokens.stop, buffer, self.p.shape, group)

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()


@contextmanager
def formed_pair(num_kv_heads: int, p_tp: int, d_tp: int, transport: Any = "local") -> Iterator[Pair]:
    """A pair that stands, of workers of one stage; afterwards nothing of it is left on any rank."""
    model = Model(heads=num_kv_heads)
    with pair_of(RankedWorker(model, p_tp), RankedWorker(model, d_tp), transport) as pair:
        yield pair


@contextmanager
def pair_of(p: RankedWorker, d: RankedWorker, transport: Any = "local") -> Iterator[Pair]:
    """A pair that stands; afterwards nothing of it is left on any rank."""
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
