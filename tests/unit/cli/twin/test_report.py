"""What `disagg explain --shape` says."""

from __future__ import annotations

from disagg.cli.twin.report import report, to_dict
from disagg.v1 import inference_pb2 as pb
from tests.unit.cli.test_explain import text_of

NOW = 1000.0


def comparison(at: float, chosen: str, difference: float, **fields: object) -> pb.ShapeComparison:
    values: dict[str, object] = {"cause": "60 s passed", "reason": "as it is", "present": "spread", **fields}
    return pb.ShapeComparison(
        at=at,
        requests=240,
        chosen=chosen,
        options=[
            pb.ShapeOption(
                decodes=name,
                predictions=[
                    pb.RatePrediction(rate_factor=1.0, attainment=a),
                    pb.RatePrediction(rate_factor=1.15, attainment=b),
                ],
            )
            for name, a, b in (("spread", 0.9, 0.8), ("gather", 0.95, 0.85))
        ],
        difference=difference,
        error=0.015,
        needed=0.025,
        **values,  # type: ignore[arg-type]  # of the fields above
    )


def test_it_says_what_was_compared_and_what_would_change_the_setting() -> None:
    shape = pb.GetShapeResponse(
        policy="elastic",
        decodes="spread",
        since=NOW - 7200,
        comparisons=[comparison(NOW - 30, "spread", 0.02), comparison(NOW - 90, "spread", -0.01)],
    )
    assert (
        text_of(report(shape, NOW)).splitlines()
        == """\
answers decode  on all workers (spread)
since           2 h ago, as configured
policy          elastic

Compared last
   setting  at 1.00 of the rate  at 1.15 of the rate
>  spread                 90.0%                80.0%
   gather                 95.0%                85.0%
share of 240 requests that meet their targets, predicted 30 s ago, because 60 s passed; > was chosen
as it is
the other setting is +2.0% of the requests better than spread; it is taken when that exceeds 2.5% (error 1.5% + 1%)

Before
when       requests  difference  needed          because
2 min ago       240       -1.0%    2.5%  spread  60 s passed""".splitlines()
    )


def test_a_change_says_by_whom_and_from_what() -> None:
    shape = pb.GetShapeResponse(
        policy="elastic",
        decodes="gather",
        since=NOW - 30,
        changed_by="tenant ops",
        comparisons=[comparison(NOW - 30, "gather", 0.05)],
    )
    text = text_of(report(shape, NOW))
    assert "since           30 s ago, by tenant ops" in text
    assert (
        "changed from spread, which meets the targets of 5.0% fewer requests; needed were 2.5% (error 1.5% + 1%)"
        in text
    )


def test_without_a_setting_or_a_comparison_it_says_so() -> None:
    assert text_of(report(pb.GetShapeResponse(policy="joint"), NOW)) == (
        "policy joint: it has no setting of where answers decode"
    )
    nothing = pb.GetShapeResponse(policy="elastic", decodes="spread", since=NOW)
    assert "Nothing was compared yet; a twin does that: disagg twin" in text_of(report(nothing, NOW))
    assert to_dict(nothing)["decodes"] == "spread"
