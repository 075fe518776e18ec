"""A model runner that computes nothing: steps take the time that a model of them says, and tokens are looked up.

The engine core plans on it as on any other. There is no KV: copies of it are counted, so that they can take time.
Staging memory made here is host memory, of tiers and of preempted sequences; that of pairs has length 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import repeat

import msgspec
import numpy as np
from typing_extensions import override

from disagg.engine.config import WorkerConfig
from disagg.engine.core.calibration import calibrate
from disagg.engine.plan import Buffer, ModelRunner, StepPlan, StepQueue, StepResult
from disagg.engine.request import Sequence
from disagg.proto.messages import ONE_RANK, KvLayout, ParallelShape, StepSample
from disagg.simulator.world.prompts import VOCAB_SIZE
from disagg.simulator.world.surroundings import Answers
from disagg.step_times.interface import StepTimes, StepWork


class TimedRunner(ModelRunner):
    """A `ModelRunner` whose steps take time and compute nothing."""

    fingerprint = "simulated"
    step_queue: StepQueue | None = None

    def __init__(
        self,
        times: StepTimes,
        answers: Answers,
        *,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        window_blocks: tuple[int, ...] = (),
        expert_share: float = 0.0,
    ) -> None:
        self._times = times
        self._answers = answers
        self.layout = layout
        self.num_blocks = num_blocks
        self.window_blocks = window_blocks
        self.expert_share = expert_share
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.num_copied_bytes = 0
        """Bytes of KV that were copied out of the cache or into it, from slots of pairs or into them."""
        self.num_host_bytes = 0
        """Bytes that were copied from host memory or into it."""
        self._memory: dict[int, Buffer] = {}
        """One memory for each size; nobody reads what is in it."""

    def _num_bytes(self, num_tokens: int, group: int) -> int:
        return num_tokens * self.layout.groups[group].bytes_per_token

    def timed(self, plan: StepPlan) -> StepSample:
        """The work of the step, with its predicted time."""
        _, tokens, attended, num_decodes, context = msgspec.structs.astuple(plan.measured(0.0))
        step_s = self._times.step_s(StepWork(tokens, attended, num_decodes, context, len(plan.prefills)))
        return StepSample(step_s * 1e3, tokens, attended, num_decodes, context)

    def timed_alike(self, plan: StepPlan, num_steps: int) -> Iterator[StepSample]:
        """The samples of `num_steps` steps from this one on, each with the next token of the same sequences."""
        num_decodes, context = len(plan.decodes), plan.measured(0.0).decode_context
        for _ in range(num_steps):
            step_s = self._times.step_s(StepWork(0, 0, num_decodes, context))
            yield StepSample(step_s * 1e3, 0, 0, num_decodes, context)
            context += num_decodes

    def rows(self, plan: StepPlan, num_steps: int) -> Iterator[list[int]]:
        """The tokens of `num_steps` steps from this one on, none of which is the last of its answer."""
        return repeat(self.run(plan).token_ids, num_steps)

    def num_left(self, sequence: Sequence) -> int:
        """Number of output tokens still to come."""
        return self._answers.num_tokens(sequence.spec.request_id) - sequence.num_output_tokens

    def calibrated(self, config: WorkerConfig) -> tuple[StepSample, ...]:
        """The steps that a worker would measure at its start."""
        clock = _Stopwatch(self)
        return calibrate(clock, config, lambda: clock.elapsed_s)

    @override
    def run(self, plan: StepPlan) -> StepResult:
        """Return the tokens that the step samples."""
        token = self._answers.token
        return StepResult(
            [
                token(entry.sequence.spec.request_id, entry.sequence.num_output_tokens)
                for entry in plan.entries
                if entry.samples
            ]
        )

    @override
    def new_staging(self, nbytes: int) -> Buffer:
        """Memory whose contents mean nothing; all of one size is the same."""
        if nbytes not in self._memory:
            self._memory[nbytes] = np.empty(nbytes, dtype=np.uint8)
        return self._memory[nbytes]

    @override
    def gather(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        out: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> int:
        """Count the bytes that are copied out of the cache."""
        self._count(self._num_bytes(end - start, group), out)
        return 0

    @override
    def scatter(
        self,
        block_table: Seq[int],
        start: int,
        end: int,
        data: Buffer,
        peer: ParallelShape = ONE_RANK,
        group: int = 0,
    ) -> None:
        """Count the bytes that are copied into the cache."""
        self._count(self._num_bytes(end - start, group), data)

    def _count(self, num_bytes: int, memory: Buffer) -> None:
        if len(memory):
            self.num_host_bytes += num_bytes
        else:
            self.num_copied_bytes += num_bytes


class _Stopwatch(TimedRunner):
    """Adds up the time of its steps."""

    def __init__(self, runner: TimedRunner) -> None:
        self.__dict__.update(runner.__dict__)
        self.elapsed_s = 0.0

    @override
    def run(self, plan: StepPlan) -> StepResult:
        """Run the step and add its predicted time."""
        self.elapsed_s += self.timed(plan).ms / 1e3
        return super().run(plan)
