"""The longest turns of an event loop."""

from __future__ import annotations

from disagg.gateway.event_loop.loop_times import LoopTimes


def test_turns_above_each_limit_are_counted() -> None:
    it = LoopTimes()
    for seconds in (0.006, 0.05, 0.051, 0.3):
        it.turn(seconds, 1.0)
    assert it.num_long == [4, 2]
    assert it.longest_s == 0.3


def test_what_was_before_can_be_forgotten() -> None:
    it = LoopTimes()
    it.turn(0.3, 1000.0)
    it.forget()
    assert (it.num_long, it.longest_s, it.recent_longest_s(1000.0)) == ([0, 0], 0.0, 0.0)


def test_the_longest_of_the_last_window_or_two() -> None:
    it = LoopTimes()
    assert it.recent_longest_s(1000.0) == 0.0
    it.turn(0.3, 1000.0)  # the window from 960 to 1020
    it.turn(0.1, 1019.0)
    assert it.recent_longest_s(1019.0) == 0.3
    it.turn(0.2, 1021.0)
    assert it.recent_longest_s(1079.0) == 0.3
    assert it.recent_longest_s(1081.0) == 0.2
    assert it.recent_longest_s(1141.0) == 0.0
    it.turn(0.01, 5000.0)
    assert it.recent_longest_s(5000.0) == 0.01
    assert it.longest_s == 0.3


def test_the_present_turn_counts_while_it_lasts() -> None:
    it = LoopTimes()
    assert it.turn_s(7.0) == 0.0
    it.began = 7.0
    assert it.turn_s(7.004) == 7.004 - 7.0
    assert it.recent_longest_s(7.004) == 0.0
    assert it.recent_longest_s(9.0) == 2.0
