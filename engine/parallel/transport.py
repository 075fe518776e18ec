"""KV between workers of different shapes: a pair's byte channel over all ranks of a worker.

    rank 0      GroupTransport    what a link uses as the pair's `PairTransport`; has rank 0's channels itself, and
                                  gives commands to the other ranks
    ranks 1..   ShardTransports   carries those commands out
    all ranks   RankChannels      `channels.py`: a channel for each rank of the other worker with a common slice

    open    every rank forms its channels; the pair stands when all do
    send    every rank sends its slices of a chunk; over when all are
    recv    every rank posts its receives; the peer may send when all are posted. One checksum for the chunk
    close   every rank closes its channels

Ranks of two workers meet in D's one rendezvous, under the pair's name and their numbers. What fails on one rank fails
the operation and closes the pair on all of them. Two workers of one rank use the plain channel, and nothing of this.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from disagg.connections.cluster_secret import ClusterSecret
from disagg.engine import rank_messages
from disagg.engine.kv_transfer.transport import (
    SET_UP_TIMEOUT_S,
    Checksum,
    Done,
    PairTransport,
    Posted,
    Received,
    TransportError,
    ignore_posted,
)
from disagg.engine.kv_transfer.transports.factory import make_connector
from disagg.engine.parallel.channels import CLOSED, AllOf, Checksums, RankChannels
from disagg.engine.parallel.interfaces import Followers, RankTransports, Reply
from disagg.engine.plan import Buffer
from disagg.engine.rank_messages import ClosePair, OpenPair, ReceivePart, SendPart, TransportCommand
from disagg.engine.sharding.kv_routes import PairGroup, PairPlan, plan_pair
from disagg.engine.sharding.shards import Shard
from disagg.proto.handover import Side
from disagg.proto.messages import KvLayout, ParallelShape

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = SET_UP_TIMEOUT_S + 5.0
"""How long rank 0 waits for the other ranks' channels; theirs give up before."""

