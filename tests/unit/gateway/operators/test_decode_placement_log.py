"""What a gateway keeps of comparisons, and refuses."""

from __future__ import annotations

import math

import pytest

from disagg.gateway.operators.decode_placement_log import (
    MAX_CHARS,
    MAX_KEPT,
    MAX_OPTIONS,
    MAX_RATES,
    DecodePlacementLog,
    check,
    why,
)
from disagg.proto.errors import InvalidRequestError
from disagg.v1 import inference_pb2 as pb


def comparison(**fields: object) -> pb.ShapeComparison:
    predictions = [
        pb.RatePrediction(rate_factor=1.0, attainment=0.5),
        pb.RatePrediction(rate_factor=1.15, attainment=0.25),
    ]
    values: dict[str, object] = {
        "cause": "first",
        "requests": 40,
        "present": "spread",
        "chosen": "gather",
        "options": [pb.ShapeOption(decodes=name, predictions=predictions) for name in ("spread", "gather")],
        "difference": 0.1,
        "error": 0.02,
        "needed": 0.03,
        "reason": "gather is better",
        **fields,
    }
    return pb.ShapeComparison(**values)  # type: ignore[arg-type]  # of the fields above


def test_a_change_has_a_line_and_is_shown_with_the_latest_comparison_first() -> None:
    log = DecodePlacementLog(started=100.0)
    assert log.answer("elastic", "spread", 0) == pb.GetShapeResponse(policy="elastic", decodes="spread", since=100.0)
    log.note(comparison(), 160.0)
    line = log.changed("spread", "gather", "tenant ops", why(comparison()), 160.0)
    assert line == (
        "answers decode with gather from the next placement on (was spread for 60 s, set by configuration); set by "
        "tenant ops: gather is better (first; predicted on 40 requests: spread 0.500/0.250, gather 0.500/0.250; "
        "difference +0.100, error 0.020); running requests stay where they are"
    )
    log.note(comparison(cause="60 s passed"), 220.0)
    found = log.answer("elastic", "gather", 0)
    assert (found.since, found.changed_by) == (160.0, "tenant ops")
    assert [(each.at, each.cause) for each in found.comparisons] == [(220.0, "60 s passed"), (160.0, "first")]
    assert "was gather for 140 s, set by tenant ops" in log.changed("gather", "spread", "tenant b", "", 300.0)


def test_the_latest_are_kept() -> None:
    log = DecodePlacementLog(started=0.0)
    for number in range(MAX_KEPT + 5):
        log.note(comparison(requests=number), float(number))
    assert [each.requests for each in log.answer("elastic", "spread", 0).comparisons] == list(range(24, 4, -1))


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (comparison(options=[pb.ShapeOption()] * (MAX_OPTIONS + 1)), "comparison.options"),
        (
            comparison(options=[pb.ShapeOption(predictions=[pb.RatePrediction()] * (MAX_RATES + 1))]),
            "comparison.options.predictions",
        ),
        (comparison(cause="x" * (MAX_CHARS + 1)), "comparison.cause"),
        (comparison(reason="two\nlines"), "comparison.reason"),
        (comparison(options=[pb.ShapeOption(decodes="\x1b[2J")]), "comparison.options.decodes"),
        (comparison(error=math.nan), "comparison"),
        (comparison(needed=math.inf), "comparison"),
        (
            comparison(options=[pb.ShapeOption(predictions=[pb.RatePrediction(attainment=math.inf)])]),
            "comparison",
        ),
    ],
)
def test_what_is_too_large_or_no_number_is_refused(broken: pb.ShapeComparison, field: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(broken, "spread")
    assert refused.value.field == field
    check(comparison(), "spread")


def test_a_comparison_under_another_setting_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^comparison\.present: it is gather by now, not spread$"):
        check(comparison(), "gather")
    check(comparison(present=""), "gather")


def test_it_shows_when_the_load_was_read_and_how_many_requests_have_targets() -> None:
    log = DecodePlacementLog(started=0.0)
    log.read_load(7.0)
    found = log.answer("elastic", "spread", 12)
    assert (found.load_read, found.targeted_requests) == (7.0, 12)
