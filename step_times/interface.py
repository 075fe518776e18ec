"""The time models of the simulator and the planner: step times and link times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from disagg.step_times.pipeline import Pipeline

MAX_CHUNKS = 32
"""Number of chunks of a prompt up to which the time of each is computed separately."""


class StepWork(NamedTuple):
    """What one engine step computes; counts as in `proto.messages.StepSample`."""

    prefill_tokens: int
    """Number of prompt tokens that the step computes."""
    prefill_attended: int
    """Query-key pairs of these prompt tokens: the sum over them of the tokens that each one attends to."""
    num_decodes: int
    """Sequences that get one token each."""
    decode_context: int
    """The sum over these sequences of the tokens that each one attends to."""
    num_prefills: int = 0
    """Sequences that the prompt tokens belong to."""


class StepTimes(Protocol):
    """The time model of one worker."""

    def step_s(self, work: StepWork) -> float:
        """Seconds of one engine step; above 0."""
        ...


@runtime_checkable
class StagedTimes(StepTimes, Protocol):
    """The time model of a worker of several stages (pipeline parallelism). `step_s` is that of a step which passes all
    of them while no other one is under way."""

    num_stages: int

    def stages_s(self, work: StepWork) -> tuple[float, ...]:
        """Seconds that each stage takes for one step, with what it sends to the next one."""
        ...


@dataclass(frozen=True)
class BusyTimes:
    """The time by which a step without decodes delays the next one: all of it, or, on a worker of several stages, what
    its slowest stage takes."""

    times: StepTimes

    def step_s(self, work: StepWork) -> float:
        """Seconds of the slowest stage; of the whole step where decodes are in it, which only runs alone."""
        if isinstance(self.times, StagedTimes) and not work.num_decodes:
            return max(self.times.stages_s(work))
        return self.times.step_s(work)


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """A link that KV travels over: n bytes take `latency_s + n / bandwidth_bytes_per_s`."""

    bandwidth_bytes_per_s: float
    latency_s: float


def prefill_s(times: StepTimes, tokens: int, token_budget: int, before: int = 0) -> float:
    """Seconds to compute a prompt alone, in chunks of at most `token_budget`, behind `before` cached tokens. On a
    worker of several stages a chunk begins when the one before it has left the first stage."""
    if not isinstance(times, StagedTimes):
        return chunks_s(times, tokens, token_budget, before)
    pipeline = Pipeline(times.num_stages)
    for number, size, attended in _chunks(tokens, token_budget, before):
        pipeline.launch_equal(times.stages_s(StepWork(size, attended, 0, 0, 1)), number)
    return pipeline.ended


def busy_s(times: StepTimes, tokens: int, token_budget: int, before: int = 0) -> float:
    """Seconds by which a prompt in chunks of at most `token_budget` delays the prompts behind it."""
    return chunks_s(BusyTimes(times), tokens, token_budget, before)


def chunks_s(
    times: StepTimes, tokens: int, chunk: int, before: int = 0, num_decodes: int = 0, decode_context: int = 0
) -> float:
    """Seconds of the steps that compute a prompt in chunks of at most `chunk` tokens, behind `before` cached ones, each
    beside these decodes, one after the other."""
    return sum(
        [
            number * times.step_s(StepWork(size, attended, num_decodes, decode_context, 1))
            for number, size, attended in _chunks(tokens, chunk, before)
        ]
    )


def _chunks(tokens: int, chunk: int, before: int) -> Iterator[tuple[int, int, int]]:
    """Number, tokens and query-key pairs of the chunks of a prompt.

    Steps of a full chunk differ only in how much it attends to. Of more than `MAX_CHUNKS` of them several in a row
    count as so many of their mean, which is exact where the time is linear in that: both numbers are a user's, and a
    chunk may be of one token.
    """
    num_full, rest = divmod(tokens, chunk)
    num_each = -(-num_full // MAX_CHUNKS)
    first = 0
    while first < num_full:
        number = min(num_each, num_full - first)
        yield number, chunk, (chunk * (2 * before + chunk * (2 * first + number - 1)) + chunk * (chunk + 1)) // 2
        first += number
    if rest:
        yield 1, rest, rest * (before + tokens - rest) + rest * (rest + 1) // 2


def decode_s(times: StepTimes, batch: int, context: float) -> float:
    """Seconds of a step of `batch` sequences that attend to `context` tokens each."""
    return times.step_s(StepWork(0, 0, batch, round(batch * context)))
