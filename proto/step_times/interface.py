"""What the simulator and the planner need to know of time: how long a step takes, and what a link carries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """What one engine step computes; counts as in `proto.messages.StepSample`."""

    prefill_tokens: int
    """Prompt tokens computed."""
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
    seconds, done = 0.0, before
    end = before + tokens
    while done < end:
        chunk = min(token_budget, end - done)
        seconds += times.step_s(StepWork(chunk, chunk * done + chunk * (chunk + 1) // 2, 0, 0, 1))
        done += chunk
    return seconds


def decode_s(times: StepTimes, batch: int, context: float) -> float:
    """Seconds of a step of `batch` sequences that attend to `context` tokens each."""
    return times.step_s(StepWork(0, 0, batch, round(batch * context)))
