"""Curves of shapes, their limits and ratios, on recordings whose attainment is known."""

from __future__ import annotations

import msgspec
import pytest

from disagg.loadtests.verdict.comparison import Ratio, curves, invalid_points, ratio, rows
from disagg.loadtests.verdict.goodput import Slo
from disagg.loadtests.verdict.recordings import Recording
from disagg.loadtests.verdict.search import Bound, ServedRate
from disagg.loadtests.workload.workload import RandomWorkload
from tests.support.load_records import recording

SLO = Slo(ttft_s=1.0)
LOOSE = Slo(ttft_s=9.0)


def served(rate_per_s: float, bound: Bound = "between") -> ServedRate:
    return ServedRate(bound=bound, rate_per_s=rate_per_s, served_per_s=None, missed_per_s=None)


def test_a_curve_has_every_recording_and_the_mean_of_repeats() -> None:
    by_shape = curves(
        [recording("a", 4.0, 5), recording("b", 2.0, 10), recording("a", 2.0, 10), recording("a", 4.0, 7, 1)]
    )
    assert list(by_shape) == ["a", "b"]
    curve = by_shape["a"]
    assert [(one.rate_per_s, one.attainment, one.num_requests) for one in curve.probes(SLO)] == [
        (2.0, 1.0, 10),
        (4.0, 0.5, 10),
        (4.0, 0.7, 10),
    ]
    assert curve.goodput(SLO) == [(2.0, 2.0), (4.0, pytest.approx(2.4))]
    assert curve.served(SLO, 0.9).rate_per_s == pytest.approx(2.5)
    assert curve.served(LOOSE, 0.9).bound == "all"


def test_rows_hold_every_shape_for_every_limit() -> None:
    by_shape = curves([recording("a", 2.0, 10), recording("a", 4.0, 0), recording("b", 2.0, 5), recording("b", 4.0, 5)])
    found = rows(by_shape, [SLO, LOOSE], 0.8)
    assert [(row.slo, row.shape, str(row.served), row.peak_goodput_per_s, row.peak_rate_per_s) for row in found] == [
        (SLO, "a", "2.4", 2.0, 2.0),
        (SLO, "b", "< 2", 2.0, 4.0),
        (LOOSE, "a", ">= 4", 4.0, 4.0),
        (LOOSE, "b", ">= 4", 4.0, 4.0),
    ]


def test_recordings_that_must_not_be_quoted_are_named() -> None:
    by_shape = curves([recording("a", 2.0, 10), recording("a", 4.0, 10, lateness_s=0.01)])
    assert invalid_points(by_shape) == [
        "a at 4 requests/s, repeat 0: the generator was late: p99 10.0 ms, at most 5 ms is allowed"
    ]


def test_what_is_not_the_same_work_is_not_compared() -> None:
    first = recording("a", 2.0, 10)
    longer = msgspec.structs.replace(first.info.point, workload=RandomWorkload(isl=11, osl=1))
    other_work = Recording(info=msgspec.structs.replace(first.info, point=longer), records=first.records)
    with pytest.raises(ValueError, match=r"^recordings: of different workloads"):
        curves([first, other_work])
    with pytest.raises(ValueError, match=r"^recordings: different arrivals at 2 requests/s, repeat 0"):
        curves([first, recording("b", 2.0, 10, seed=1)])
    changed = msgspec.structs.replace(recording("a", 4.0, 1).info.point, shape_config={"mode": "x"})
    other_config = Recording(info=msgspec.structs.replace(first.info, point=changed), records=first.records)
    with pytest.raises(ValueError, match=r"^recordings: shape 'a' was recorded with two different configurations"):
        curves([first, other_config])


def test_the_best_other_shape_is_the_denominator() -> None:
    others = {"small": served(1.0), "good": served(2.0), "lost": served(1.5, "none")}
    found = ratio(served(5.0), others)
    assert found == Ratio(value=2.5, against="good")
    assert str(found) == "2.50x"


def test_a_shape_that_may_be_the_best_makes_the_ratio_a_bound() -> None:
    """It served too little at 3/s, and nobody knows how much it would have served at less."""
    others = {"good": served(2.0), "lost": served(3.0, "none")}
    assert ratio(served(6.0), others) == Ratio(value=2.0, relation=">=", against="lost")
    assert ratio(served(6.0, "none"), others) == Ratio(value=3.0, relation="<=", against="good")


@pytest.mark.parametrize(
    ("numerator", "denominator", "text"),
    [
        (served(4.0, "all"), served(2.0), ">= 2.00x"),
        (served(4.0), served(2.0, "none"), ">= 2.00x"),
        (served(4.0, "all"), served(2.0, "none"), ">= 2.00x"),
        (served(1.0, "none"), served(2.0), "<= 0.50x"),
        (served(1.0), served(2.0, "all"), "<= 0.50x"),
        (served(1.0, "none"), served(2.0, "all"), "<= 0.50x"),
        (served(1.0, "none"), served(1.0, "none"), "None"),
        (served(2.0, "all"), served(2.0, "all"), "None"),
    ],
)
def test_a_ratio_of_limits_that_were_not_found_is_a_bound(
    numerator: ServedRate, denominator: ServedRate, text: str
) -> None:
    assert str(ratio(numerator, {"other": denominator})) == text


def test_a_ratio_needs_another_shape() -> None:
    with pytest.raises(ValueError, match=r"^others: "):
        ratio(served(1.0), {})
