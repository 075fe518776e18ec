"""Verdict on the records of a run: which requests met their limits, how long everything took, and whether the run is
valid.

Goodput is the rate of requests that met all of their limits. Attainment is their share of all requests that were due:
refused, failed and dropped ones missed every limit. A record is scored for any limits after the fact, so that one
recording serves a whole grid of them.

Quantiles interpolate linearly between the two closest ranks (R. Hyndman and Y. Fan, Sample Quantiles in Statistical
Packages, 1996, type 7, the default of numpy): of n sorted values x[0] .. x[n-1], with h = (n - 1) * p / 100, it is
x[floor(h)] plus the fraction of h times the step to the next value. They are taken over answers that came whole, so
that they must be read beside the counts of those that did not.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec

from disagg.loadtests.records import RequestRecord, Status

MAX_LATENESS_S = 0.005
"""Limit on the p99 lateness of a valid run, in seconds: beyond it the load was not the planned one."""

DEFAULT_MIN_ATTAINMENT = 0.9
"""Share of requests that must meet their limits for a rate to count as served."""

_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")

Limit = Annotated[float, msgspec.Meta(gt=0)]


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that one request must meet together; a limit of None is always met."""

    ttft_s: Limit | None = None
    """Limit on the time from due to the first token, in seconds."""
    tpot_s: Limit | None = None
    """Limit on the mean time per token after the first, in seconds. A request with one output token meets it."""

    def __post_init__(self) -> None:
        for field, limit in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{field}: expected a time above 0; got {limit}")

    def scaled(self, ttft: float = 1.0, tpot: float = 1.0) -> Slo:
        """The limits multiplied by these factors."""
        return Slo(
            ttft_s=None if self.ttft_s is None else self.ttft_s * ttft,
            tpot_s=None if self.tpot_s is None else self.tpot_s * tpot,
        )

    def __str__(self) -> str:
        parts = [
            f"{name} {limit * 1000:g} ms"
            for name, limit in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
            if limit is not None
        ]
        return ", ".join(parts) or "no limit"


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Quantiles of one latency, in seconds; all 0 if there are no values."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A reason why requests have no whole answer. Messages that differ in their numbers only are one reason."""

    status: Status
    text: str
    """Message of the first of these requests; empty where there is none."""
    count: int


@dataclass(frozen=True, kw_only=True)
class Score:
    """Score of one run for one pair of limits."""

    slo: Slo
    duration_s: float
    """Divisor of goodput, in seconds."""
    num_due: int
    """Number of all requests that were due: the denominator of every attainment."""
    num_ok: int
    num_refused: int
    num_failed: int
    """Number of requests that failed, or missed their deadline."""
    num_dropped: int
    """Number of requests that were not sent, because too many were in flight."""
    num_good: int
    """Number of requests that met both limits."""
    goodput_per_s: float
    ttft_attainment: float
    tpot_attainment: float
    attainment: float
    """Share of `num_due` that met both limits."""
    ttft: Quantiles
    tpot: Quantiles
    itl: Quantiles
    """Quantiles of every gap of every answer. Tokens of one message have gaps of 0."""
    e2e: Quantiles
    """Quantiles of the time from due to the end of the stream."""
    lateness: Quantiles
    output_tokens_per_s: float
    """Number of received output tokens, divided by the time from the first due request to the last token."""
    cached_share: float
    """Share of the prompt tokens of whole answers that were found in a cache."""
    reasons: tuple[Reason, ...]
    """Reasons of refused, failed and dropped requests, the most frequent first."""
    invalid_reasons: tuple[str, ...]
    """Reasons why the run is invalid; empty for a valid one."""

    @property
    def main_reason(self) -> str:
        """The most frequent reason of requests without a whole answer, such as `; 3 refused: MESSAGE`; empty without
        such requests."""
        return next((f"; {reason.count} {reason.status}: {reason.text}" for reason in self.reasons), "")

    @property
    def is_valid(self) -> bool:
        """Whether the generator was on time and every answer has the forced length."""
        return not self.invalid_reasons


# ---------------------------------------------------------------- one request


def meets_ttft(record: RequestRecord, slo: Slo) -> bool:
    """Whether the whole answer came, and its first token in time."""
    ttft_s = record.ttft_s
    return record.status == "ok" and ttft_s is not None and (slo.ttft_s is None or ttft_s <= slo.ttft_s)


def meets_tpot(record: RequestRecord, slo: Slo) -> bool:
    """Whether the whole answer came fast enough; an answer of one token always does."""
    tpot_s = record.tpot_s
    return record.status == "ok" and (slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s)


def meets(record: RequestRecord, slo: Slo) -> bool:
    """Whether a request counts as good."""
    return meets_ttft(record, slo) and meets_tpot(record, slo)


# ---------------------------------------------------------------- one run


