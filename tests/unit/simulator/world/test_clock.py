"""Virtual time: order, ties, the end."""

from __future__ import annotations

import math

from disagg.simulator.world.clock import EventLoop


def test_events_happen_in_the_order_of_their_times_and_then_of_their_planning() -> None:
    loop, seen = EventLoop(), []
    for when, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        loop.at(when, lambda name=name: seen.append((loop.now, name)))
    loop.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert loop.num_events == 4
    assert loop.next_due == math.inf


def test_what_is_due_in_the_past_happens_now() -> None:
    loop, seen = EventLoop(), []
    loop.at(5.0, lambda: loop.at(1.0, lambda: seen.append(loop.now)))
    loop.run()
    assert seen == [5.0]


def test_run_goes_up_to_and_including_a_time() -> None:
    loop = EventLoop()
    seen: list[float] = []
    for when in (1.0, 2.0, 3.0):
        loop.at(when, seen.append, when)
    loop.run(2.0)
    assert (seen, loop.now, loop.next_due) == ([1.0, 2.0], 2.0, 3.0)
    loop.run(2.5)
    assert (seen, loop.now) == ([1.0, 2.0], 2.5)


def test_stop_ends_a_run_after_the_present_event() -> None:
    loop = EventLoop()
    seen: list[str] = []
    loop.at(1.0, loop.stop)
    loop.after(1.0, seen.append, "later")
    loop.run()
    assert (seen, loop.now) == ([], 1.0)
    loop.run()
    assert seen == ["later"]
