"""`disagg load compare`: shapes of a cluster under the same requests at the same times, over rates, for every SLO.

    measure_all   each shape at each rate, forwards and backwards (A B B A), into a folder; continues an earlier run
    compare       the folder's recordings -> the largest served rate of each shape for each pair of limits, ratios,
                  and how many answers differ between the shapes

Nothing about limits is known while it measures: the requests carry no targets and nothing is refused, so that each
recording serves all limits. A subject that goes by targets, as mode elastic does, is measured for each pair of limits
(`for_limits`), the other shapes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from disagg.loadtests.campaign.points import Measurer
from disagg.loadtests.campaign.shapes import DISAGGREGATED, ELASTIC, ClusterShape, with_targets
from disagg.loadtests.scenario import Scenario
from disagg.loadtests.verdict.comparison import Curve, Ratio, curves, invalid_points, ratio, rows
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.verdict.recordings import Point, Recording
from disagg.loadtests.verdict.search import Run, balanced_order

STATIC = "best_static"
"""Kind of shapes that stands for all whose workers keep their roles."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Number of requests that two clusters, or one cluster twice, answered differently."""

    num_compared: int
    num_different: int

    @property
    def rate(self) -> float:
        """Share of the compared answers that differ; 0 if none were compared."""
        return self.num_different / self.num_compared if self.num_compared else 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a folder of recordings."""

    curves: Mapping[str, Curve]
    slos: Sequence[Slo]
    """Pairs of limits; the first one is the scenario's own."""
    ratios: Mapping[str, Sequence[Ratio | None]]
    """Ratios of the subject's served rate to that of the best shape of a kind, for each pair of limits; by kind."""
    difference: Difference
    invalid: Sequence[str]
    """Runs that must not be quoted, with the reasons."""


def plan_points(
    shapes: Sequence[ClusterShape], scenario: Scenario, rates_per_s: Sequence[float], repeats: int
) -> list[tuple[ClusterShape, Point]]:
    """The points to measure, in order; raises `ValueError` without shapes or rates, or for a duplicate.

    Every repeat has arrival times of its own, the same for all shapes. Shapes with rates of their own are measured at
    these instead of `rates_per_s`.
    """
    by_name = {shape.name: shape for shape in shapes}
    own = dict.fromkeys(rate for shape in shapes for rate in shape.rates_per_s if rate not in rates_per_s)
    turns = balanced_order(list(by_name), [*rates_per_s, *own], repeats)
    return [
        (shape, _point(shape, scenario, run))
        for run in turns
        if run.rate_per_s in ((shape := by_name[run.shape]).rates_per_s or rates_per_s)
    ]


def _point(shape: ClusterShape, scenario: Scenario, run: Run) -> Point:
    arrivals = msgspec.structs.replace(
        scenario.arrivals, rate_per_s=run.rate_per_s, seed=scenario.arrivals.seed + run.repeat
    )
    return Point(
        shape=shape.name,
        shape_config=shape.raw,
        workload=scenario.workload,
        arrivals=arrivals,
        repeat=run.repeat,
    )


def for_limits(shapes: Sequence[ClusterShape], slo: Slo) -> list[ClusterShape]:
    """The shapes of a comparison within these limits alone: they are the targets of the subject's requests."""
    subject, *others = shapes
    return [with_targets(subject, slo), *others]


def measure_all(measurer: Measurer, points: Sequence[tuple[ClusterShape, Point]]) -> list[Recording]:
    """Measure all points, or load those that were measured before; raises `LaunchError` at the first that cannot be
    measured."""
    found = []
    for number, (shape, point) in enumerate(points, start=1):
        measurer.log(f"[{number}/{len(points)}]")
        found.append(measurer.get(shape, point))
    return found


def compare(
    recordings: Sequence[Recording], shapes: Sequence[ClusterShape], slos: Sequence[Slo], min_attainment: float
) -> Comparison:
    """Score recordings. The first shape is the subject; it is compared with the others by kind, and with all
    together."""
    by_shape = curves(recordings)
    subject, *others = shapes
    kinds: dict[str, list[str]] = {}
    for shape in others:
        kinds.setdefault(shape.kind, []).append(shape.name)
        if shape.kind not in (DISAGGREGATED, ELASTIC):
            kinds.setdefault("colocated", []).append(shape.name)
        if subject.kind == ELASTIC != shape.kind:
            kinds.setdefault(STATIC, []).append(shape.name)
    ratios = {
        kind: [_ratio(by_shape, subject.name, names, slo, min_attainment) for slo in slos]
        for kind, names in kinds.items()
    }
    return Comparison(
        curves=by_shape,
        slos=slos,
        ratios=ratios,
        difference=difference(recordings),
        invalid=invalid_points(by_shape),
    )


