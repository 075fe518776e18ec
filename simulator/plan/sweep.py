"""TTFT, TPOT, throughput, price and energy over the batch size: what one worker can do at all, without any queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disagg.step_times.interface import StepTimes, decode_s, prefill_s

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
MILLION = 1e6
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One batch size, all sequences in the middle of their answers."""

    batch: int
    tpot_s: float
    tokens_per_s: float
    """Of the whole batch, decode only."""
    served_per_s: float
    """Requests that the worker completes when it also computes their prompts, one after the other."""
    output_tokens_per_s: float
    """The same in output tokens."""
    fits: bool
    """Whether their KV fits into memory."""
    price_per_million: float
    """Of output tokens, prompts included."""
    joules_per_million: float
    """At the full power of the board: an upper bound."""


def price_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """Of tokens that come at this rate from what costs so much."""
    return price_per_hour / HOUR_S / tokens_per_s * MILLION


def joules_per_million(power_w: float, tokens_per_s: float) -> float:
    """Of tokens that come at this rate from what takes so much power."""
    return power_w / tokens_per_s * MILLION


def batch_sweep(
    times: StepTimes,
    *,
    prompt_tokens: int,
    output_tokens: int,
    token_budget: int,
    kv_tokens: int,
    price_per_hour: float,
    power_w: float,
    batches: Sequence[int] = BATCHES,
) -> list[SweepRow]:
    """One row a batch; the last one is the first that does not fit into the memory. `price_per_hour` and `power_w` are
    those of the whole worker."""
    prompt_s = prefill_s(times, prompt_tokens, token_budget)
    rows = []
    for batch in batches:
        tpot_s = decode_s(times, batch, prompt_tokens + output_tokens / 2)
        # In the time of one answer `batch` requests are served, and their prompts are computed besides.
        cycle_s = tpot_s * output_tokens + batch * prompt_s
        served_per_s = batch / cycle_s
        fits = batch * (prompt_tokens + output_tokens) <= kv_tokens
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
