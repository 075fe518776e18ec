"""The controller's core and processes that hang: they are lost, and come back like any other."""

from __future__ import annotations

from disagg.cluster.core.backoff import FIRST_PAUSE_S, STABLE_S
from tests.support.control import DRAIN_TIMEOUT_S, LOST_GRACE_S, Driver, settled

DETAIL = "it was unresponsive for 4.0 s and was killed"


def test_a_worker_that_hangs_is_lost_and_started_again() -> None:
    control = settled({"prefill": 1, "decode": 1})
    assert control.hung("decode-0") == []
    record = control.record("decode-0")
    assert (record.phase, record.detail) == ("lost", DETAIL)
    assert control.left("decode-0") == []
    assert control.exited("decode-0") == ["publish prefill-0"]
    assert control.record("decode-0").detail == DETAIL
    assert control.tick(FIRST_PAUSE_S) == ["stop decode-0"]
    assert control.stopped("decode-0") == ["start decode-0"]
    assert control.register("decode-0", 2) == ["accept decode-0", "publish prefill-0 decode-0"]
    control.exited("decode-0")
    assert control.record("decode-0").detail == "killed by SIGKILL"


def test_a_launcher_that_restarts_by_itself_brings_the_next_incarnation() -> None:
    control = settled({"decode": 1})
    control.hung("decode-0")
    control.left("decode-0")
    assert control.register("decode-0", 2) == ["accept decode-0", "publish decode-0"]
    assert control.core.state().is_settled


def test_one_that_cannot_be_killed_is_stopped_in_the_end() -> None:
    control = settled({"decode": 1})
    control.hung("decode-0")
    assert control.tick(LOST_GRACE_S) == ["publish", "stop decode-0"]


def test_the_hang_of_an_earlier_life_or_of_a_stranger_is_no_news() -> None:
    control = settled({"decode": 1})
    control.register("decode-0", 2)
    assert control.hung("decode-0", 1) == []
    assert control.hung("decode-7") == []
    assert control.record("decode-0").phase == "ready"
    assert control.core.next_wakeup() is None


def test_a_draining_worker_that_hangs_has_drained() -> None:
    control = settled({"decode": 2})
    assert control.scale(decode=1) == ["publish decode-0 decode-1(draining)"]
    assert control.hung("decode-1") == []
    assert control.core.next_wakeup() == control.now + DRAIN_TIMEOUT_S
    assert control.exited("decode-1") == ["publish decode-0", "stop decode-1"]


def test_losses_in_a_row_wait_longer_and_a_long_life_before_a_broken_line_ends_the_row() -> None:
    control = settled({"decode": 1})
    incarnation = 1
    for pause_s in (FIRST_PAUSE_S, 2.0, 4.0, FIRST_PAUSE_S):
        if incarnation == 4:
            control.now += STABLE_S
        control.left("decode-0", incarnation)
        control.exited("decode-0")
        assert control.core.next_wakeup() == control.now + pause_s
        control.tick(pause_s)
        control.stopped("decode-0")
        incarnation += 1
        control.register("decode-0", incarnation)


def test_a_gateway_that_dies_is_started_again_soon() -> None:
    control: Driver = settled({"decode": 1})
    control.exited("gateway")
    assert control.core.next_wakeup() == control.now + FIRST_PAUSE_S
    assert control.tick(FIRST_PAUSE_S) == ["stop gateway"]
