"""Statistics: histograms, running means, counts in a sliding window, and the router's own sums.

Plain numbers without a clock; each object is owned by the one that observes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    "migration",
    "detokenize",
)
"""The stages of a request, see `telemetry/spans.py`."""
MIGRATION_OUTCOMES = ("moved", "refused", "failed", "ended")
"""Outcomes of a move of a running sequence; `ended` is that of a move whose attempt ended before."""
PREDICTIONS = ("ttft", "tpot", "transfer")
"""Predictions of a placement that are compared with measurements."""

TTFT_BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0)
ITL_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
E2E_BOUNDS_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
STAGE_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
TOKEN_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 50000.0)
RATIO_BOUNDS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
_MEMORY = 64
"""About the number of latest values that the mean is taken of."""


class Histogram:
    """A histogram as Prometheus defines it, cheap enough for every token.

    Args:
        bounds: upper ends of the intervals, rising; each belongs to its interval, and one more has no upper end.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Number of values in each interval."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        """Observe a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def num_observed(self) -> int:
        """Number of values so far."""
        return sum(self.counts)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """The sum of histograms, of which there must be at least one. They must have the same intervals."""
    first, *others = histograms
    result = Histogram(first.bounds)
    for histogram in (first, *others):
        assert histogram.bounds == result.bounds, "histograms of different intervals cannot be added"
        result.counts = [a + b for a, b in zip(result.counts, histogram.counts, strict=True)]
        result.total += histogram.total
    return result


class SlidingWindowCounter:
    """Counts of events by name over the last seconds, kept for each second.

    Args:
        span_s: how many seconds are kept, the present one included.
    """

    def __init__(self, span_s: int) -> None:
        self._span_s = span_s
        self._seconds: deque[tuple[int, Counter[str]]] = deque()
        self._second = -1
        self._counts: Counter[str] = Counter()
        """Counts of the second `_second`, the latest one with an event."""

    def add(self, now: float, name: str, times: int = 1) -> None:
        """Count an event `times` times. `now` never falls."""
        second = int(now)
        if second != self._second:
            self._forget(second)
            self._second, self._counts = second, Counter()
            self._seconds.append((second, self._counts))
        self._counts[name] += times

    def totals(self, now: float, within_s: int | None = None) -> Counter[str]:
        """The number of each event in the last `within_s` seconds (default: in all that are kept), including the
        present one, which is not over."""
        self._forget(int(now))
        first = int(now) - (within_s or self._span_s)
        total: Counter[str] = Counter()
        for second, counts in self._seconds:
            if second > first:
                total += counts
        return total

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._span_s:
            self._seconds.popleft()


class RunningMean:
    """The mean of roughly the latest values.

    Args:
        prior: the mean before there is any value.
        weight: as how many values it counts then; 0 or 1.
    """

    def __init__(self, prior: float, weight: int = 1) -> None:
        self.value = float(prior)
        self._num_seen = weight

    def observe(self, value: float) -> None:
        """Add a value to the mean."""
        if self._num_seen < _MEMORY:
            self._num_seen += 1
        self.value += (value - self.value) / self._num_seen


class Rates(NamedTuple):
    """Rates over the last ten seconds."""

    requests_per_s: float = 0.0
    """Ended requests per second."""
    output_tokens_per_s: float = 0.0


@dataclass(slots=True)
class TenantUsage:
    """The requests and tokens of one tenant."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of ended requests by outcome: `stop`, `length`, or the code of an error."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that were placed, whatever their outcome."""
    output_tokens: int = 0
    """Output tokens of all requests that were given to the gateway."""
    refused: Counter[str] = field(default_factory=Counter)
    """Number of calls and requests that one of its limits refused, by limit."""


@dataclass(slots=True, kw_only=True)
class RouterStats:
    """Sums over all requests of a router since it began: what its metrics show. Times in seconds.

    Owner: the router's telemetry; metrics read them.
    """

    ttft: dict[str, Histogram] = field(default_factory=lambda: {path: Histogram(TTFT_BOUNDS_S) for path in PATHS})
    """Seconds from arrival to the first token, by path."""
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    """Seconds between two tokens; 0 for tokens that came together."""
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    """Seconds from arrival to the end of an answer."""
    queue_time: Histogram = field(default_factory=lambda: Histogram(STAGE_BOUNDS_S))
    """Seconds for which an answered request waited before its prompt was computed: in the router's queue, for room on
    the decode worker, and in the prefill worker."""
    prefill_time: Histogram = field(default_factory=lambda: Histogram(STAGE_BOUNDS_S))
    """Seconds for which the prompt of an answered request was computed."""
    decode_time: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS_S))
    """Seconds from the first to the last token of an answered request."""
    stages: dict[str, Histogram] = field(
        default_factory=lambda: {stage: Histogram(STAGE_BOUNDS_S) for stage in SPAN_STAGES}
    )
    prediction_ratio: dict[str, Histogram] = field(
        default_factory=lambda: {what: Histogram(RATIO_BOUNDS) for what in PREDICTIONS}
    )
    """Measured over predicted times of answered requests with one attempt."""
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    """Prompt tokens of each answered request."""
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    """Output tokens of each answered request."""
    cached_tokens: int = 0
    """Prompt tokens of answered requests that no worker had to compute."""
    num_output_tokens: int = 0
    """Tokens given to the gateway, including those of requests that failed or were stopped by a string."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of ended requests by outcome: `stop`, `length`, or the code of an error."""
    slos: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """(target, whether it was met) -> requests that had it."""
    decisions: Counter[str] = field(default_factory=Counter)
    """Number of placement decisions, by reason."""
    tenants: dict[str, TenantUsage] = field(default_factory=dict)
    """Usage of each tenant, by its name."""
    migrations: Counter[str] = field(default_factory=Counter)
    """Number of moves of running sequences, by outcome."""
    migration_pause: Histogram = field(default_factory=lambda: Histogram(ITL_BOUNDS_S))
    """Seconds from the last token of one worker to the first of the other, for sequences that moved."""
    num_decodes_changes: int = 0
    """Number of changes of the setting where answers decode (`RouterConfig.decodes`)."""
