"""Slow times: what takes how long in them, and before and after."""

from __future__ import annotations

import pytest

from disagg.proto.ids import WorkerId
from disagg.simulator.world.clock import EventLoop
from disagg.simulator.world.network import Network
from disagg.simulator.world.slow_times import SlowedSteps, SlowTime, factor_at, factor_before
from disagg.simulator.world.timing import LinearSteps
from disagg.step_times.interface import LinkTimes, StepWork

STEPS = LinearSteps(base_ms=100.0, prefill_token_ms=1.0, decode_ms=1.0)
WORK = StepWork(900, 0, 0, 0, 1)
"""One second."""


@pytest.mark.parametrize(
    ("begins_at", "takes_s"),
    [(0.0, 1.0), (9.5, 0.5 + 0.5 * 10), (10.0, 10.0), (20.0, 10.0), (39.0, 1.0 + 0.9), (40.0, 1.0)],
)
def test_a_step_goes_on_at_the_other_pace(begins_at: float, takes_s: float) -> None:
    loop = EventLoop()
    loop.run(begins_at)
    slowed = SlowedSteps(STEPS, [SlowTime(begins_s=10.0, ends_s=40.0, factor=10.0)], loop)
    assert slowed.step_s(WORK) == pytest.approx(takes_s)


def test_slow_times_multiply_and_know_before_and_after() -> None:
    both = [SlowTime(begins_s=-5.0, ends_s=0.0, factor=3.0), SlowTime(begins_s=-1.0, ends_s=1.0, factor=2.0)]
    assert (factor_before(both, 0.0), factor_at(both, 0.0)) == (6.0, 2.0)


def test_whom_one_concerns() -> None:
    one = SlowTime(begins_s=0.0, factor=2.0, worker_id=WorkerId("p0"), what="links")
    assert one.concerns(WorkerId("p0"), "links")
    assert not one.concerns(WorkerId("p1"), "links")
    assert not one.concerns(WorkerId("p0"), "steps")


@pytest.mark.parametrize(("end", "factor"), [(0.0, 2.0), (1.0, 0.0)])
def test_what_cannot_be(end: float, factor: float) -> None:
    with pytest.raises(ValueError, match="slow_times"):
        SlowTime(begins_s=0.0, ends_s=end, factor=factor)


def test_a_transfer_goes_on_at_the_other_pace() -> None:
    loop, ended = EventLoop(), []
    network = Network(loop, LinkTimes(bandwidth_bytes_per_s=100.0, latency_s=0.0))
    network.send("p", "d", 300, lambda: ended.append(loop.now))
    network.send("p", "e", 100, lambda: ended.append(loop.now))
    loop.at(1.0, network.slow_down, "d", 4.0)
    loop.at(9.0, network.slow_down, "d", 1.0)
    loop.run()
    assert ended == pytest.approx([2.0, 9.625])
