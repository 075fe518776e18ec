from __future__ import annotations

from disagg.cluster.core import events, state_diff
from disagg.cluster.core.state_diff import Change
from tests.support.control import ADDRESS, Driver, settled


def test_a_start_from_nothing() -> None:
    control = Driver({"prefill": 1, "decode": 1})
    assert state_diff.diff(None, control.core.state()) == []
    control.tick()
    first = control.core.state()
    assert state_diff.diff(None, first) == [Change("prefill-0", "starting"), Change("decode-0", "starting")]
    control.register("decode-0")
    control.register("prefill-0")
    second = control.core.state()
    assert state_diff.diff(first, second) == [
        Change("prefill-0", "ready"),
        Change("decode-0", "ready"),
        Change("gateway", "starting"),
    ]
    control.joined()
    assert state_diff.diff(second, control.core.state()) == [Change("gateway", "ready")]
    assert state_diff.diff(control.core.state(), control.core.state()) == []
    assert state_diff.gateway_address(second) == ""
    assert state_diff.gateway_address(control.core.state()) == ADDRESS


def test_what_came_and_went_between_two_looks() -> None:
    control = settled({"decode": 1})
    assert state_diff.diff(None, control.core.state()) == [
        Change("decode-0", "starting"),
        Change("decode-0", "ready"),
        Change("gateway", "starting"),
        Change("gateway", "ready"),
    ]
    before = control.core.state()
    control.left("decode-0")
    control.register("decode-0", 2)
    assert state_diff.diff(before, control.core.state()) == [
        Change("decode-0", "starting"),
        Change("decode-0", "ready"),
    ]


def test_losses_say_why_and_a_line_that_comes_back_is_told() -> None:
    control = settled({"decode": 2})
    before = control.core.state()
    control.exited("decode-0", "killed by SIGKILL")
    control.left("decode-1")
    lost = control.core.state()
    assert state_diff.diff(before, lost) == [
        Change("decode-0", "lost", "killed by SIGKILL"),
        Change("decode-1", "lost", "its connection to the controller broke"),
    ]
    control.register("decode-1")
    assert state_diff.diff(lost, control.core.state()) == [Change("decode-1", "ready")]


def test_who_cannot_start_is_the_failure_and_who_waits_is_not() -> None:
    control = Driver({"prefill": 1, "decode": 1})
    control.tick()
    control(events.StartsPending({"decode-0": "no node"}))
    state = control.core.state()
    assert state_diff.first_failure(state) is None
    assert state_diff.timeout_message(state, 5) == "prefill-0, decode-0: not ready after 5 s (decode-0: no node)"
    control.failed("decode-0", "config.json: broken")
    assert state_diff.first_failure(control.core.state()) == "decode-0: config.json: broken"


def test_a_worker_that_dies_while_others_start_is_the_failure() -> None:
    control = Driver({"prefill": 1, "decode": 1})
    control.tick()
    control.register("prefill-0")
    control.exited("prefill-0", "exit status 3")
    assert state_diff.first_failure(control.core.state()) == "prefill-0: exit status 3"


def test_a_gateway_that_is_missing_is_late() -> None:
    control = Driver({"decode": 1})
    control.tick()
    control.register("decode-0")
    assert state_diff.timeout_message(control.core.state(), 2.5) == "gateway: not ready after 2.5 s"
    assert state_diff.timeout_message(state_diff.EMPTY_STATE, 1) == "gateway: not ready after 1 s"
