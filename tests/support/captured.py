"""Captured and queued steps where nothing captures: on a CPU, in a unit test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
from torch import Tensor

from disagg.engine.plan import QueuedStep, StepPlan, StepQueue, StepResult
from disagg.engine.runner.logits import sampled_logprobs
from disagg.engine.runner.model import device_draws, replay
from disagg.engine.runner.model.batch import Batch
from disagg.engine.runner.model.device_draws import DeviceDraws
from disagg.engine.runner.model.device_inputs import DeviceStepInputs
from disagg.engine.runner.model.replay import ReplayedDecoder
from disagg.engine.runner.model.step_queue import DeviceStepQueue
from disagg.engine.runner.sampler import Sampler, row_faults
from disagg.kernels.attention import OwnKernels
from disagg.kernels.ops import AttentionSpec, Filters
from tests.support.engine import VOCAB_SIZE
from tests.support.sampling import SampledRunner
from tests.support.stepping import make_sequence

CPU = torch.device("cpu")
MAX_NUM_SEQS = 32

T = TypeVar("T")


@dataclass(frozen=True)
class Again(Generic[T]):
    """A capture that calls what was captured."""

    run: Callable[[], T]

    def replay(self) -> T:
        return self.run()


class CallingCapturer:
    """Captures anything, of any dtype."""

    def capture(self, run: Callable[[], T]) -> tuple[T, Again[T]]:
        return run(), Again(run)

    def compute(self, run: Callable[[], T], kind: object) -> T:
        return run()


def draw_on_host(logits_RV: Tensor, vocab_size: int, filters: Filters) -> Tensor:
    """In place of the kernel: the engine's sampler, with the kernel's arguments."""
    columns = (
        filters.temperatures_R, filters.top_k_R, filters.top_p_R, filters.min_p_R, filters.seeds_R, filters.indices_R
    )  # fmt: skip
    drawn = []
    for row, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        temperature, top_k, top_p, min_p, seed, index = values
        rules = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
        sequence = make_sequence([0], [], **rules)
        sequence.token_ids += [0] * index
        drawn += Sampler(vocab_size).sample(logits_RV[row : row + 1], [sequence])
    return torch.tensor(drawn)


@contextmanager
def captured_steps() -> Iterator[None]:
    """Decode steps read where a GPU's do, and are captured and replayed as they are there."""
    with (
        mock.patch.object(replay, "StepInputs", DeviceStepInputs),
        mock.patch.object(replay, "capturer", return_value=CallingCapturer()),
        mock.patch.object(device_draws, "draw_rows", draw_on_host),
    ):
        yield


class CapturedRunner(SampledRunner):
    """Captured and queued steps of a decoder whose logits depend on a row's last token and its position, to the bit. To
    be made and used within `captured_steps`."""

    def __init__(self, num_blocks: int, *, ahead: bool) -> None:
        super().__init__(num_blocks)
        max_blocks = self.max_model_len // self.block_size
        decoder: Any = self
        self.attention = OwnKernels(
            AttentionSpec(
                device="cpu",
                dtype="float32",
                kv_dtype="float32",
                num_heads=1,
                num_kv_heads=1,
                head_dim=1,
                block_size=self.block_size,
                scale=1.0,
            )
        )
        self._replayed = ReplayedDecoder(decoder, self.vocab_size, MAX_NUM_SEQS, max_blocks, CPU)
        draws = DeviceDraws(MAX_NUM_SEQS, self.vocab_size, CPU)
        self._sampler = Sampler(self.vocab_size, draws)
        self.num_behind = 0
        """Steps that were queued behind one whose tokens were not known."""
        self._step_queue = DeviceStepQueue(self._replayed, self._batches, draws, CPU) if ahead else None
        if self._step_queue is not None:
            self._step_queue.enqueue = self._counting(self._step_queue.enqueue)  # type: ignore[method-assign]

    @property
    def step_queue(self) -> StepQueue | None:  # type: ignore[override]
        return self._step_queue

    def _counting(self, enqueue: Callable[[StepPlan, QueuedStep | None], QueuedStep]) -> Any:
        def counted(plan: StepPlan, after: QueuedStep | None) -> QueuedStep:
            self.num_behind += after is not None
            return enqueue(plan, after)

        return counted

    def forward(self, batch: Batch) -> Tensor:
        rows = slice(None) if batch.sample_rows is None else batch.sample_rows
        words_R = batch.token_ids_T[rows] * 31 + batch.positions_T[rows] * 7
        columns_RV = (torch.arange(VOCAB_SIZE)[None, :] - words_R[:, None]) % VOCAB_SIZE
        return self._rows[words_R % len(self._rows)].gather(1, columns_RV)

    def run(self, plan: StepPlan) -> StepResult:
        logits_SV, largest_S = self._replayed.forward(self._batches.arrays(plan))
        sequences = [entry.sequence for entry in plan.entries if entry.samples]
        tokens = self._sampler.sample(logits_SV, sequences, largest_S) if sequences else []
        logprobs = sampled_logprobs(logits_SV, self.vocab_size, sequences, tokens)
        return StepResult(tokens, logprobs, row_faults(logits_SV, self.vocab_size, tokens))