OpenChannel = Callable[[str], PairTransport]
"""Forms the channel of this name with the other worker; blocks; raises what `Rendezvous.accept` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEnd:
    """One end of a pair, for all ranks of the worker."""

    plan: PairPlan
    side: Side
    pair_name: str
    transport: str
    store_address: str
    checksum: Checksum

    @property
    def peer(self) -> ParallelShape:
        """Ranks of the other worker."""
        return self.plan.receiver if self.side == "sender" else self.plan.sender


def form_pair(end: PairEnd, open_channel: OpenChannel, followers: Followers) -> PairTransport:
    """This worker's end of a pair; blocks until the peer's ranks are there. `open_channel` is for rank 0.

    Raises:
        TransportError: if the peer does not come in time, or a channel cannot be made.
        OSError, RuntimeError: as `open_channel` does.
    """
    if end.plan.sender.num_ranks == end.plan.receiver.num_ranks == 1:
        return open_channel(end.pair_name)
    transport = GroupTransport(end, open_channel, followers)
    transport.open()
    return transport


class GroupTransport(PairTransport):
    """A `PairTransport` over all ranks of a worker, of which this process is rank 0. With one rank here and several
    there, it has channels of its own only.

    Buffers are a `GroupBuffer` (`number`, and rank 0's part as `local`), with one rank a plain one. Itself it moves
    payloads of the first cache group, and `of_group` those of each.
    """

    def __init__(self, end: PairEnd, open_channel: OpenChannel, followers: Followers) -> None:
        self._end = end
        self._checksum = end.checksum
        self._followers = followers
        self._others = [rank for rank in end.plan.ranks(end.side) if rank != 0]
        """Other ranks with something to send or receive, of some cache group."""
        self._channels = RankChannels(end.plan, end.side, 0, end.pair_name, open_channel)
        self._lock = threading.Lock()
        self._closed = False
        self._is_breaking = False
        self._gone = threading.Event()
        """All ranks have closed their channels."""

    @property
    @override
    def name(self) -> str:
        """Names of the transports of rank 0's channels; each may choose for itself."""
        return "+".join(self._channels.names) or self._end.transport

    # ------------------------------------------------------------ open and close

    def open(self) -> None:
        """Form all channels of all ranks.

        Raises:
            TransportError: if a rank cannot; nothing is left then.
            OSError, RuntimeError: as `open_channel` does.
        """
        end = self._end
        errors: list[str] = []
        answered = threading.Event()

        def over(ok: bool, error: str, _: list[Checksums]) -> None:
            if not ok:
                errors.append(error)
            answered.set()

        others = AllOf(len(self._others), over, ignore_posted, ignore_posted)
        command = OpenPair(
            call=0,
            pair_name=end.pair_name,
            side=end.side,
            peer=end.peer,
            transport=end.transport,
            store_address=end.store_address,
        )
        for index, rank in enumerate(self._others):
            self._followers.call(rank, command, _answer(others, index, rank))
        try:
            self._channels.open()
            if not answered.wait(OPEN_TIMEOUT_S):
                raise TransportError(f"the ranks did not form the pair {end.pair_name!r} in {OPEN_TIMEOUT_S:g} s")
            if errors:
                raise TransportError(f"could not form the pair {end.pair_name!r}: {errors[0]}")
        except BaseException:
            # A rank that does not answer would hold this up; the pair's failure is known without it.
            self._close_soon()
            raise

    @override
    def close(self) -> None:
        """Waits for the other ranks: their answer is the evidence that nothing writes to their part of a buffer any
        more. One that is lost counts as having answered, and ends the worker."""
        with self._lock:
            is_first, self._closed = not self._closed, True
        if is_first:
            others = AllOf(len(self._others), lambda *_: self._gone.set(), ignore_posted, ignore_posted)
            for index, rank in enumerate(self._others):
                command = ClosePair(call=0, pair_name=self._end.pair_name)
                self._followers.call(rank, command, _answer(others, index, rank))
        self._channels.close()
        self._gone.wait()

    def _break(self) -> None:
        """A rank failed: the others' bytes are of no use, and theirs might never come."""
        with self._lock:
            if self._closed or self._is_breaking:
                return
            self._is_breaking = True
        self._close_soon()

    def _close_soon(self) -> None:
        threading.Thread(target=self.close, name="kv-close", daemon=True).start()

    # ------------------------------------------------------------ bytes

    @override
    def of_group(self, group: int) -> PairTransport:
        return _GroupPayloads(self, group)

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        """`nbytes` of all ranks together."""
        self.send_of(0, buffer, nbytes, done)

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        """`nbytes` of all ranks together. `posted` mostly comes later, from another thread."""
        self.recv_of(0, buffer, nbytes, done, posted)

    def send_of(self, group: int, buffer: Buffer, nbytes: int, done: Done) -> None:
        """`send` a payload of a cache group."""
        moved = self._end.plan.groups[group]
        others = self._others_of(moved)
        whole = AllOf(1 + len(others), lambda ok, error, _: done(ok, error), ignore_posted, self._break)
        element_bytes = moved.element_bytes(nbytes)
        for index, rank in enumerate(others, start=1):
            command = SendPart(
                call=0,
                pair_name=self._end.pair_name,
                buffer=buffer.number,
                buffer_bytes=buffer.whole_bytes,
                group=group,
                element_bytes=element_bytes,
            )
            self._followers.call(rank, command, _answer(whole, index, rank))
        self._channels.send(self._local(buffer), group, element_bytes, _local_answer(whole))

    def recv_of(self, group: int, buffer: Buffer, nbytes: int, done: Received, posted: Posted) -> None:
        """`recv` a payload of a cache group."""
        moved = self._end.plan.groups[group]
        others = self._others_of(moved)

        def over(ok: bool, error: str, checksums: list[Checksums]) -> None:
            done(*self._received(moved, ok, error, dict(zip((0, *others), checksums, strict=True))))

        whole = AllOf(1 + len(others), over, posted, self._break)
        element_bytes = moved.element_bytes(nbytes)
        for index, rank in enumerate(others, start=1):
            command = ReceivePart(
                call=0,
                pair_name=self._end.pair_name,
                buffer=buffer.number,
                buffer_bytes=buffer.whole_bytes,
                group=group,
                element_bytes=element_bytes,
            )
            self._followers.call(rank, command, _answer(whole, index, rank), whole.one_posted)
        self._channels.receive(self._local(buffer), group, element_bytes, _local_answer(whole), whole.one_posted)

    def _received(self, moved: PairGroup, ok: bool, error: str, of_rank: dict[int, Checksums]) -> tuple[bool, str, int]:
        if not ok:
            return False, error, 0
        try:
            return True, "", self._checksum.combined(moved.in_order(self._end.side, of_rank))
        except ValueError as fault:
            logger.error("%s: %s", self._end.pair_name, fault)
            return False, str(fault), 0

    def _others_of(self, moved: PairGroup) -> list[int]:
        """The other ranks with something of a cache group. Rank 0's part, which may be empty, is number 0 of an
        operation, and theirs follow."""
        return [rank for rank in moved.ranks(self._end.side) if rank != 0]

    def _local(self, buffer: Buffer) -> Buffer:
        return buffer.local if self._followers.size > 1 else buffer


class _GroupPayloads(PairTransport):
    """A `GroupTransport` for the payloads of one cache group."""

    def __init__(self, whole: GroupTransport, group: int) -> None:
        self._whole = whole
        self._group = group

    @property
    @override
    def name(self) -> str:
        return self._whole.name

    @override
    def of_group(self, group: int) -> PairTransport:
        return self._whole.of_group(group)

    @override
    def send(self, buffer: Buffer, nbytes: int, done: Done) -> None:
        self._whole.send_of(self._group, buffer, nbytes, done)

    @override
    def recv(self, buffer: Buffer, nbytes: int, done: Received, posted: Posted = ignore_posted) -> None:
        self._whole.recv_of(self._group, buffer, nbytes, done, posted)

    @override
    def close(self) -> None:
        self._whole.close()


def _answer(whole: AllOf, index: int, rank: int) -> Reply:
    """What a follower's `Done` means for the operation."""

    def reply(done: rank_messages.Done) -> None:
        whole.one_over(index, done.ok, f"rank {rank}: {done.error}" if not done.ok else "", done.checksums)

    return reply


def _local_answer(whole: AllOf) -> Callable[[bool, str, Checksums], None]:
    return lambda ok, error, checksums: whole.one_over(0, ok, error, checksums)


class _OpenReply:
    """The answer to an `OpenPair`, by whoever is first: its thread, or the command to close."""

    def __init__(self, call: int, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._once = threading.Lock()

    def give(self, ok: bool, error: str = "") -> None:
        """Answer, unless that was done."""
        if self._once.acquire(blocking=False):
            self._reply(rank_messages.Done(call=self._call, ok=ok, error=error))


@dataclass(frozen=True, slots=True)
class _Pair:
    channels: RankChannels
    opened: _OpenReply


class ShardTransports(RankTransports):
    """The `RankTransports` of a follower.

    Args:
        host: the address that its channels are bound to, of its own node.
        layout: of the whole model.
        shape: of the worker.
        shard: which rank of it this is.
        staging: (number, bytes) -> this rank's part of that staging buffer, which has so many bytes with all ranks'.
        secret: the cluster's.
    """

    def __init__(
        self,
        host: str,
        layout: KvLayout,
        shape: ParallelShape,
        shard: Shard,
        staging: Callable[[int, int], Buffer],
        secret: ClusterSecret,
    ) -> None:
        self._host = host
        self._layout = layout
        self._shape = shape
        self._shard = shard
        self._staging = staging
        self._secret = secret
        self._lock = threading.Lock()
        self._pairs: dict[str, _Pair] = {}

    @override
    def handle(self, command: TransportCommand, reply: Reply, on_posted: Callable[[], None]) -> None:
        """Does not block: channels are formed and closed on threads of their own.

        Raises:
            ValueError: for a command that rank 0 must not give, such as more bytes than a staging buffer has.
        """
        match command:
            case OpenPair():
                self._open(command, reply)
            case SendPart():
                self._send(command, reply)
            case ReceivePart():
                self._receive(command, reply, on_posted)
            case ClosePair():
                self._close(command, reply)

    @override
    def close(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, {}
        for pair in pairs.values():
            pair.channels.close()
            pair.opened.give(False, CLOSED)

    # ------------------------------------------------------------ commands

    def _open(self, command: OpenPair, reply: Reply) -> None:
        own, side = self._shape, command.side
        plan = plan_pair(self._layout, *((own, command.peer) if side == "sender" else (command.peer, own)))
        connect = make_connector(command.transport, self._host, self._secret, side)
        channels = RankChannels(
            plan, side, self._shard.number, command.pair_name, lambda name: connect(name, command.store_address)
        )
        pair = _Pair(channels, _OpenReply(command.call, reply))
        with self._lock:
            if command.pair_name in self._pairs:
                raise ValueError(f"the pair {command.pair_name!r} was opened before")
            self._pairs[command.pair_name] = pair
        _on_thread("kv-open", lambda: self._form(command.pair_name, pair))

    def _form(self, pair_name: str, pair: _Pair) -> None:
        try:
            pair.channels.open()
        except (OSError, RuntimeError) as error:
            with self._lock:
                if self._pairs.get(pair_name) is pair:
                    del self._pairs[pair_name]
            pair.opened.give(False, str(error))
        else:
            pair.opened.give(True)

    def _send(self, command: SendPart, reply: Reply) -> None:
        done, pair = _part_done(command.call, reply), self._find(command.pair_name)
        if pair is None:
            done(False, CLOSED, ())
        else:
            part = self._staging(command.buffer, command.buffer_bytes)
            pair.channels.send(part, command.group, command.element_bytes, done)

    def _receive(self, command: ReceivePart, reply: Reply, on_posted: Posted) -> None:
        done, pair = _part_done(command.call, reply), self._find(command.pair_name)
        if pair is None:
            done(False, CLOSED, ())
        else:
            part = self._staging(command.buffer, command.buffer_bytes)
            pair.channels.receive(part, command.group, command.element_bytes, done, on_posted)

    def _close(self, command: ClosePair, reply: Reply) -> None:
        with self._lock:
            pair = self._pairs.pop(command.pair_name, None)

        def close() -> None:
            if pair is not None:
                pair.channels.close()
                pair.opened.give(False, CLOSED)
            reply(rank_messages.Done(call=command.call, ok=True))

        _on_thread("kv-close", close)

    def _find(self, pair_name: str) -> _Pair | None:
        with self._lock:
            return self._pairs.get(pair_name)


def _part_done(call: int, reply: Reply) -> Callable[[bool, str, Checksums], None]:
    def done(ok: bool, error: str, checksums: Checksums) -> None:
        reply(rank_messages.Done(call=call, ok=ok, error=error, checksums=checksums))

    return done


def _on_thread(name: str, function: Callable[[], Any]) -> None:
    threading.Thread(target=function, name=name, daemon=True).start()
