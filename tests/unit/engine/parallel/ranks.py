"""The ranks of one worker as threads of this process.

with running_ranks(folder, 4) as ranks:           a runner for each rank, joined by a `ThreadCollective`
    logits = ranks.forward(plan)                  all ranks compute, rank 0 answers
with running_ranks(folder, 2, pp=2) as ranks:     two stages of two ranks
with running_group(folder, 4) as group:           the same behind rank 0's `GroupRunner`, for an engine core
    core = make_core(runner=group.runner)
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from disagg.engine.config import WorkerConfig
from disagg.engine.plan import StepPlan, StepQueue, StepResult
from disagg.engine.rank_messages import decode_step, encode_step
from disagg.engine.runner.collectives import Collective, Lane, Receiving
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.sharding.shards import Shard
from disagg.engine.speculation.proposer import Proposer
from tests.support.rank_connections import RankGroup, rank_group

T = TypeVar("T")
TIMEOUT_S = 20.0


class Exchange:
    """What the ranks put on the table; every exchange is two meetings: all have put, all have read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._slots: list[Tensor | None] = [None] * size

    def meet(self, rank: int, tensor: Tensor, read: Callable[[list[Tensor]], T]) -> T:
        """`read` of the tensors of all ranks, none of which changes meanwhile.

        Raises:
            RuntimeError: if a rank left, or does not come.
        """
        self._slots[rank] = tensor
        self._barrier.wait()
        result = read([slot for slot in self._slots if slot is not None])
        self._barrier.wait()
        return result

    def end(self) -> None:
        """Present and later waits fail."""
        self._barrier.abort()


