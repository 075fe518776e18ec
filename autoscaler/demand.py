"""The arriving demand: requests per second, now and soon, and their lengths.

    arrivals in buckets, one a look ──> jump: the last 15 s, or 60 s, differ from before by more than chance ──> the
                                   │    earlier buckets are dropped
                                   └──> a line through the other buckets, five minutes at most: level now, and
                                        forecast; without a slope if that may be chance

Chance is measured by arrivals whose count in a bucket has a variance of `dispersion` times its mean (1 for a Poisson
process).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from disagg.autoscaler.queueing import Lengths, representative
from disagg.proto.autoscaling import LoadReport, RequestSample

HISTORY_S = 300.0
JUMPS_S = (15.0, 60.0)
"""Lengths in seconds of the latest interval that is compared with the time before, to find a jump."""
BEFORE_S = 4.0
"""Length of the time before that is compared, as a multiple of the interval."""
TREND_AFTER_S = 60.0
"""Seconds of history that a trend needs."""
_JUMP_DEVIATIONS = 3.5
_TREND_DEVIATIONS = 2.5
_MOST_GROWTH = 1.5
"""Largest ratio of a forecast to the level."""
RECENT_S = 60.0
"""Seconds for which a request's lengths count."""
NUM_KINDS = 24
MIN_SAMPLES = 16
"""Number of latest requests that count even if they are older than `RECENT_S`."""
KINDS_EVERY_S = 30.0
_MOST_CV = 0.25
"""Relative change of a mean length with which the kinds are replaced before `KINDS_EVERY_S` is over."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Number of arrivals between two decisions."""

    end_s: float
    seconds: float
    count: int


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A rate of arrivals in requests per second, with its error and forecast."""

    level: float
    error: float
    """Standard deviation of the level."""
    forecast: float
    """The rate at the horizon; the level where there is no upward trend."""


class Arrivals:
    """Counts the arrivals at all gateways together. Owner of the history."""

    def __init__(self) -> None:
        self._buckets: deque[Bucket] = deque()
        self._seen: dict[str, int] = {}
        self._at_s: float | None = None
        self.last_s = -math.inf
        """When a request last arrived."""

    def take(self, reports: Mapping[str, LoadReport], now: float) -> None:
        """Add the counts of all gateways. The first report of a new gateway counts nothing."""
        count = 0
        for name, report in reports.items():
            if (before := self._seen.get(name)) is not None:
                count += max(0, report.num_arrived - before)
        self._seen = {name: report.num_arrived for name, report in reports.items()}
        if count:
            self.last_s = now
        before_s, self._at_s = self._at_s, now
        if before_s is None or now <= before_s:
            return
        self._buckets.append(Bucket(now, now - before_s, count))
        while self._buckets[0].end_s <= now - HISTORY_S:
            self._buckets.popleft()
        self._drop_before_jump(now)

    def rate(self, now: float, horizon_s: float) -> Rate:
        """The present rate, and the forecast for `horizon_s` seconds from now."""
        seconds, count = _sums(self._buckets)
        if seconds <= 0.0:
            return Rate(level=0.0, error=0.0, forecast=0.0)
        mean, slope = count / seconds, self._slope(now)
        middle_s = (
            sum((now - bucket.end_s + bucket.seconds / 2.0) * bucket.seconds for bucket in self._buckets) / seconds
        )
        level = max(0.0, mean + slope * middle_s)
        # At its end a line is twice as uncertain as a mean.
        error = math.sqrt(self._dispersion() * max(mean, 1.0 / seconds) / seconds) * (2.0 if slope else 1.0)
        forecast = min(level + slope * horizon_s, _MOST_GROWTH * level)
        return Rate(level=level, error=error, forecast=max(level, forecast))

    # ------------------------------------------------------------ inside

    def _drop_before_jump(self, now: float) -> None:
        for jump_s in JUMPS_S:
            begin_s = now - jump_s
            recent = [bucket for bucket in self._buckets if bucket.end_s > begin_s]
            before = [bucket for bucket in self._buckets if begin_s - BEFORE_S * jump_s < bucket.end_s <= begin_s]
            seconds, seen = _sums(recent)
            before_s, count = _sums(before)
            if before_s < jump_s / 2.0 or seconds < jump_s / 2.0:
                continue
            expected = count / before_s * seconds
            share = 1.0 + seconds / before_s  # of the error of what is expected
            allowed = _JUMP_DEVIATIONS * math.sqrt(self._dispersion() * share * max(1.0, expected))
            if abs(seen - expected) > allowed:
                self._buckets = deque(recent)
                return

    def _dispersion(self) -> float:
        """Variance over mean of the counts, at least 1. From the differences of neighbours, which no trend changes."""
        counts = [bucket.count for bucket in self._buckets]
        if len(counts) < 8 or not any(counts):
            return 1.0
        differences = [(after - before) ** 2 for before, after in pairwise(counts)]
        # The median of squares, over that of a normal distribution: a jump does not show.
        usual = sorted(differences)[len(differences) // 2] / 2.0 / 0.455
        return max(1.0, usual * len(counts) / sum(counts))

    def _slope(self, now: float) -> float:
        """Change of the rate per second, in requests per second; 0 where it may be chance."""
        points = [(bucket.end_s - bucket.seconds / 2.0 - now, bucket.seconds, bucket.count) for bucket in self._buckets]
        span_s = sum(seconds for _, seconds, _ in points)
        if span_s < TREND_AFTER_S or len(points) < 4:
            return 0.0
        middle = sum(at * seconds for at, seconds, _ in points) / span_s
        rate = sum(count for *_, count in points) / span_s
        spread = sum(seconds * (at - middle) ** 2 for at, seconds, _ in points)
        slope = sum((at - middle) * (count - rate * seconds) for at, seconds, count in points) / spread
        error = math.sqrt(self._dispersion() * max(rate, 1.0 / span_s) / spread)
        return slope if abs(slope) > _TREND_DEVIATIONS * error else 0.0


def _sums(buckets: Iterable[Bucket]) -> tuple[float, int]:
    """The total duration in seconds of some buckets, and the arrivals in them."""
    chosen = list(buckets)
    return sum(bucket.seconds for bucket in chosen), sum(bucket.count for bucket in chosen)


class Kinds:
    """Lengths and targets of the latest requests. They are replaced rarely, so that estimates can be kept."""

    def __init__(self) -> None:
        self.kinds: tuple[Lengths, ...] = ()
        self._at_s = -math.inf
        self._means = (0.0, 0.0)

    def take(self, reports: Mapping[str, LoadReport], now: float) -> bool:
        """Take the latest requests of all gateways. Returns whether the kinds have changed."""
        samples = sorted((sample for report in reports.values() for sample in report.requests), key=_age_s)
        samples = [sample for at, sample in enumerate(samples) if at < MIN_SAMPLES or sample.age_s <= RECENT_S]
        if not samples:
            return False
        output = mean_output(samples)
        means = (sum(sample.prompt_tokens for sample in samples) / len(samples), output or 0.0)
        is_same = all(abs(a - b) <= _MOST_CV * b for a, b in zip(means, self._means, strict=True))
        if is_same and now < self._at_s + KINDS_EVERY_S:
            return False
        found = representative((lengths_of(sample, output) for sample in samples), NUM_KINDS)
        self._at_s, self._means = now, means
        if found == self.kinds:
            return False
        self.kinds = found
        return True


def _age_s(sample: RequestSample) -> float:
    return sample.age_s


def mean_output(samples: Iterable[RequestSample]) -> float | None:
    """The mean length of whole answers; None without any."""
    whole = [sample.output_tokens for sample in samples if sample.output_tokens is not None]
    return sum(whole) / len(whole) if whole else None


def lengths_of(sample: RequestSample, usual: float | None) -> Lengths:
    """The lengths of one request. An answer of unknown length has the length `usual`, or the most that it may have."""
    output = sample.output_tokens
    if output is None:
        output = sample.max_tokens if usual is None else min(round(usual), sample.max_tokens)
    prompt = max(1, sample.prompt_tokens)
    return Lengths(
        prompt,
        max(1, output),
        min(sample.cached_tokens, prompt - 1),
        math.inf if sample.ttft_s is None else sample.ttft_s,
        math.inf if sample.tpot_s is None else sample.tpot_s,
    )