def evaluate(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Score:
    """Evaluate a run.

    Args:
        records: one for each request that was due.
        slo: the limits.
        duration_s: duration that the arrivals stand for (`workload.Plan.window_s`).

    Raises:
        ValueError: without records, or for a duration that is not above 0.
    """
    if not records:
        raise ValueError("records: a score needs at least one request")
    if not 0 < duration_s < math.inf:
        raise ValueError(f"duration_s: expected a time above 0; got {duration_s}")
    statuses = Counter(record.status for record in records)
    num_good = sum(meets(record, slo) for record in records)
    ok = [record for record in records if record.status == "ok"]
    return Score(
        slo=slo,
        duration_s=duration_s,
        num_due=len(records),
        num_ok=statuses["ok"],
        num_refused=statuses["refused"],
        num_failed=statuses["failed"] + statuses["deadline"],
        num_dropped=statuses["dropped"],
        num_good=num_good,
        goodput_per_s=num_good / duration_s,
        ttft_attainment=sum(meets_ttft(record, slo) for record in records) / len(records),
        tpot_attainment=sum(meets_tpot(record, slo) for record in records) / len(records),
        attainment=num_good / len(records),
        ttft=quantiles(record.ttft_s for record in ok),
        tpot=quantiles(record.tpot_s for record in ok),
        itl=quantiles(after - before for record in ok for before, after in pairwise(record.token_times_s)),
        e2e=quantiles(record.end_s - record.due_s for record in ok if record.end_s is not None),
        lateness=quantiles(record.lateness_s for record in records),
        output_tokens_per_s=_output_tokens_per_s(records),
        cached_share=_share(sum(record.cached_tokens for record in ok), sum(record.num_prompt_tokens for record in ok)),
        reasons=tuple(reasons(records)),
        invalid_reasons=tuple(_invalid_reasons(records)),
    )


def reasons(records: Iterable[RequestRecord]) -> list[Reason]:
    """Reasons of the requests without a whole answer, the most frequent first."""
    found: dict[tuple[Status, str], list[str]] = {}
    for record in records:
        if record.status != "ok":
            found.setdefault((record.status, _NUMBER.sub("0", record.error)), []).append(record.error)
    by_kind = [Reason(status=status, text=texts[0], count=len(texts)) for (status, _), texts in found.items()]
    return sorted(by_kind, key=lambda reason: -reason.count)


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """Quantiles of the values that are not None, as the head of this file defines them."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Quantiles(count=0, p50=0.0, p90=0.0, p99=0.0, max=0.0)
    p50, p90, p99 = (quantile(ordered, percent) for percent in (50, 90, 99))
    return Quantiles(count=len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def quantile(ordered: Sequence[float], percent: float) -> float:
    """Quantile of at least one value in ascending order, with `percent` in [0, 100], as the head of this file defines
    it."""
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _output_tokens_per_s(records: Sequence[RequestRecord]) -> float:
    times = [record.token_times_s[-1] for record in records if record.token_times_s]
    if not times:
        return 0.0
    return _share(sum(len(record.token_times_s) for record in records), max(times) - min(r.due_s for r in records))


def _invalid_reasons(records: Sequence[RequestRecord]) -> list[str]:
    """Faults of the generator or the server that make the figures of a run meaningless."""
    reasons = []
    lateness_s = quantiles(record.lateness_s for record in records).p99
    if lateness_s > MAX_LATENESS_S:
        reasons.append(
            f"the generator was late: p99 {lateness_s * 1000:.1f} ms, at most {MAX_LATENESS_S * 1000:g} ms is allowed"
        )
    num_short = sum(record.status == "ok" and len(record.token_times_s) != record.max_tokens for record in records)
    if num_short:
        reasons.append(f"{num_short} answers do not have the forced number of tokens")
    if len({record.index for record in records}) != len(records):
        reasons.append("some requests have more than one record")
    return reasons


# ---------------------------------------------------------------- many limits


class Outcomes:
    """Latencies of one run, kept ready to be scored for many limits. Does not change after its construction."""

    def __init__(self, records: Sequence[RequestRecord], duration_s: float) -> None:
        """Raises `ValueError` as `evaluate` does."""
        self.overall = evaluate(records, Slo(), duration_s)
        """Score without any limit: every whole answer is good."""
        self._pairs = sorted(
            (record.ttft_s, record.tpot_s or 0.0)
            for record in records
            if record.status == "ok" and record.ttft_s is not None
        )

    def num_good(self, slo: Slo) -> int:
        """Number of requests that meet both limits, as `meets` defines it."""
        most_s = math.inf if slo.ttft_s is None else slo.ttft_s
        in_time = self._pairs[: bisect_right(self._pairs, (most_s, math.inf))]
        return len(in_time) if slo.tpot_s is None else sum(tpot_s <= slo.tpot_s for _, tpot_s in in_time)

    def attainment(self, slo: Slo) -> float:
        """Share of the due requests that meet both limits."""
        return self.num_good(slo) / self.overall.num_due

    def goodput_per_s(self, slo: Slo) -> float:
        """Good requests per second."""
        return self.num_good(slo) / self.overall.duration_s


def slo_grid(base: Slo, ttft_scales: Sequence[float], tpot_scales: Sequence[float]) -> list[Slo]:
    """Every combination of scaled limits, TTFT outermost."""
    return [base.scaled(ttft, tpot) for ttft in ttft_scales for tpot in tpot_scales]
