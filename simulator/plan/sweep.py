"""TTFT, TPOT, throughput, price and energy over the batch size, for one worker without a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.step_times.interface import StepTimes, decode_s, prefill_s

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MILLION = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """The results of one batch size. All sequences are in the middle of their answers."""

    batch: int
    tpot_s: float
    tokens_per_s: float
    """Tokens per second of the whole batch, decode only."""
    served_per_s: float
    """Requests per second that the worker completes when it also computes their prompts, one after the other."""
    output_tokens_per_s: float
    """Output tokens per second of these requests."""
    fits: bool
    """Whether the KV of the whole batch fits into the memory."""
    price_per_million: float
    """Price of a million output tokens, including their prompts."""
    joules_per_million: float
    """Energy in joules of a million output tokens at the full power of the board: an upper bound."""


def price_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens at this rate and price per hour."""
    return price_per_hour / HOUR_S / tokens_per_s * MILLION


def joules_per_million(power_w: float, tokens_per_s: float) -> float:
    """Energy in joules of a million tokens at this rate and power."""
    return power_w / tokens_per_s * MILLION


def batch_sweep(
    times: StepTimes,
    *,
    prompt_tokens: int,
    output_tokens: int,
    token_budget: int,
    most_sequences: int,
    price_per_hour: float,
    power_w: float,
    batches: Sequence[int] = BATCHES,
) -> list[SweepRow]:
    """One row for each batch size; the last one is the first that does not fit into the memory, which holds
    `most_sequences` of these lengths. `price_per_hour` and `power_w` are those of the whole worker."""
    prompt_s = prefill_s(times, prompt_tokens, token_budget)
    rows = []
    for batch in batches:
        tpot_s = decode_s(times, batch, prompt_tokens + output_tokens / 2)
        # In the time of one answer `batch` requests are served, and their prompts are computed besides.
        cycle_s = tpot_s * output_tokens + batch * prompt_s
        served_per_s = batch / cycle_s
        fits = batch <= most_sequences
        rows.append(
            SweepRow(
                batch=batch,
                tpot_s=tpot_s,
                tokens_per_s=batch / tpot_s,
                served_per_s=served_per_s,
                output_tokens_per_s=served_per_s * output_tokens,
                fits=fits,
                price_per_million=price_per_million(price_per_hour, served_per_s * output_tokens),
                joules_per_million=joules_per_million(power_w, served_per_s * output_tokens),
            )
        )
        if not fits:
            break
    return rows
