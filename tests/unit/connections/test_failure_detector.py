"""Who counts as hung, and who must not."""

from __future__ import annotations

import math

import pytest

from disagg.connections.failure_detector import SWEEP_S, FailureDetector, limit
from disagg.proto.clock.still_time import LOOK_S, StillTime


class Driver:
    """A detector, and a clock that goes from sweep to sweep."""

    def __init__(self, silent_after_s: float = 2.0, stuck_after_s: float = 10.0) -> None:
        self.detector: FailureDetector[str] = FailureDetector(silent_after_s, stuck_after_s)
        self.now = 100.0
        assert self.detector.sweep(self.now) == []

    def watch(self, key: str, stuck_after_s: float | None = None) -> None:
        self.detector.watch(key, self.now, stuck_after_s)

    def heartbeat(self, key: str, step_s: float | None = None, doing: str = "", expected_s: float = 0.0) -> bool:
        return self.detector.heartbeat(key, self.now, step_s, doing, expected_s)

    def pass_time(self, seconds: float) -> list[tuple[float, str, str]]:
        """Sweep as often as one should; (seconds from now, who, why) of those who are suspected."""
        found = []
        for step in range(1, round(seconds / SWEEP_S) + 1):
            self.now += SWEEP_S
            found += [(step * SWEEP_S, key, why) for key, why, _ in self.detector.sweep(self.now)]
        return found


def test_silence_is_noticed_in_time_and_once() -> None:
    it = Driver()
    it.watch("w")
    assert it.pass_time(10.0) == [(2.0, "w", "was unresponsive for 2.0 s")]


def test_who_speaks_is_not_suspected() -> None:
    it = Driver()
    it.watch("speaks")
    it.watch("silent")
    found = []
    for _ in range(8):
        found += it.pass_time(0.5)
        assert it.heartbeat("speaks") is False
    assert [key for _, key, _ in found] == ["silent"]


def test_who_speaks_again_is_trusted_and_may_be_suspected_again() -> None:
    it = Driver()
    it.watch("w")
    it.pass_time(5.0)
    assert it.heartbeat("w") is True
    assert it.heartbeat("w") is False
    assert it.pass_time(1.75) == []
    assert it.pass_time(0.25) == [(0.25, "w", "was unresponsive for 2.0 s")]


def test_one_with_a_limit_of_its_own_is_stuck_after_that() -> None:
    it = Driver()
    it.watch("gateway", 30.0)
    it.watch("worker")
    found = []
    for half_seconds in range(61):  # beats come from a thread
        it.heartbeat("gateway", half_seconds / 2, "request r1 in encode (text.py:7)")
        it.heartbeat("worker", half_seconds / 2)
        found += it.pass_time(0.5)
    assert [(key, why) for _, key, why in found] == [("worker", "has been busy for 10 s")]
    it.heartbeat("gateway", 30.5, "request r1 in encode (text.py:7)")
    assert [(key, why) for _, key, why in it.pass_time(0.5)] == [
        ("gateway", "has been busy for 30 s (request r1 in encode (text.py:7))")
    ]


def test_one_that_is_busy_for_longer_than_the_silence_that_counts_is_not_suspected() -> None:
    it = Driver(silent_after_s=4.0, stuck_after_s=30.0)
    it.watch("gateway")
    found = []
    for half_seconds in range(10):  # 4.6 s in one piece of work, then it waits
        it.heartbeat("gateway", half_seconds / 2 if half_seconds / 2 < 4.6 else 0.0)
        found += it.pass_time(0.5)
    assert found == []
    assert it.pass_time(4.0) == [(3.5, "gateway", "was unresponsive for 4.0 s")]


def test_a_step_that_takes_too_long_is_a_hang_although_reports_come() -> None:
    it = Driver()
    it.watch("w")
    for step_s in (9.0, 9.5, 10.0):
        it.heartbeat("w", step_s)
        assert it.pass_time(0.5) == []
    assert it.heartbeat("w", 10.5) is False
    assert it.pass_time(0.25) == [(0.25, "w", "has been busy for 10 s")]
    assert it.heartbeat("w", 11.0) is False
    assert it.heartbeat("w") is False  # tokens of earlier steps that were on their way
    assert it.heartbeat("w", 0.0) is True


def test_the_limit_of_a_step_follows_its_own_prediction() -> None:
    it = Driver()
    it.watch("slow")
    for step_s in (10.5, 29.0):
        it.heartbeat("slow", step_s, expected_s=5.0)
        assert it.pass_time(0.5) == []
    it.heartbeat("slow", 30.5, expected_s=5.0)
    why = "has been busy for 30 s, which was predicted to last 5 s"
    assert it.pass_time(0.5) == [(0.25, "slow", why)]


def test_no_prediction_makes_the_limit_endless() -> None:
    it = Driver()
    it.watch("w")
    it.heartbeat("w", 199.0, expected_s=1e9)
    assert it.pass_time(0.5) == []
    it.heartbeat("w", 201.0, expected_s=1e9)
    assert [key for _, key, _ in it.pass_time(0.5)] == ["w"]


def test_a_listener_that_stood_still_suspects_nobody() -> None:
    """Its machine was suspended, or it was stopped: nobody could be heard in that time."""
    monotonic_s = 0.0
    clock = StillTime(lambda: monotonic_s, lambda: 0.0)
    clock.begin()
    detector: FailureDetector[str] = FailureDetector(2.0, 10.0)
    detector.watch("w", clock.now())
    detector.sweep(clock.now())
    monotonic_s += 3600.0
    for _ in range(18):
        assert detector.sweep(clock.now()) == []
        monotonic_s += LOOK_S
        clock.look()
    monotonic_s += 2 * LOOK_S
    assert [key for key, *_ in detector.sweep(clock.now())] == ["w"]


def test_a_listener_that_was_busy_reads_what_came_meanwhile_before_it_judges() -> None:
    it = Driver()
    it.watch("speaks")
    it.watch("silent")
    it.now += 3.0
    assert it.detector.sweep(it.now) == []
    it.heartbeat("speaks")
    assert it.pass_time(0.25) == [(0.25, "silent", "was unresponsive for 3.2 s")]


def test_a_listener_that_is_always_busy_judges_all_the_same() -> None:
    it = Driver()
    it.watch("w")
    it.now += 3.0
    assert it.detector.sweep(it.now) == []
    it.now += 3.0
    assert it.detector.sweep(it.now) == [("w", "was unresponsive for 6.0 s", False)]


def test_a_listener_that_was_busy_sees_a_step_that_does_not_end() -> None:
    it = Driver()
    it.watch("w")
    it.heartbeat("w", 10.5)
    it.now += 3.0
    assert it.detector.sweep(it.now) == [("w", "has been busy for 10 s", True)]


def test_who_left_or_is_unknown_is_not_suspected() -> None:
    it = Driver()
    it.watch("w")
    it.detector.forget("w")
    it.detector.forget("nobody")
    assert it.heartbeat("nobody", 1e9) is False
    assert ("w" in it.detector, it.pass_time(5.0)) == (False, [])


@pytest.mark.parametrize("step_s", [0.0, 1e9])
def test_limits_may_be_off(step_s: float) -> None:
    it = Driver(limit(None), limit(None))
    it.watch("w")
    it.heartbeat("w", step_s)
    assert it.pass_time(100.0) == []
    assert (limit(None), limit(2.5)) == (math.inf, 2.5)
