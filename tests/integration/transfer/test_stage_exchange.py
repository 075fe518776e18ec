"""Stages over gloo on the loopback interface: ranks as threads of this process, each with process groups of its own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from disagg.engine.config import WorkerConfig
from disagg.engine.io.rendezvous import RendezvousServer
from disagg.engine.plan import StepPlan
from disagg.engine.rank_messages import decode_step, encode_step
from disagg.engine.runner.collectives import GlooCollective, Lane
from disagg.engine.runner.model_runner import TorchModelRunner
from disagg.engine.sharding.shards import Shard
from tests.support.secret import SECRET
from tests.support.stepping import chunk, generate, make_runner, make_sequence
from tests.support.tiny_models import VOCAB_SIZE, make_checkpoint

HOST = "127.0.0.1"
WAIT_S = 60.0
HIDDEN = 64
PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB_SIZE for i in range(75)]
BLOCKS = [9, 2, 31, 0, 17, 5, 40]
T = TypeVar("T")


class CountingCollective(GlooCollective):
    """Counts the bytes that it sends, by receiver and lane."""

    def __init__(self, address: str, shard: Shard) -> None:
        super().__init__(address, SECRET, shard, HOST, operation_timeout_s=WAIT_S)
        self.num_bytes: Counter[tuple[int, Lane]] = Counter()

    @override
    def send(self, tensor: Tensor, to: int, lane: Lane) -> None:
        self.num_bytes[to, lane] += tensor.numel() * tensor.element_size()
        super().send(tensor, to, lane)


class StagedRanks:
    """The ranks of a worker; rank 0 is driven by the test, the others compute on threads."""

    def __init__(self, folder: Path, tp: int, pp: int, address: str, pool: ThreadPoolExecutor, dtype: str) -> None:
        shards = [Shard.of_number(number, tp, pp) for number in range(tp * pp)]
        options: dict[str, Any] = {"dtype": dtype, "num_blocks": 64, "tp": tp, "pp": pp}
        config = WorkerConfig(worker_id="test-0", roles=("prefill",), model_path=str(folder), **options)
        self._pool = pool
        self.runners = [TorchModelRunner(config, shard) for shard in shards]
        self.collectives = together(pool, [partial(CountingCollective, address, shard) for shard in shards])
        for runner, collective in zip(self.runners, self.collectives, strict=True):
            runner.join(collective, runner.num_blocks)
        self.vocab_size = self.runners[0].vocab_size

    def follow(self, plans: list[StepPlan]) -> list[Future[None]]:
        """Have the others compute these one after the other."""
        orders = [encode_step(self.runners[0].arrays(plan)) for plan in plans]

        def compute(runner: TorchModelRunner) -> None:
            for order in orders:
                runner.compute(decode_step(order))

        return [self._pool.submit(compute, runner) for runner in self.runners[1:]]

    def forward(self, plan: StepPlan) -> Tensor:
        others = self.follow([plan])
        logits = self.runners[0].forward(plan)
        for other in others:
            other.result(WAIT_S)
        return logits


def together(pool: ThreadPoolExecutor, makes: list[Callable[[], T]]) -> list[T]:
    return [each.result(WAIT_S) for each in [pool.submit(make) for make in makes]]


@contextlib.contextmanager
def staged(folder: Path, tp: int, pp: int, dtype: str = "bfloat16") -> Iterator[StagedRanks]:
    server = RendezvousServer(HOST, SECRET)
    with ThreadPoolExecutor(max_workers=tp * pp) as pool:
        ranks = StagedRanks(folder, tp, pp, server.address, pool, dtype)
        try:
            yield ranks
        finally:
            for collective in ranks.collectives:
                collective.close()
            server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama_four", tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 4)])
def test_tokens_are_those_of_one_process_and_rows_pass_once(folder: Path, tp: int, pp: int) -> None:
    """In bf16 one rank a stage gives the bits of one process. Two ranks add up in another order."""
    dtype = "bfloat16" if tp == 1 else "float32"
    whole, sequence = make_sequence(PROMPT, BLOCKS), make_sequence(PROMPT, BLOCKS)
    expected = generate(make_runner(folder, dtype=dtype), whole, 12, chunk_tokens=33)
    with staged(folder, tp, pp, dtype) as ranks:
        logits = generate(ranks, sequence, 12, chunk_tokens=33)
        sent = [collective.num_bytes for collective in ranks.collectives]
    assert sequence.token_ids == whole.token_ids
    if tp == 1:
        assert torch.equal(logits, expected)
    size, num_tokens = (2 if tp == 1 else 4), len(PROMPT) + 11
    for number, of_rank in enumerate(sent):
        if number < tp * (pp - 1):
            assert of_rank == {(number + tp, "rows"): num_tokens * HIDDEN * size}
        else:
            assert of_rank == {(0, "results"): 12 * VOCAB_SIZE // tp * size}


def test_steps_are_under_way_together(folder: Path) -> None:
    """Rank 0 takes no result before it has launched all, which are as many as there may be."""
    sequences = [
        make_sequence(PROMPT[start:], [10 * start, 10 * start + 1, 10 * start + 2, 6 + start])
        for start in (0, 1, 2, 3, 4)
    ]
    plans = [StepPlan(prefills=(chunk(sequence, 0, 50),)) for sequence in sequences]
    del sequences
    runner = make_runner(folder, dtype="bfloat16")
    with staged(folder, 1, 4) as ranks:
        others = ranks.follow(plans)
        first = ranks.runners[0]
        queued = [first.launch(plan, first.arrays(plan)) for plan in plans]
        assert [each.result() for each in queued] == [runner.run(plan) for plan in plans]
        for other in others:
            other.result(WAIT_S)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_stage_fails_the_step_at_once(folder: Path, lost: int) -> None:
    """Long before an operation's timeout: a connection shows it, to the neighbours and, by their end, to rank 0."""
    plan = StepPlan(prefills=(chunk(make_sequence(PROMPT, BLOCKS), 0, 75),))
    with staged(folder, 1, 3) as ranks:
        first = ranks.runners[0]
        arrays = first.arrays(plan)
        queued = first.launch(plan, arrays)
        ranks.collectives[lost].close()
        if lost == 1:
            with pytest.raises(RuntimeError):
                ranks.runners[2].compute(arrays)
            ranks.collectives[2].close()  # as the end of its process does
        with pytest.raises(RuntimeError):
            queued.result()