def _ratio(
    by_shape: Mapping[str, Curve], subject: str, others: Sequence[str], slo: Slo, min_attainment: float
) -> Ratio | None:
    served = {name: by_shape[name].served(slo, min_attainment) for name in (subject, *others)}
    numerator = served.pop(subject)
    return ratio(numerator, served)


def difference(recordings: Sequence[Recording]) -> Difference:
    """Compare every whole answer with the first one that any recording has to the same request.

    Recordings must be of one workload: then a request's prompt is a function of its index.
    """
    first: dict[int, str] = {}
    num_compared = num_different = 0
    for recording in recordings:
        for record in recording.records:
            if record.status != "ok":
                continue
            if record.index in first:
                num_compared += 1
                num_different += record.output_digest != first[record.index]
            else:
                first[record.index] = record.output_digest
    return Difference(num_compared=num_compared, num_different=num_different)


# ---------------------------------------------------------------- as JSON


def json_rows(comparison: Comparison, min_attainment: float) -> list[dict[str, Any]]:
    """JSON rows, one for each shape and pair of limits."""
    return [
        {
            "shape": row.shape,
            **_limits(row.slo),
            "served_per_s": round(row.served.rate_per_s, 4),
            "served_bound": row.served.bound,
            "peak_goodput_per_s": round(row.peak_goodput_per_s, 4),
            "peak_rate_per_s": row.peak_rate_per_s,
        }
        for row in rows(comparison.curves, comparison.slos, min_attainment)
    ]


def point_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """JSON rows, one for each recording: its figures without any limit."""
    return [
        {
            "shape": curve.shape,
            "rate_per_s": point.rate_per_s,
            "repeat": point.repeat,
            "num_requests": overall.num_due,
            "num_ok": overall.num_ok,
            "output_tokens_per_s": round(overall.output_tokens_per_s, 2),
            **_quantiles_ms("ttft", overall.ttft),
            **_quantiles_ms("tpot", overall.tpot),
            **_quantiles_ms("itl", overall.itl),
            **_quantiles_ms("lateness", overall.lateness),
            "is_valid": overall.is_valid,
        }
        for curve in comparison.curves.values()
        for point in curve.points
        for overall in (point.outcomes.overall,)
    ]


def _quantiles_ms(name: str, found: Any) -> dict[str, float]:
    return {f"{name}_{key}_ms": round(getattr(found, key) * 1e3, 3) for key in ("p50", "p90", "p99", "max")}


def summary(comparison: Comparison, workload: str) -> dict[str, float]:
    """Flat figures: `goodput_over_chunked`, `goodput_over_prefill_first`, ... for the scenario's own limits, and each
    again for every pair of limits with the workload's name and the limits behind it.

    A ratio is left out where the measured rates do not determine it. One that is only a bound ends in `_at_least` or
    `_at_most`.
    """
    found: dict[str, float] = {}
    for kind, ratios in comparison.ratios.items():
        for index, (slo, value) in enumerate(zip(comparison.slos, ratios, strict=True)):
            if value is None:
                continue
            bound = {"=": "", ">=": "_at_least", "<=": "_at_most"}[value.relation]
            rounded = round(value.value, 4)
            if index == 0:
                found[f"goodput_over_{kind}{bound}"] = rounded
            found[f"goodput_over_{kind}_{workload}_{_slo_key(slo)}{bound}"] = rounded
    found["differing_answers"] = round(comparison.difference.rate, 6)
    found["invalid_runs"] = len(comparison.invalid)
    return found


def elastic_summary(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """The least and the median ratio of the subject's served rate to that of the best static shape, and the number of
    pairs of limits. Bounds are used as they are: a lower one makes the figure cautious, and `elastic_upper_bounds`
    counts the upper ones."""
    found = [value for each in comparisons for value in each.ratios.get(STATIC, ()) if value is not None]
    if not found:
        return {"elastic_limits": 0}
    values = [each.value for each in found]
    return {
        "elastic_over_best_static_min": round(min(values), 4),
        "elastic_over_best_static_median": round(median(values), 4),
        "elastic_limits": len(values),
        "elastic_upper_bounds": sum(each.relation == "<=" for each in found),
    }


def _slo_key(slo: Slo) -> str:
    limits = (("ttft", slo.ttft_s), ("tpot", slo.tpot_s))
    return "_".join(f"{name}{limit * 1e3:g}ms" for name, limit in limits if limit is not None) or "no_limit"


def _limits(slo: Slo) -> dict[str, float | None]:
    return {
        "ttft_ms": None if slo.ttft_s is None else slo.ttft_s * 1e3,
        "tpot_ms": None if slo.tpot_s is None else slo.tpot_s * 1e3,
    }
