"""Some measured steps at start-up, so that the router's cost model knows a worker before its first request.

    calibrate(runner) -> samples        before the engine exists: the runner's blocks are used, and hold nothing yet

Prompt chunks of several lengths, alone and behind a context, and, where the worker decodes, batches of several sizes
and contexts. Each step runs `REPEATS` times and the quickest counts: at start-up the others are disturbed by the start
of other processes. The deterministic runner has no time of its own worth measuring and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from disagg.engine.config import WorkerConfig
from disagg.engine.plan import ModelRunner, ScheduledSequence, StepPlan
from disagg.engine.request import Sequence, SequenceState
from disagg.proto.ids import GatewayId, RequestId
from disagg.proto.messages import Sampling, SequenceSpec, StepSample

PREFILLS = ((16, 0), (128, 0), (128, 384), (512, 0))
"""(tokens of the chunk, tokens before it)."""
DECODES = ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64))
"""(sequences, tokens of each)."""
LONGEST_LOCAL_PREFILL = 128
"""A decode worker computes short suffixes only."""
REPEATS = 2
LONG_CHUNK = 256
"""Chunks of this length and more run once: they take long, and their own length averages what disturbs them."""

Clock = Callable[[], float]


def calibrate(runner: ModelRunner, config: WorkerConfig, clock: Clock) -> tuple[StepSample, ...]:
    """Measure what fits into the runner's cache and the worker's limits; `clock` gives seconds.

    To be called before any sequence: the KV of the first blocks is overwritten.
    """
    if config.is_fake:
        return ()
    return tuple(_measure(runner, plan, clock) for plan in _plans(runner, config))


def _plans(runner: ModelRunner, config: WorkerConfig) -> Iterator[StepPlan]:
    longest = min(runner.max_model_len - 1, runner.num_blocks * runner.block_size)
    longest_chunk = min(config.token_budget, longest if "prefill" in config.roles else LONGEST_LOCAL_PREFILL)
    for num_tokens, start in PREFILLS:
        if num_tokens <= longest_chunk and start + num_tokens <= longest:
            sequence = _sequence(start + num_tokens, 0, runner.block_size)
            yield StepPlan(prefills=(ScheduledSequence(sequence, start, num_tokens, samples=True),))
    if "decode" not in config.roles:
        return
    for batch, num_tokens in DECODES:
        num_blocks = -(-num_tokens // runner.block_size)
        fits = batch * num_blocks <= runner.num_blocks and num_tokens <= longest
        if fits and batch <= min(config.max_num_seqs, config.token_budget):
            sequences = [_sequence(num_tokens, index * num_blocks, runner.block_size) for index in range(batch)]
            yield StepPlan(decodes=tuple(ScheduledSequence(s, num_tokens - 1, 1, samples=True) for s in sequences))


def _sequence(num_tokens: int, first_block: int, block_size: int) -> Sequence:
    """A greedy sequence of equal tokens, in consecutive blocks."""
    spec = SequenceSpec(
        request_id=RequestId("calibration"),
        attempt=0,
        gateway_id=GatewayId(""),
        prompt_token_ids=(0,) * num_tokens,
        sampling=Sampling(temperature=0.0, max_tokens=num_tokens),
    )
    table = list(range(first_block, first_block - (-num_tokens // block_size)))
    return Sequence(spec, SequenceState.RUNNING, token_ids=[0] * num_tokens, block_table=table)


def _measure(runner: ModelRunner, plan: StepPlan, clock: Clock) -> StepSample:
    quickest_s = float("inf")
    for _ in range(1 if plan.num_tokens >= LONG_CHUNK else REPEATS):
        started = clock()
        runner.run(plan)
        quickest_s = min(quickest_s, clock() - started)
    return plan.measured(quickest_s * 1e3)
