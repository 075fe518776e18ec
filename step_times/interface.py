"""The time models of the simulator and the planner: step times and link times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """A link that KV travels over: n bytes take `latency_s + n / bandwidth_bytes_per_s`."""

    bandwidth_bytes_per_s: float
    latency_s: float


def prefill_s(times: StepTimes, tokens: int, token_budget: int, before: int = 0) -> float:
    """Seconds to compute a prompt alone, in chunks of at most `token_budget`, behind `before` cached tokens."""
    return chunks_s(times, tokens, token_budget, before)


def chunks_s(
    times: StepTimes, tokens: int, chunk: int, before: int = 0, num_decodes: int = 0, decode_context: int = 0
) -> float:
    """Seconds of the steps that compute a prompt in chunks of at most `chunk` tokens, behind `before` cached ones, each
    beside these decodes.

    Steps of a full chunk differ only in how much it attends to. Of more than `MAX_CHUNKS` of them several in a row
    count as so many of their mean, which is exact where the time is linear in that: both numbers are a user's, and a
    chunk may be of one token.
    """
    num_full, rest = divmod(tokens, chunk)
    num_each = -(-num_full // MAX_CHUNKS)
    seconds, first = 0.0, 0
    while first < num_full:
        count = min(num_each, num_full - first)
        attended = (chunk * (2 * before + chunk * (2 * first + count - 1)) + chunk * (chunk + 1)) // 2
        seconds += count * times.step_s(StepWork(chunk, attended, num_decodes, decode_context, 1))
        first += count
    if rest:
        attended = rest * (before + tokens - rest) + rest * (rest + 1) // 2
        seconds += times.step_s(StepWork(rest, attended, num_decodes, decode_context, 1))
    return seconds


def decode_s(times: StepTimes, batch: int, context: float) -> float:
    """Seconds of a step of `batch` sequences that attend to `context` tokens each."""
    return times.step_s(StepWork(0, 0, batch, round(batch * context)))
