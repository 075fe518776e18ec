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


def test_a_split_says_how_many_workers_take_no_prompts() -> None:
    for decodes, expected in (
        ("split:1", "on 1 worker that takes no prompts, and on others where steps would be late there (split:1)"),
        ("split:3", "on 3 workers that take no prompts, and on others where steps would be late there (split:3)"),
    ):
        shape = pb.GetShapeResponse(policy="elastic", decodes=decodes, since=NOW)
        assert text_of(report(shape, NOW)).splitlines()[0] == f"answers decode  {expected}"


def test_it_says_what_was_compared_and_what_would_change_the_setting() -> None:
    shape = pb.GetShapeResponse(
        policy="elastic",
        decodes="spread",
        since=NOW - 7200,
        load_read=NOW - 4,
        comparisons=[
            comparison(NOW - 30, "spread", 0.02, measured=0.875, measured_requests=200),
            comparison(NOW - 90, "spread", -0.01),
        ],
    )
    assert (
        text_of(report(shape, NOW)).splitlines()
        == """\
answers decode  on all workers (spread)
since           2 h ago, as configured
policy          elastic
twin            read the load 4 s ago

Compared last
   setting  at 1.00 of the rate  at 1.15 of the rate
>  spread                 90.0%                80.0%
   gather                 95.0%                85.0%
share of 240 requests that meet their targets, predicted 30 s ago; cause: 60 s passed; > was chosen
measured: 87.5% of the 200 of them that came and ended under spread
as it is
difference +2.0% of the requests; spread is changed when that exceeds 2.5% (error 1.5% + 1%)

Before
when       requests  difference  needed          cause
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
    text = text_of(report(nothing, NOW))
    assert "twin            none has run" in text
    assert "Nothing was compared yet, and no twin runs; start one with: disagg twin" in text
    assert to_dict(nothing)["decodes"] == "spread"


def test_a_twin_that_has_nothing_to_compare_is_told_from_one_that_does_not_run() -> None:
    shape = pb.GetShapeResponse(
        policy="elastic", decodes="spread", since=NOW, load_read=NOW - 299, targeted_requests=12
    )
    text = text_of(report(shape, NOW))
    assert "twin            read the load 5 min ago" in text
    assert (
        "Nothing was compared yet: 12 of the latest requests have targets, and comparisons begin with 40 requests that "
        "have some and two workers; targets come with requests (x-slo-ttft-ms, x-slo-tpot-ms) or from the section slo"
    ) in " ".join(text.split())
    shape.load_read = NOW - 301
    assert "no twin runs" in text_of(report(shape, NOW))
