"""Comparison of shapes of a cluster by the rate that they serve, for every pair of limits: recordings in, rows and
ratios out.

Recordings of one shape at different rates make a curve. For given limits each of its points has an attainment and a
goodput, and the curve has a largest served rate (search.py). Shapes are compared on the same requests at the same times
only: a curve holds recordings of one workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.loadtests.verdict.goodput import DEFAULT_MIN_ATTAINMENT, Outcomes, Slo
from disagg.loadtests.verdict.recordings import Recording
from disagg.loadtests.verdict.search import Probe, ServedRate, served_rate

Relation = Literal["=", ">=", "<="]


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Recording of one point, ready to be scored."""

    rate_per_s: float
    repeat: int
    outcomes: Outcomes


@dataclass(frozen=True, kw_only=True)
class Curve:
    """All points of one shape over its rates."""

    shape: str
    points: Sequence[CurvePoint]
    """Points in the order of rate and repeat."""

    def probes(self, slo: Slo) -> list[Probe]:
        """Attainment of every recording under these limits."""
        return [
            Probe(
                rate_per_s=point.rate_per_s,
                attainment=point.outcomes.attainment(slo),
                num_requests=point.outcomes.overall.num_due,
            )
            for point in self.points
        ]

    def served(self, slo: Slo, min_attainment: float = DEFAULT_MIN_ATTAINMENT) -> ServedRate:
        """The largest rate at which enough requests meet the limits."""
        return served_rate(self.probes(slo), min_attainment)

    def goodput(self, slo: Slo) -> list[tuple[float, float]]:
        """Pairs (rate, good requests per second) by ascending rate; the mean where a rate was repeated."""
        by_rate: dict[float, list[float]] = {}
        for point in self.points:
            by_rate.setdefault(point.rate_per_s, []).append(point.outcomes.goodput_per_s(slo))
        return [(rate, sum(values) / len(values)) for rate, values in sorted(by_rate.items())]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one shape for one pair of limits."""

    shape: str
    slo: Slo
    served: ServedRate
    peak_goodput_per_s: float
    """The largest goodput at any rate, regardless of the attainment there."""
    peak_rate_per_s: float
    """The rate of that goodput."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of one shape's served rate to another's."""

    value: float
    relation: Relation = "="
    """Relation of the ratio to the truth. `>=`: at least this much, because a curve ended before its limit was found;
    `<=`: at most."""
    against: str = ""
    """Name of the shape in the denominator: the best of the others."""

    def __str__(self) -> str:
        return f"{'' if self.relation == '=' else self.relation + ' '}{self.value:.2f}x"


def curves(recordings: Iterable[Recording]) -> dict[str, Curve]:
    """A curve for each shape, in the order in which they first appear.

    Raises:
        ValueError: if the recordings are of more than one workload, or of different arrivals at one rate and repeat, or
            if one shape's name stands for two configurations: such points are not comparable.
    """
    points: dict[str, list[CurvePoint]] = {}
    first: Recording | None = None
    configs: dict[str, object] = {}
    arrivals: dict[tuple[float, int], object] = {}
    for run in recordings:
        first = first or run
        if run.info.point.workload != first.info.point.workload:
            raise ValueError("recordings: of different workloads; compare one workload at a time")
        if arrivals.setdefault((run.rate_per_s, run.info.point.repeat), run.info.point.arrivals) != (
            run.info.point.arrivals
        ):
            raise ValueError(
                f"recordings: different arrivals at {run.rate_per_s:g} requests/s, repeat {run.info.point.repeat}; "
                "shapes are compared on the same requests at the same times"
            )
        shape = run.info.point.shape
        if configs.setdefault(shape, run.info.point.shape_config) != run.info.point.shape_config:
            raise ValueError(f"recordings: shape {shape!r} was recorded with two different configurations")
        points.setdefault(shape, []).append(
            CurvePoint(
                rate_per_s=run.rate_per_s,
                repeat=run.info.point.repeat,
                outcomes=Outcomes(run.records, run.info.duration_s),
            )
        )
    return {
        shape: Curve(shape=shape, points=sorted(found, key=lambda point: (point.rate_per_s, point.repeat)))
        for shape, found in points.items()
    }


def invalid_points(by_shape: Mapping[str, Curve]) -> list[str]:
    """Recordings that must not be quoted, with the reasons, one line each."""
    return [
        f"{shape} at {point.rate_per_s:g} requests/s, repeat {point.repeat}: {reason}"
        for shape, curve in by_shape.items()
        for point in curve.points
        for reason in point.outcomes.overall.invalid_reasons
    ]


def rows(by_shape: Mapping[str, Curve], slos: Sequence[Slo], min_attainment: float) -> list[Row]:
    """Rows of every shape at every pair of limits, limits outermost."""
    found = []
    for slo in slos:
        for shape, curve in by_shape.items():
            peak_rate, peak = max(curve.goodput(slo), key=lambda point: point[1])
            found.append(
                Row(
                    shape=shape,
                    slo=slo,
                    served=curve.served(slo, min_attainment),
                    peak_goodput_per_s=peak,
                    peak_rate_per_s=peak_rate,
                )
            )
    return found


def ratio(numerator: ServedRate, others: Mapping[str, ServedRate]) -> Ratio | None:
    """Ratio of a shape's served rate to the best of others; each may have been measured at rates of its own.

    A rate that is `none` is only bounded above by its number, one that is `all` only below. So the best of the others
    lies between their largest lower bound and their largest upper bound. Where these differ the ratio is a bound, the
    lower one if there is one. None where there is neither, because no shape reached its limit.

    Raises:
        ValueError: without others.
    """
    if not others:
        raise ValueError("others: a ratio needs at least one shape to compare with")
    at_least, at_most = _limits(numerator)
    by_least = max(others, key=lambda shape: _limits(others[shape])[0])
    by_most = max(others, key=lambda shape: _limits(others[shape])[1])
    least, most = _limits(others[by_least])[0], _limits(others[by_most])[1]
    if at_least == at_most and least == most:
        return Ratio(value=at_least / most, relation="=", against=by_most)
    if at_least > 0 and most < math.inf:
        return Ratio(value=at_least / most, relation=">=", against=by_most)
    if at_most < math.inf and least > 0:
        return Ratio(value=at_most / least, relation="<=", against=by_least)
    return None


def _limits(served: ServedRate) -> tuple[float, float]:
    """The least and the largest value that a served rate can really have."""
    match served.bound:
        case "none":
            return 0.0, served.rate_per_s
        case "all":
            return served.rate_per_s, math.inf
        case "between":
            return served.rate_per_s, served.rate_per_s
