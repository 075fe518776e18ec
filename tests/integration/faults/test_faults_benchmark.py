"""Two rows of the faults benchmark, with the model without weights: that its clusters, load and checks work."""

from __future__ import annotations

import asyncio

import pytest

from tests.acceptance.faults.load import Model
from tests.acceptance.faults.promises import run, summary


@pytest.mark.slow
def test_two_promises_are_kept() -> None:
    rows = asyncio.run(run(["kill_decode", "disconnect"], Model()))
    assert [(row.name, row.met) for row in rows] == [("kill_decode", True), ("disconnect", True)], rows
    figures = summary(rows)
    assert (figures["rows_met"], figures["rows_total"]) == (2, 2)
    assert figures["kill_decode_completed"] == figures["kill_decode_streams"] > 8
    assert figures["kill_decode_recovery_s"] > 0
