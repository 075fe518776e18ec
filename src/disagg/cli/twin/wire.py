"""The protobuf in which a twin tells the gateway of a comparison. Pure."""

from __future__ import annotations

from disagg.client import ShapeComparison
from disagg.client.types import RatePrediction, ShapeOption
from disagg.simulator.twin.comparison import Comparison


def message_of(comparison: Comparison) -> ShapeComparison:
    """The protobuf of a comparison."""
    return ShapeComparison(
        cause=comparison.cause,
        requests=comparison.num_requests,
        present=comparison.present,
        chosen=comparison.chosen,
        options=[
            ShapeOption(
                decodes=each.decodes,
                predictions=[RatePrediction(rate_factor=rate, attainment=share) for rate, share in each.by_rate],
            )
            for each in comparison.attained
        ],
        difference=comparison.difference,
        error=comparison.error,
        needed=comparison.needed,
        reason=comparison.reason,
        measured=comparison.measured,
        measured_requests=comparison.num_measured,
    )
