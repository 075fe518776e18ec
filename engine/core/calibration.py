"""Some measured steps at start-up, so that the router's cost model is fitted before a worker's first request.

    calibrate(runner) -> samples        before the engine exists: the runner's blocks are used, and hold nothing yet

Prompt chunks of several lengths, alone and behind a context, and, where the worker decodes, batches of several sizes
and contexts. Short steps run several times and the quickest run counts: at start-up the others are disturbed by the
start of other processes. Where a step is computed by this process alone, its processor time counts: workers that start
at the same time take cores from each other, which has ended when they serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from disagg.engine.config import WorkerConfig
from disagg.engine.plan import ModelRunner, ScheduledSequence, StepPlan
from disagg.engine.request import dummy_sequence
from disagg.engine.sharding.kv_routes import plan_pair
from disagg.proto.messages import ONE_RANK, StepSample

LIMIT_S = 1.5
"""No step begins after this time: on a slow or busy machine the last ones, which take longest, are left out."""
PREFILLS = ((16, 0), (128, 0), (128, 384))
LAST_PREFILL = (512, 0)
"""(tokens of the chunk, tokens before it)."""
DECODES = ((1, 64), (1, 512), (8, 64), (8, 512), (32, 64))
"""(sequences, tokens of each)."""
LONGEST_LOCAL_PREFILL = 128
"""A decode worker computes short suffixes only."""
REPEATS = ((32, 4), (255, 2))
"""(tokens of a step, how often it runs at most that long); longer ones run once: they take long, and their own length
averages what disturbs them."""
MAX_DEVIATION = 1.2
"""Factor by which a step may take longer or shorter than it did, for earlier measurements to hold."""
CHECKED_DECODES = 8
TOKEN_STRIDE = 7919
"""Distance of the ids of two tokens of a step, a prime."""
CLEARED_TOKENS = 256
"""Tokens whose KV is written at once before the first measurement."""

Clock = Callable[[], float]


class _Clocks(NamedTuple):
    wall: Clock
    work: Clock
    end: float
    """Deadline of the measurements, on the clock `wall`."""


def calibrate(
    runner: ModelRunner,
    config: WorkerConfig,
    clock: Clock,
    known: Sequence[StepSample] = (),
    work_clock: Clock | None = None,
) -> tuple[StepSample, ...]:
    """Measure what fits into the runner's cache and the worker's limits; `clock` gives seconds.

    To be called before any sequence: the KV of the first blocks is overwritten.

    Args:
        known: what an earlier call returned, for a worker like this one on this machine. It is returned again where it
            has all steps and two short ones take as long as then.
        work_clock: by which steps are measured, such as the processor time of this thread; `clock` without.
    """
    plans = list(_plans(runner, config))
    clear_blocks(runner, plans)
    end = clock() + LIMIT_S
    clocks = _Clocks(clock, work_clock or clock, end)
    if known and is_complete(known, runner, config) and _holds(runner, plans, known, clocks):
        return tuple(known)
    return tuple(_measure(runner, plan, clocks) for plan in plans if clock() < end)


def is_complete(samples: Sequence[StepSample], runner: ModelRunner, config: WorkerConfig) -> bool:
    """Whether these are the measured steps of such a worker, all of them."""
    shapes = [plan.measured(0.0) for plan in _plans(runner, config)]
    return [structs.replace(sample, ms=0.0) for sample in samples] == shapes


def _holds(runner: ModelRunner, plans: Sequence[StepPlan], known: Sequence[StepSample], clocks: _Clocks) -> bool:
    """Whether the first step, and the longest one without a prompt that is short, take as long as they did."""
    decodes = [index for index, plan in enumerate(plans) if plan.num_tokens <= CHECKED_DECODES and not plan.prefills]
    for index in (0, *decodes[-1:]):
        ms = _measure(runner, plans[index], clocks).ms
        if not 1.0 / MAX_DEVIATION <= ms / max(known[index].ms, 1e-6) <= MAX_DEVIATION:
            return False
    return True


def _plans(runner: ModelRunner, config: WorkerConfig) -> Iterator[StepPlan]:
    for num_tokens, start in PREFILLS:
        yield from _prefill(runner, config, num_tokens, start)
    if "decode" in config.roles:
        for batch, num_tokens in DECODES:
            yield from _decode(runner, config, batch, num_tokens)
    yield from _prefill(runner, config, *LAST_PREFILL)


def _prefill(runner: ModelRunner, config: WorkerConfig, num_tokens: int, start: int) -> Iterator[StepPlan]:
    longest_chunk = config.token_budget if "prefill" in config.roles else LONGEST_LOCAL_PREFILL
    if num_tokens <= min(longest_chunk, config.token_budget) and start + num_tokens <= longest(runner):
        yield dummy_step(runner, prefill_tokens=num_tokens, start=start)


def _decode(runner: ModelRunner, config: WorkerConfig, batch: int, num_tokens: int) -> Iterator[StepPlan]:
    num_blocks = -(-num_tokens // runner.block_size)
    fits = batch * num_blocks <= runner.num_blocks and num_tokens <= longest(runner)
    if fits and batch <= min(config.max_num_seqs, config.token_budget):
        yield dummy_step(runner, num_decodes=batch, context=num_tokens)


def dummy_step(
    runner: ModelRunner, *, prefill_tokens: int = 0, start: int = 0, num_decodes: int = 0, context: int = 0
) -> StepPlan:
    """A step of sequences that serve no request, in the first blocks: `num_decodes` of `context` tokens each, the
    sampled one left out, and behind them one prompt's chunk of `prefill_tokens` after `start` others. Tokens of the
    step differ: rows of equal ones would all choose the same experts, and read a small part of the weights."""
    size = runner.block_size
    num_blocks = -(-context // size)
    sequences = [
        dummy_sequence(context, index * num_blocks, size, runner.window_blocks) for index in range(num_decodes)
    ]
    for number, sequence in enumerate(sequences):
        sequence.token_ids[-1] = _token_id(number, runner.vocab_size)
    decodes = tuple(ScheduledSequence(sequence, context - 1, 1, samples=True) for sequence in sequences)
    if prefill_tokens == 0:
        return StepPlan(decodes=decodes)
    prompt = dummy_sequence(start + prefill_tokens, num_decodes * num_blocks, size, runner.window_blocks)
    prompt.token_ids[start:] = [_token_id(num_decodes + number, runner.vocab_size) for number in range(prefill_tokens)]
    return StepPlan(decodes=decodes, prefills=(ScheduledSequence(prompt, start, prefill_tokens, samples=True),))


def _token_id(number: int, vocab_size: int) -> int:
    """The token of a row of a step, spread over the vocabulary."""
    return number * TOKEN_STRIDE % vocab_size


def longest(runner: ModelRunner) -> int:
    """Tokens of a sequence that leaves room for the one that it samples."""
    return min(runner.max_model_len - 1, runner.num_blocks * runner.block_size)


def _num_blocks_used(plan: StepPlan) -> int:
    return max(entry.sequence.block_table[-1] for entry in plan.entries) + 1


def clear_blocks(runner: ModelRunner, plans: Sequence[StepPlan]) -> None:
    """Write zeros as the KV of the blocks that these steps use. Old contents might be NaN, and memory
    that was never written may be faster to read than real KV."""
    num_blocks = max((_num_blocks_used(plan) for plan in plans), default=0)
    piece = -(-CLEARED_TOKENS // runner.block_size)
    groups = plan_pair(runner.layout, ONE_RANK, runner.shape).groups
    zeros = runner.new_staging(piece * runner.block_size * max([group.token_bytes for group in groups]))
    zeros[:] = 0
    for number, pool in enumerate((runner.num_blocks, *runner.window_blocks)):
        for first in range(0, min(num_blocks, pool), piece):
            table = range(first, min(first + piece, num_blocks, pool))
            runner.scatter(table, 0, len(table) * runner.block_size, zeros, group=number)


def _measure(runner: ModelRunner, plan: StepPlan, clocks: _Clocks) -> StepSample:
    num_repeats = next((repeats for limit, repeats in REPEATS if plan.num_tokens <= limit), 1)
    quickest_s, now = float("inf"), clocks.work()
    for repeat in range(num_repeats):
        if repeat > 0 and clocks.wall() >= clocks.end:
            break
        started = now
        runner.run(plan)
        now = clocks.work()
        quickest_s = min(quickest_s, now - started)
    return plan.measured(quickest_s * 1e3)
