"""Rank 0 of a worker: a `ModelRunner` over all ranks.

    run      the batch as arrays ──> `Step` to all; they meet inside the layers, and rank 0 samples
             with stages, steps of prompts are queued: `stage_queue.py`
    gather   `GatherPart` to those that send something, the own part, then all answers: `start_gather` of a worker with
             stages leaves it to another thread to wait for them
    scatter  `ScatterPart` to those that receive something, the own part, then all answers: the staging slot is used
             again afterwards

A step that fails on rank 0 leaves the others inside it, and a copy that fails on another rank means that the ranks are
no longer consistent. Both end the worker (`on_fault`), besides failing the caller.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
from typing_extensions import override

from disagg.engine.adapters.folder import AdapterError
from disagg.engine.parallel.adapters import rank_fault
from disagg.engine.parallel.followers import RankLostError
from disagg.engine.parallel.interfaces import Followers, ShardRunner
from disagg.engine.parallel.stage_queue import StageQueue
from disagg.engine.parallel.staging import GroupBuffer, own_part
from disagg.engine.plan import Copying, LoadedAdapter, ModelRunner, StepPlan, StepQueue, StepResult
from disagg.engine.rank_messages import (
    Capture,
    ClearBuffer,
    Done,
    DropCaptures,
    FreeBuffer,
    GatherPart,
    PutAdapter,
    RankCall,
    ReadAdapter,
    ScatterPart,
    StateBuffers,
    encode_step,
)
from disagg.engine.sharding.kv_routes import PairGroup, plan_pair
from disagg.proto.messages import ONE_RANK, Adapter, BufferSize, ParallelShape

_CopyCommand = TypeVar("_CopyCommand", GatherPart, ScatterPart)

logger = logging.getLogger(__name__)

CAPTURE_TIMEOUT_S = 300.0
"""Kernels are compiled in the first one."""
COPY_TIMEOUT_S = 600.0
"""How long a follower may take for one copy, which may be behind several steps: as `OPERATION_TIMEOUT_S` of
`runner/collectives.py`, beyond what any takes. One that hangs is known long before, by the length of the turn or of the
wait for the copy (`recovery.stuck_after_s`)."""
READ_TIMEOUT_S = 60.0
"""How long a follower may take to read an adapter, or to state its buffers; it may be in the middle of a step."""


class GroupRunner(ModelRunner):
    """A `ModelRunner` over all ranks. `local` is rank 0's, joined already; it has as many blocks as every other rank.
    Steps of prompts are queued where there are stages, others never: ranks exchange tensors inside the layers."""

    def __init__(self, local: ShardRunner, followers: Followers, on_fault: Callable[[BaseException], None]) -> None:
        self._local = local
        self._followers = followers
        self._on_fault = on_fault
        self.layout = local.layout
        self.num_blocks, self.window_blocks = local.num_blocks, local.window_blocks
        self.block_size = local.block_size
        self.max_model_len = local.max_model_len
        self.vocab_size = local.vocab_size
        self.fingerprint = local.fingerprint
        self.arithmetic = local.arithmetic
        self.expert_share = local.expert_share
        self.shape = local.shape
        self.warm_up = local.warm_up
        self.checksum = local.checksum
        self._step_queue: StageQueue | None = None
        if local.shard.stages > 1:
            self._step_queue = StageQueue(local, followers, on_fault, self._broadcast_freed)
        self._numbers = itertools.count(1)
        self._freed: deque[int] = deque()
        """Buffers that the others need not keep. Filled by the garbage collector, which may run anywhere: it takes no
        lock and writes to no connection."""

    @property
    @override
    def buffers(self) -> tuple[BufferSize, ...]:
        """Each with the size on the rank where it is largest. Asks a rank of each other stage, and waits for it; those
        of one stage have as much.

        Raises:
            RankLostError: one does not answer, or is lost.
        """
        shard = self._local.shard
        ranks = list(range(shard.size, shard.num_ranks, shard.size))
        answers = _Answers(ranks)
        for rank in ranks:
            self._followers.call(rank, StateBuffers(call=0), answers.reply_of(rank))
        done = answers.wait(READ_TIMEOUT_S)
        if lost := [rank for rank in ranks if rank not in done or not done[rank].ok]:
            raise RankLostError(f"ranks {lost} do not say how large their buffers are")
        largest: dict[str, int] = {}
        for stated in (self._local.buffers, *(each.buffers for each in done.values())):
            for buffer in stated:
                largest[buffer.name] = max(buffer.num_bytes, largest.get(buffer.name, 0))
        return tuple(BufferSize(name, num_bytes) for name, num_bytes in largest.items())

    @property
    @override
    def expert_imbalance(self) -> tuple[float, ...]:
        """Of the layers of the first stage: each of its ranks counts the tokens of all experts."""
        return self._local.expert_imbalance

    @property
    @override
    def step_queue(self) -> StepQueue | None:
        """Of a worker with stages."""
        return self._step_queue

    @override
    def run(self, plan: StepPlan) -> StepResult:
        if not plan.entries:
            return StepResult([])
        self._broadcast_freed()
        arrays = self._local.arrays(plan)
        command = encode_step(arrays)
        try:
            self._followers.broadcast(command)
            return self._local.step(plan, arrays)
        except Exception as error:
            self._on_fault(error)
            raise

    @override
    def capture_steps(self) -> None:
        """One size after the other, each on all ranks, because exchanges are part of it. Where one rank fails, no rank
        keeps any.

        Raises:
            RankLostError: a follower does not answer, or is lost.
        """
        ranks = list(range(1, self._followers.size))
        for num_seqs in self._local.capture_sizes:
            answers = _Answers(ranks)
            for rank in ranks:
                self._followers.call(rank, Capture(call=0, num_seqs=num_seqs), answers.reply_of(rank))
            errors = {0: self._local.capture(num_seqs)}
            done = answers.wait(CAPTURE_TIMEOUT_S)
            if silent := [rank for rank in ranks if rank not in done]:
                raise RankLostError(f"ranks {silent} did not capture a step in {CAPTURE_TIMEOUT_S:.0f} s")
            errors |= {rank: each.error for rank, each in done.items()}
            if failed := {rank: error for rank, error in errors.items() if error}:
                text = "steps of %d rows cannot be captured on all ranks, computing op by op: %s"
                logger.warning(text, num_seqs, failed)
                self._local.drop_captures()
                self._followers.broadcast(DropCaptures())
                return

    # ------------------------------------------------------------ adapters

    @override
    def read_adapter(self, adapter: Adapter) -> LoadedAdapter:
        """Each rank reads its own part, all at a time."""
        ranks = list(range(1, self._followers.size))
        answers = _Answers(ranks)
        for rank in ranks:
            self._followers.call(rank, ReadAdapter(call=0, adapter=adapter), answers.reply_of(rank))
        loaded = self._local.read_adapter(adapter)
        done = answers.wait(READ_TIMEOUT_S)
        for rank in ranks:
            if rank not in done:
                raise AdapterError("missing", f"rank {rank} did not read it in {READ_TIMEOUT_S:.0f} s")
            if not done[rank].ok:
                raise rank_fault(rank, done[rank].error)
        return loaded

    @override
    def put_adapter(self, slot: int, loaded: LoadedAdapter) -> None:
        self._followers.broadcast(PutAdapter(slot=slot, fingerprint=loaded.fingerprint))
        self._local.put_adapter(slot, loaded)

    # ------------------------------------------------------------ staging

    @override
    def new_staging(self, nbytes: int) -> GroupBuffer:
        """May be called on any thread."""
        part = self._local.new_staging(own_part(self._local)(nbytes))
        buffer = GroupBuffer(next(self._numbers), part, nbytes, self._clear)
        weakref.finalize(buffer, self._freed.append, buffer.number).atexit = False
        return buffer

    def _clear(self, number: int, nbytes: int) -> None:
        self._followers.broadcast(ClearBuffer(buffer=number, buffer_bytes=nbytes))

    def _broadcast_freed(self) -> None:
        while self._freed:
            self._followers.broadcast(FreeBuffer(buffer=self._freed.popleft()))

    # ------------------------------------------------------------ copies

    @override
    def gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: GroupBuffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> int:
        """Checksums are combined in the order of the pair's slices.

        Raises:
            ValueError: the model cannot be divided into the shape `peer`, `out` is too small, or the table does not
                cover `end`.
            RankLostError: a follower could not do its part, or is lost.
        """
        copying = self._start_gather(block_table, start, end, out, peer, group)
        copying.wait()
        return copying.checksum()

    @override
    def start_gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: GroupBuffer,
        peer: ParallelShape = ONE_RANK,
        *,
        digests: bool = False,
        group: int = 0,
    ) -> Copying | int:
        """As `gather`. Of a worker with stages without waiting for the other ranks: they copy behind the steps that
        were launched before, and meanwhile this one launches others."""
        if self._step_queue is None:
            return self.gather(block_table, start, end, out, peer, group)
        return self._start_gather(block_table, start, end, out, peer, group)

    def _start_gather(
        self, block_table: Seq[int], start: int, end: int, out: GroupBuffer, peer: ParallelShape, group: int
    ) -> _RanksCopying:
        moved = plan_pair(self.layout, self.shape, peer).groups[group]
        command = self._command(GatherPart, moved, block_table, start, end, out, peer, group)
        return self._begin(
            moved.ranks("sender"),
            command,
            lambda: self._local.gather_part(block_table, start, end, out.local, peer, group),
            lambda checksums: self.checksum.combined(moved.in_order("sender", checksums)),
        )

    @override
    def scatter(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        data: GroupBuffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        """Each rank copies what it has of the group.

        Raises:
            ValueError: as `gather`.
            RankLostError: a follower could not do its part, or is lost.
        """
        moved = plan_pair(self.layout, peer, self.shape).groups[group]
        command = self._command(ScatterPart, moved, block_table, start, end, data, peer, group)

        def scatter_own() -> Seq[int]:
            self._local.scatter_part(block_table, start, end, data.local, peer, group)
            return ()

        self._begin(moved.ranks("receiver"), command, scatter_own).wait()

    def _command(
        self,
        kind: type[_CopyCommand],
        moved: PairGroup,
        block_table: Seq[int],
        start: int,
        end: int,
        buffer: GroupBuffer,
        peer: ParallelShape,
        group: int,
    ) -> _CopyCommand:
        """An error that every rank would find is raised before any command is sent: a copy that fails on a follower
        ends the worker, not one request."""
        nbytes = moved.token_bytes * (end - start)
        if buffer.nbytes < nbytes:
            raise ValueError(f"tokens [{start}, {end}) take {nbytes} bytes; the buffer has {buffer.nbytes}")
        if len(block_table) * self.block_size < end:
            raise ValueError(f"a table of {len(block_table)} blocks does not cover token {end - 1}")
        return kind(
            call=0,
            buffer=buffer.number,
            buffer_bytes=buffer.whole_bytes,
            block_table=np.array(block_table[: -(-end // self.block_size)], dtype="<i4").tobytes(),
            start=start,
            end=end,
            peer=peer,
            group=group,
        )

    def _begin(
        self,
        ranks: Seq[int],
        command: RankCall,
        own: Callable[[], Seq[int]],
        combined: Callable[[dict[int, Seq[int]]], int] = lambda checksums: 0,
    ) -> _RanksCopying:
        """Have `ranks` carry out `command`, rank 0, where it is one of them, by its `own` part, which is done then.
        `combined`: one checksum out of those of each rank. Raises when no rank copies any more, unless one is lost."""
        self._broadcast_freed()
        others = [rank for rank in ranks if rank != 0]
        answers = _Answers(others)
        for rank in others:
            self._followers.call(rank, command, answers.reply_of(rank))
        try:
            own_checksums = own() if 0 in ranks else ()
        except BaseException:
            self._wait(answers, others)
            raise
        return _RanksCopying(answers, lambda: {0: own_checksums} | self._wait(answers, others), combined)

    def _wait(self, answers: _Answers, ranks: list[int]) -> dict[int, Seq[int]]:
        done = answers.wait(COPY_TIMEOUT_S)
        silent = [f"rank {rank}: no answer in {COPY_TIMEOUT_S:.0f} s" for rank in ranks if rank not in done]
        failed = [f"rank {rank}: {each.error}" for rank, each in done.items() if not each.ok]
        if silent or failed:
            error = RankLostError(f"a copy between cache and staging failed on {'; '.join(silent + failed)}")
            self._on_fault(error)
            raise error
        return {rank: each.checksums for rank, each in done.items()}


class _Answers:
    """The answers to one command that several ranks were given."""

    def __init__(self, ranks: list[int]) -> None:
        self._changed = threading.Condition()
        self._missing = set(ranks)
        self._done: dict[int, Done] = {}

    def reply_of(self, rank: int) -> Callable[[Done], None]:
        def reply(done: Done) -> None:
            with self._changed:
                self._done[rank] = done
                self._missing.discard(rank)
                self._changed.notify()

        return reply

    @property
    def are_complete(self) -> bool:
        """Whether all have answered."""
        return not self._missing

    def wait(self, timeout_s: float) -> dict[int, Done]:
        """The answers; fewer than requested only after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing, timeout_s)
            return dict(self._done)


class _RanksCopying(Copying):
    """A copy that rank 0 has made, and the other ranks may have to make. `wait` is called once, on any thread, and
    raises `RankLostError` where one of them could not, or is lost."""

    def __init__(
        self,
        answers: _Answers,
        wait: Callable[[], dict[int, Seq[int]]],
        combined: Callable[[dict[int, Seq[int]]], int],
    ) -> None:
        self._answers = answers
        self._wait = wait
        self._combined = combined
        self._checksums: dict[int, Seq[int]] = {}

    @override
    def is_done(self) -> bool:
        return self._answers.are_complete

    @override
    def wait(self) -> None:
        self._checksums = self._wait()

    @override
    def checksum(self) -> int:
        return self._combined(self._checksums)
