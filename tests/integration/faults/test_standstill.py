"""All processes of a cluster stand still for longer than any of them may hang, and go on: that time is not counted."""

from __future__ import annotations

import asyncio

from tests.acceptance.faults.cluster import Up
from tests.acceptance.faults.load import Model
from tests.acceptance.faults.standstill import standstill

LIMITS = {"suspect_after_s": 5.0, "kill_after_s": 5.0, "stuck_after_s": 5.0, "gateway_stuck_after_s": 5.0}
STILL_S = 12.0


async def _stand_still() -> None:
    pools = {name: {"size": 1, "num_blocks": 2048} for name in ("prefill", "decode")}
    config = {"model": {"path": "fake"}, "pools": pools, "recovery": LIMITS}
    async with Up(config, step_ms=50.0) as up:
        row = await standstill(up, Model(), STILL_S, "still_12s", after_s=3.0)
        output = up.output.read_text(encoding="utf-8")
    assert row.met, (row, output)
    assert "killing it" not in output
    assert "stood still for" in output


def test_a_cluster_that_stood_still_goes_on() -> None:
    asyncio.run(_stand_still())