class Links:
    """Tensors on their way between stages, which nobody copies before they are received."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sent: defaultdict[tuple[int, int, Lane], deque[Tensor]] = defaultdict(deque)
        self._is_over = False
        self.num_bytes: Counter[tuple[int, int, Lane]] = Counter()
        """By sender, receiver and lane."""

    def put(self, link: tuple[int, int, Lane], tensor: Tensor) -> None:
        """Send a tensor."""
        with self._changed:
            self._sent[link].append(tensor)
            self.num_bytes[link] += tensor.numel() * tensor.element_size()
            self._changed.notify_all()

    def take(self, link: tuple[int, int, Lane], tensor: Tensor) -> Tensor:
        """Receive the next tensor of a link into this one.

        Raises:
            RuntimeError: if a rank left, or nothing comes.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._sent[link] or self._is_over, TIMEOUT_S)
            if not self._sent[link]:
                raise RuntimeError(f"nothing came on {link}")
            sent = self._sent[link].popleft()
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype)
        return tensor.copy_(sent)

    def end(self) -> None:
        """Present and later waits fail."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class _ThreadReceive:
    def __init__(self, links: Links, link: tuple[int, int, Lane], tensor: Tensor) -> None:
        self._links, self._link, self._tensor = links, link, tensor

    def wait(self) -> Tensor:
        return self._links.take(self._link, self._tensor)


class ThreadCollective:
    """A `Collective` among threads of one process. Sums are in the order of ranks, in the tensors' dtype. `stage` and
    `stages` with `links` to other ones."""

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        *,
        captures: bool = False,
        stage: int = 0,
        stages: int = 1,
        links: Links | None = None,
    ) -> None:
        self.shard = Shard(rank, exchange.size, stage, stages)
        self.captures = captures
        self.num_reduced = 0
        self._exchange = exchange
        self._links = links or Links()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.num_reduced += 1
        return self._exchange.meet(self.shard.rank, tensor, _sum)

    def gather_columns(self, tensor_RC: Tensor) -> Tensor | None:
        gathered = self._exchange.meet(self.shard.rank, tensor_RC, lambda parts: torch.cat(parts, dim=1))
        return gathered if self.shard.rank == 0 else None

    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        self._links.put((self.shard.number, to, lane), tensor)

    def receive(self, tensor: Tensor, source: int, lane: Lane) -> Receiving:
        return _ThreadReceive(self._links, (source, self.shard.number, lane), tensor)

    def close(self) -> None:
        self._exchange.end()
        self._links.end()


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Ranks:
    """A worker's ranks, driven as one runner: the others get each step as the message that a process would get."""

    step_queue: StepQueue | None = None
    proposer: Proposer | None = None
    whole_prompts = False

    def __init__(
        self, runners: list[TorchModelRunner], collectives: list[ThreadCollective], pool: ThreadPoolExecutor
    ) -> None:
        self.runners = runners
        self.collectives = collectives
        self._pool = pool
        self.vocab_size = runners[0].vocab_size
        self.num_blocks, self.window_blocks = runners[0].num_blocks, runners[0].window_blocks
        self.block_size = runners[0].block_size
        self.max_model_len = runners[0].max_model_len
        self.warm_up = runners[0].warm_up
        self.layout = runners[0].layout
        self.shape, self.expert_share = runners[0].shape, runners[0].expert_share
        self.arithmetic, self.fingerprint = runners[0].arithmetic, runners[0].fingerprint
        self.proposer = runners[0].proposer

    def forward(self, plan: StepPlan) -> Tensor:
        """The logits, from rank 0."""
        return self._together(plan, lambda: self.runners[0].forward(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """Compute and sample, on rank 0."""
        return self._together(plan, lambda: self.runners[0].run(plan))

    def capture_steps(self) -> list[str]:
        """As rank 0 has all of them do; why each failed."""
        errors: list[str] = []
        for num_seqs in self.runners[0].capture_sizes:
            others = [self._pool.submit(runner.capture, num_seqs) for runner in self.runners[1:]]
            errors += [self.runners[0].capture(num_seqs), *(other.result(TIMEOUT_S) for other in others)]
        return errors

    def _together(self, plan: StepPlan, lead: Callable[[], T]) -> T:
        order = encode_step(self.runners[0].arrays(plan))
        others = [self._pool.submit(runner.compute, decode_step(order)) for runner in self.runners[1:]]
        result = lead()
        for other in others:
            other.result(TIMEOUT_S)
        return result


def _config(folder: Path, size: int, pp: int, **changes: Any) -> WorkerConfig:
    fields: dict[str, Any] = {"roles": ("prefill",), "dtype": "float32", "num_blocks": 64, **changes}
    return WorkerConfig(worker_id="test-0", model_path=str(folder), tp=size, pp=pp, **fields)


def _shards(size: int, pp: int) -> list[Shard]:
    return [Shard.of_number(number, size, pp) for number in range(size * pp)]


def _collectives(size: int, pp: int, *, captures: bool = False) -> list[ThreadCollective]:
    """Of all ranks, each stage with an exchange of its own."""
    exchanges, links = [Exchange(size) for _ in range(pp)], Links()
    return [
        ThreadCollective(
            exchanges[shard.stage], shard.rank, captures=captures, stage=shard.stage, stages=pp, links=links
        )
        for shard in _shards(size, pp)
    ]


@contextmanager
def running_ranks(folder: Path, size: int, *, pp: int = 1, captures: bool = False, **changes: Any) -> Iterator[Ranks]:
    """Runners in fp32 with 64 blocks of 16 tokens, `pp` stages of `size`; `changes` are fields of `WorkerConfig`."""
    config, collectives = _config(folder, size, pp, **changes), _collectives(size, pp, captures=captures)
    runners = [TorchModelRunner(config, shard) for shard in _shards(size, pp)]
    num_blocks = min(runner.num_blocks for runner in runners)
    for runner, collective in zip(runners, collectives, strict=True):
        runner.join(collective, num_blocks)
    with ThreadPoolExecutor(max_workers=size * pp) as pool:
        try:
            yield Ranks(runners, collectives, pool)
        finally:
            for collective in collectives:
                collective.close()


class ThreadRank(TorchModelRunner):
    """One of several ranks that are threads."""

    def __init__(self, config: WorkerConfig, shard: Shard, collective: ThreadCollective) -> None:
        super().__init__(config, shard)
        self._thread_collective = collective

    @override
    def join(self, collective: Collective | None, num_blocks: int) -> None:
        """The ranks exchange tensors as threads do, whatever processes would."""
        super().join(self._thread_collective, num_blocks)


@contextmanager
def running_group(folder: Path, size: int, *, pp: int = 1, **changes: Any) -> Iterator[RankGroup[ThreadRank]]:
    """The same runners; each follower is told what to do by messages, and has a thread of its own."""
    config, collectives = _config(folder, size, pp, **changes), _collectives(size, pp)
    runners = [
        ThreadRank(config, shard, collective) for shard, collective in zip(_shards(size, pp), collectives, strict=True)
    ]
    with rank_group(runners, min(runner.num_blocks for runner in runners)) as group:
        try:
            yield group
        finally:
            for collective in collectives:
                collective.close()
    assert group.faults == group.lost == []
