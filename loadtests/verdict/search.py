"""The next rate to measure, the order of measurements, and the largest served rate according to them.

Three questions, each a pure function of what is known so far:

- `next_rate`: a sweep looks for the largest rate with enough attainment: doubling (or halving) until it is bracketed,
  then bisection. Everything measured so far is its only state, so that a stopped sweep can continue.
- `balanced_order`: a comparison measures all shapes of a cluster at all rates, forwards and backwards (A B B A), so
  that a machine that slowly warms up or slows down favours no shape.
- `served_rate`: attainment over rate, with its noise taken out, crosses the target at one rate.

Attainment falls as the rate grows, but a measured one may rise again by chance. Before anything is decided, the
measurements are replaced by the non-increasing sequence nearest to them in weighted least squares (isotonic regression
by pooling adjacent violators: M. Ayer et al., 1955; the weights are numbers of requests). Points that contradict each
other thus share their weighted mean: a lucky one cannot pull the answer up alone, an unlucky one not down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Attainment measured at one rate."""

    rate_per_s: float
    attainment: float
    num_requests: int


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Options of the search for the largest rate; `ValueError` for invalid ones."""

    start_rate_per_s: float = 1.0
    min_rate_per_s: float = 0.05
    """Smallest rate: if even this is not served, the search ends."""
    max_rate_per_s: float = 1000.0
    """Largest rate: if this is served, the search ends."""
    tolerance: float = 0.05
    """Relative width at which the search ends: the least rate that is not served is at most this share above the
    largest served one."""
    min_attainment: float = DEFAULT_MIN_ATTAINMENT

    def __post_init__(self) -> None:
        if not 0 < self.min_rate_per_s <= self.start_rate_per_s <= self.max_rate_per_s < math.inf:
            raise ValueError(
                f"start_rate_per_s: expected 0 < min_rate_per_s ({self.min_rate_per_s}) <= start_rate_per_s "
                f"({self.start_rate_per_s}) <= max_rate_per_s ({self.max_rate_per_s})"
            )
        if not 0.02 <= self.tolerance <= 1:
            raise ValueError(f"tolerance: expected a share in [0.02, 1]; got {self.tolerance}")
        if not 0 < self.min_attainment <= 1:
            raise ValueError(f"min_attainment: expected a share in (0, 1]; got {self.min_attainment}")


Bound = Literal["between", "none", "all"]
"""Meaning of a limit: it lies `between` two measured rates; `none` of the rates was served; `all` of them were."""


@dataclass(frozen=True, kw_only=True)
class ServedRate:
    """The largest rate that is served."""

    bound: Bound
    rate_per_s: float
    """Rate where fitted attainment crosses the target, by linear interpolation between measured rates. For `none` it is
    the least measured rate (the truth is below it), for `all` the largest (the truth is not below it)."""
    served_per_s: float | None
    """The largest measured rate whose fitted attainment reaches the target."""
    missed_per_s: float | None
    """The least measured rate whose fitted attainment misses the target."""

    def __str__(self) -> str:
        prefix = {"between": "", "none": "< ", "all": ">= "}[self.bound]
        return f"{prefix}{self.rate_per_s:.3g}"


def fitted(probes: Iterable[Probe]) -> list[Probe]:
    """The probes by ascending rate, one a rate, with non-increasing attainment.

    Probes of one rate are averaged first; then neighbours that rise are pooled. Means are weighted by requests.

    Raises:
        ValueError: for a probe that is not a share of at least one request at a rate above 0.
    """
    totals: dict[float, tuple[float, int]] = {}
    for probe in probes:
        if not (0 < probe.rate_per_s < math.inf and 0 <= probe.attainment <= 1 and probe.num_requests > 0):
            raise ValueError(f"probe: expected a rate and requests above 0 and a share in [0, 1]; got {probe}")
        good, num_requests = totals.get(probe.rate_per_s, (0.0, 0))
        totals[probe.rate_per_s] = (
            good + probe.attainment * probe.num_requests,
            num_requests + probe.num_requests,
        )
    pools: list[tuple[float, int, int]] = []  # good requests, requests, rates
    for _, (good, num_requests) in sorted(totals.items()):
        pools.append((good, num_requests, 1))
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] > pools[-2][0] * pools[-1][1]:
            (good_a, requests_a, rates_a), (good_b, requests_b, rates_b) = pools.pop(), pools.pop()
            pools.append((good_a + good_b, requests_a + requests_b, rates_a + rates_b))
    attainments = [good / num_requests for good, num_requests, num_rates in pools for _ in range(num_rates)]
    return [
        Probe(rate_per_s=rate, attainment=attainment, num_requests=totals[rate][1])
        for rate, attainment in zip(sorted(totals), attainments, strict=True)
    ]


def served_rate(probes: Iterable[Probe], min_attainment: float = DEFAULT_MIN_ATTAINMENT) -> ServedRate:
    """Find the largest served rate by measured points; ValueError without any, or for an invalid one."""
    curve = fitted(probes)
    if not curve:
        raise ValueError("probes: no rate was measured")
    served = [probe for probe in curve if _reaches(probe.attainment, min_attainment)]
    missed = [probe for probe in curve if not _reaches(probe.attainment, min_attainment)]
    if not served:
        least = missed[0].rate_per_s
        return ServedRate(bound="none", rate_per_s=least, served_per_s=None, missed_per_s=least)
    low = served[-1]
    if not missed:
        return ServedRate(bound="all", rate_per_s=low.rate_per_s, served_per_s=low.rate_per_s, missed_per_s=None)
    high = missed[0]
    way = (low.attainment - min_attainment) / (low.attainment - high.attainment)
    return ServedRate(
        bound="between",
        rate_per_s=low.rate_per_s + (high.rate_per_s - low.rate_per_s) * min(1.0, max(0.0, way)),
        served_per_s=low.rate_per_s,
        missed_per_s=high.rate_per_s,
    )


def _reaches(attainment: float, target: float) -> bool:
    """Whether an attainment reaches the target; 27 of 30 must reach 0.9 in spite of rounding."""
    return attainment >= target - 1e-9


def next_rate(config: SearchConfig, probes: Iterable[Probe]) -> float | None:
    """The rate to measure next, in requests per second with three significant digits; None when the search is
    over.

    It ends: every new rate halves a gap between two measured neighbours, and gaps within the tolerance are not halved.
    """
    measured = list(probes)
    if not measured:
        return config.start_rate_per_s
    limit = served_rate(measured, config.min_attainment)
    if limit.missed_per_s is None:
        doubled = min(limit.rate_per_s * 2, config.max_rate_per_s)
        return None if limit.rate_per_s >= config.max_rate_per_s else doubled
    if limit.served_per_s is None:
        halved = max(limit.rate_per_s / 2, config.min_rate_per_s)
        return None if limit.rate_per_s <= config.min_rate_per_s else halved
    if limit.missed_per_s <= limit.served_per_s * (1 + config.tolerance):
        return None
    return _round((limit.served_per_s + limit.missed_per_s) / 2)


def _round(rate_per_s: float) -> float:
    """Round to three significant digits, for readable names of files and tables."""
    return float(f"{rate_per_s:.3g}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a comparison: the shape of a cluster, the rate, and which repeat it is."""

    shape: str
    rate_per_s: float
    repeat: int


def balanced_order(shapes: Sequence[str], rates_per_s: Sequence[float], repeats: int) -> list[Run]:
    """Every shape at every rate, `repeats` times: in the order given, then backwards, and so on (A B B A).

    All rates of a shape stand together, so that they can share a cluster. After an even number of repeats
    every point stands at the same mean position: a drift that is linear in time cancels out.

    Raises:
        ValueError: without shapes, rates or repeats, or for one that is named twice.
    """
    for field, values in (("shapes", shapes), ("rates_per_s", rates_per_s)):
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{field}: expected at least one, each of them once; got {list(values)}")
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1; got {repeats}")
    once = [(shape, rate) for shape in shapes for rate in rates_per_s]
    return [
        Run(shape=shape, rate_per_s=rate, repeat=repeat)
        for repeat in range(repeats)
        for shape, rate in (once if repeat % 2 == 0 else reversed(once))
    ]
