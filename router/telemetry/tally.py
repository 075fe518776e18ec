"""Sums over all requests of a router since it began: what its metrics show. Plain numbers, no logic.

Owner: the router's journal, which writes them; whoever exposes them reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.router.telemetry.histogram import Histogram

PATHS = ("pd", "local", "colocated")
SPAN_STAGES = (
    "tokenize_queue",
    "tokenize",
    "route",
    "prefill_queue",
    "prefill",
    "kv_alloc_wait",
    "kv_transfer",
    "kv_transfer_exposed",
    "decode_queue",
    "decode",
    "detokenize",
)
"""The stages of a request's life, see `spans`."""
PREDICTIONS = ("ttft", "tpot", "transfer")
"""What a placement predicts and the request then shows."""

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0)
ITL_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
E2E_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
STAGE_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
TOKEN_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 50000.0)
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Rates(NamedTuple):
    """Over the last ten seconds."""

    requests_per_s: float = 0.0
    """That ended."""
    output_tokens_per_s: float = 0.0


@dataclass(slots=True)
class TenantUsage:
    """What one tenant took."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Its requests that ended: `stop`, `length`, or the code of an error."""
    prompt_tokens: int = 0
    """Of requests that were placed, however they ended."""
    output_tokens: int = 0
    """Given to the gateway, of all its requests."""
    refused: Counter[str] = field(default_factory=Counter)
    """Calls and requests that were refused because of one of its limits, by the limit."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """See the module docstring. Times in seconds."""

    ttft: dict[str, Histogram] = field(default_factory=lambda: {path: Histogram(TTFT_BOUNDS_S) for path in PATHS})
    """By path: from arrival to the first token."""
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    """Between two tokens; 0 for tokens that came together."""
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    """From arrival to the end of an answer."""
    stages: dict[str, Histogram] = field(
        default_factory=lambda: {stage: Histogram(STAGE_BOUNDS_S) for stage in SPAN_STAGES}
    )
    prediction_ratio: dict[str, Histogram] = field(
        default_factory=lambda: {what: Histogram(RATIO_BOUNDS) for what in PREDICTIONS}
    )
    """What was measured over what was predicted, of attempts that answered."""
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    """Of each answered request."""
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    """Of each answered request."""
    cached_tokens: int = 0
    """Prompt tokens of answered requests that nobody computed."""
    num_output_tokens: int = 0
    """Tokens given to the gateway, those of requests that failed or were stopped by a string included."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests that ended: `stop`, `length`, or the code of an error."""
    slos: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """(target, whether it was met) -> requests that had it."""
    decisions: Counter[str] = field(default_factory=Counter)
    """What the router decided, by reason."""
    tenants: dict[str, TenantUsage] = field(default_factory=dict)
    """By the name of the tenant."""
