"""The message in which the twin tells a gateway of a comparison."""

from __future__ import annotations

import msgspec

from disagg.cli.twin.wire import message_of
from disagg.gateway.operators.decode_placement_log import check
from disagg.simulator.twin.comparison import Attained, Comparison


def test_a_comparison_is_told_whole() -> None:
    comparison = Comparison(
        at_s=3.0,
        cause="first",
        num_requests=40,
        present="spread",
        chosen="gather",
        attained=(
            Attained("spread", ((1.0, 0.5), (1.15, 0.25))),
            Attained("gather", ((1.0, 0.75), (1.15, 0.5))),
        ),
        difference=0.25,
        error=0.125,
        reason="gather is better",
        measured=0.75,
        num_measured=20,
    )
    told = message_of(comparison)
    check(told, "spread")
    assert (told.cause, told.requests, told.present, told.chosen) == ("first", 40, "spread", "gather")
    assert (told.measured, told.measured_requests) == (0.75, 20)
    assert not message_of(msgspec.structs.replace(comparison, measured=None)).HasField("measured")
    assert [(each.decodes, [(p.rate_factor, p.attainment) for p in each.predictions]) for each in told.options] == [
        ("spread", [(1.0, 0.5), (1.15, 0.25)]),
        ("gather", [(1.0, 0.75), (1.15, 0.5)]),
    ]
    assert (told.difference, told.error, told.needed, told.reason) == (0.25, 0.125, 0.135, "gather is better")
