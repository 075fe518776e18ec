"""Which section of a contact with a GPU runs when, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.gpu.contact.scheduler import (
    MOST_RESTARTS,
    WRITING_S,
    Command,
    Cut,
    Ended,
    Kill,
    Schedule,
    Skip,
    Start,
    Stop,
    Tick,
    Write,
)
from benchmarks.gpu.contact.sections import Section, plans
from benchmarks.gpu.isolation import CONTEXT_LOST

HANGS = 1e9
TICK_S = 0.5


def section(name: str, phase: int, **changes: Any) -> Section:
    fields: dict[str, Any] = {"limit_s": 30.0, "least_s": 10.0, "program": f"benchmarks.{name}", "alone": phase != 2}
    return Section(name=name, phase=phase, **{**fields, **changes})


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a section does when it is run."""

    took_s: float = 5.0
    status: int = 0
    is_bad: bool = False
    wrong_ops: tuple[str, ...] = ()


@dataclass
class Played:
    """What was decided, and when."""

    starts: list[tuple[float, str, str]] = field(default_factory=list)
    """(time, section, mode)"""
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)
    kills: list[tuple[float, str]] = field(default_factory=list)
    skips: dict[str, str] = field(default_factory=dict)
    stopped_at: float = -1.0
    most_at_once: int = 0

    @property
    def names(self) -> list[str]:
        return [name if mode == "plain" else f"{name} {mode}" for _, name, mode in self.starts]


def play(
    sections: tuple[Section, ...],
    behaviours: Mapping[str, Behaviour] | None = None,
    *,
    budget_s: float = 320.0,
    at_once: int = 8,
    cut_at: float = HANGS,
    **options: Any,
) -> Played:
    """All of it from time 0, with behaviours by name or by `name mode`."""
    schedule = Schedule(sections, now=0.0, budget_s=budget_s, at_once=at_once, **options)
    played, now = Played(), 0.0
    ends: dict[str, tuple[float, Behaviour]] = {}
    killed: set[str] = set()

    def carry_out(commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start(started, mode, limit_s, without):
                    key = started.name if mode == "plain" else f"{started.name} {mode}"
                    behaviour = (behaviours or {}).get(key, Behaviour())
                    assert started.name not in ends, "it runs already"
                    assert limit_s > 0
                    ends[started.name] = (now + behaviour.took_s, behaviour)
                    played.starts.append((now, started.name, mode))
                    played.without[key] = without
                    played.most_at_once = max(played.most_at_once, len(ends))
                case Kill(name):
                    played.kills.append((now, name))
                    killed.add(name)
                case Skip(skipped, _, reason):
                    played.skips[skipped.name] = reason
                case Stop():
                    assert not ends
                    played.stopped_at = now
                case Write():
                    pass

    carry_out(schedule.handle(Tick(), now))
    while played.stopped_at < 0:
        assert now < 10_000, "it never ends"
        now += TICK_S
        for name, (ends_at, behaviour) in sorted(ends.items(), key=lambda each: each[1][0]):
            if name in killed:
                del ends[name]
                killed.remove(name)
                carry_out(schedule.handle(Ended(name, None), now))
            elif ends_at <= now:
                del ends[name]
                event = Ended(name, behaviour.status, behaviour.is_bad, behaviour.wrong_ops)
                carry_out(schedule.handle(event, now))
        if played.stopped_at < 0:
            carry_out(schedule.handle(Cut() if now >= cut_at else Tick(), now))
    return played


PREFLIGHT = section("preflight", 1, vital=True, least_s=3.0)
PROBE = section("probe", 1, priority=1, probes=True)
KERNELS = section("kernels", 2, program="", tests=("tests/gpu/test_ops.py",), rerun=True)
ENGINE = section("engine", 2, priority=1, program="", tests=("tests/gpu/test_engine.py",), rerun=True, reference=True)
LIMITS = section("limits", 3, least_s=6.0)
MODEL = section("model", 3, priority=1, needs=("limits",))
TRACES = section("traces", 3, priority=2)
ALL = (TRACES, MODEL, LIMITS, ENGINE, KERNELS, PROBE, PREFLIGHT)
"""Not in their order."""
ORDER = ["preflight", "probe", "kernels", "engine", "limits", "model", "traces"]


def test_phases_follow_each_other_and_priorities_decide_within() -> None:
    played = play(ALL)
    assert played.starts == [
        (0.0, "preflight", "plain"),
        (5.0, "probe", "plain"),
        (10.0, "kernels", "plain"),
        (10.0, "engine", "plain"),
        (15.0, "limits", "plain"),
        (20.0, "model", "plain"),
        (25.0, "traces", "plain"),
    ]
    assert played.stopped_at == 30.0


def test_as_many_tests_run_at_once_as_are_allowed() -> None:
    tests = tuple(section(f"tests-{number}", 2, priority=number) for number in range(5))
    played = play((*tests, LIMITS), {"tests-0": Behaviour(took_s=20.0)}, at_once=2)
    assert played.most_at_once == 2
    assert played.names == ["tests-0", "tests-1", "tests-2", "tests-3", "tests-4", "limits"]
    assert [at for at, *_ in played.starts] == [0.0, 0.0, 5.0, 10.0, 15.0, 20.0]


def test_a_section_that_hangs_is_ended_at_its_limit_and_costs_itself() -> None:
    played = play(ALL, {"model": Behaviour(took_s=HANGS)})
    assert played.kills == [(50.0, "model")]
    assert played.names == ORDER
    assert played.skips == {}


@pytest.mark.parametrize("status", [-11, 1], ids=["crash", "import"])
def test_what_can_run_beside_a_section_that_crashes_or_cannot_be_imported_does(status: int) -> None:
    behaviours = {
        name: Behaviour(took_s=0.5, status=status, is_bad=status == 1) for name in ("probe", "kernels", "traces")
    }
    played = play(ALL, behaviours)
    assert played.names == [*ORDER, "kernels blocking"]
    assert played.skips == {}


def test_what_needs_a_section_that_failed_is_not_begun() -> None:
    played = play(ALL, {"limits": Behaviour(status=1)})
    assert played.skips == {"model": "not begun: limits failed"}
    assert "traces" in played.names


def test_without_a_device_nothing_else_is_begun() -> None:
    played = play(ALL, {"preflight": Behaviour(status=3)})
    assert (played.names, played.skips, played.stopped_at) == (["preflight"], {}, 5.0)


def test_a_preflight_that_only_reports_failures_stops_nothing() -> None:
    assert play(ALL, {"preflight": Behaviour(is_bad=True)}).names == ORDER


def test_a_section_that_does_not_exist_is_skipped_with_the_reason() -> None:
    played = play(ALL, missing={"probe": "not there: benchmarks/gpu/probe.py"})
    assert played.skips == {"probe": "not there: benchmarks/gpu/probe.py"}
    assert played.names == [name for name in ORDER if name != "probe"]


def test_tests_that_lose_their_context_go_on_with_the_rest_at_once() -> None:
    played = play(ALL, {"kernels": Behaviour(status=CONTEXT_LOST, is_bad=True)})
    figures = ["limits", "model", "traces"]
    assert played.names == [*ORDER[:4], "kernels rest", *figures, "kernels blocking"]
    again = play((KERNELS,), {name: Behaviour(status=CONTEXT_LOST) for name in ("kernels", "kernels rest")})
    assert again.names == ["kernels", *["kernels rest"] * MOST_RESTARTS, "kernels blocking"]


def test_ops_that_are_wrong_are_left_out_of_all_that_follows() -> None:
    wrong = ("draw_rows", "paged_prefill_attention")
    played = play(ALL, {"probe": Behaviour(is_bad=True, wrong_ops=wrong), "engine": Behaviour(status=1)})
    assert played.names == [*ORDER, "engine blocking"]
    assert played.without.pop("preflight") == played.without.pop("probe") == ()
    assert set(played.without.values()) == {wrong}


def test_an_engine_that_fails_though_all_ops_are_right_runs_by_the_reference_first() -> None:
    played = play(ALL, {name: Behaviour(status=1) for name in ("engine", "kernels")}, has_memcheck=True)
    reruns = ["engine reference", "engine blocking", "kernels blocking", "engine memcheck", "kernels memcheck"]
    assert played.names[: len(ORDER)] == ORDER
    assert sorted(played.names[len(ORDER) :]) == sorted(reruns)
    assert played.names[len(ORDER)] == "engine reference"
    assert set(played.names[-2:]) == {"engine memcheck", "kernels memcheck"}


def test_what_is_run_once_more_is_not_run_a_third_time() -> None:
    failing = {f"kernels{mode}": Behaviour(status=1) for mode in ("", " blocking", " memcheck")}
    played = play((KERNELS,), failing, has_memcheck=True)
    assert played.names == ["kernels", "kernels blocking", "kernels memcheck"]


def test_what_was_ended_without_a_failure_is_not_run_once_more() -> None:
    slow = {"kernels": Behaviour(took_s=HANGS), "engine": Behaviour(took_s=HANGS)}
    played = play(ALL, slow)
    assert (played.names, played.kills) == (ORDER, [(40.0, "kernels"), (40.0, "engine")])
    schedule = Schedule((KERNELS,), now=0.0, budget_s=320.0, at_once=1)
    schedule.handle(Tick(), 0.0)
    commands = schedule.handle(Ended("kernels", None, is_bad=True), 30.0)
    assert [(each.section.name, each.mode) for each in commands if isinstance(each, Start)] == [("kernels", "blocking")]


def test_a_section_with_less_than_its_least_useful_time_is_not_begun() -> None:
    played = play((LIMITS, MODEL, TRACES), {"model": Behaviour(took_s=HANGS)}, budget_s=WRITING_S + 17.0)
    assert played.kills == [(17.0, "model")]
    assert played.skips == {"traces": "not begun: 0 s were left, and it needs 10"}


def test_the_smaller_section_still_runs_where_a_larger_one_has_no_time_left() -> None:
    large, small = section("large", 3, least_s=40.0), section("small", 3, priority=1, least_s=5.0)
    played = play((large, small), budget_s=WRITING_S + 20.0)
    assert played.names == ["small"]
    assert played.skips == {"large": "not begun: 20 s were left, and it needs 40"}


def test_tests_that_hang_leave_the_figures_their_least_useful_times() -> None:
    """26 s here: they are ended at 44 of 70."""
    slow = {name: Behaviour(took_s=HANGS) for name in ("kernels", "engine")}
    tests = tuple(section(name, 2, limit_s=300.0) for name in slow)
    played = play((PREFLIGHT, *tests, LIMITS, MODEL, TRACES), slow, budget_s=WRITING_S + 70.0)
    assert [at for at, _ in played.kills] == [44.0, 44.0]
    assert [name for name in played.names if name not in slow] == ["preflight", "limits", "model", "traces"]


def test_tests_have_at_least_half_of_what_is_left() -> None:
    """Of 32: the figures want 26."""
    tests = section("tests", 2, limit_s=300.0)
    played = play((tests, LIMITS, MODEL, TRACES), {"tests": Behaviour(took_s=HANGS)}, budget_s=WRITING_S + 32.0)
    assert played.kills == [(16.0, "tests")]
    assert played.names == ["tests", "limits", "model"]


def test_what_all_others_depend_on_keeps_nothing_for_them() -> None:
    played = play((PREFLIGHT, LIMITS, MODEL), {"preflight": Behaviour(took_s=9.0)}, budget_s=WRITING_S + 10.0)
    assert (played.kills, played.names) == ([], ["preflight"])
    assert list(played.skips) == ["limits", "model"]


def test_without_time_for_what_is_vital_nothing_is_begun() -> None:
    played = play((PREFLIGHT, LIMITS), budget_s=WRITING_S + 2.0)
    assert (played.names, list(played.skips)) == ([], ["preflight"])


def test_no_time_is_kept_for_what_cannot_run() -> None:
    tests = section("tests", 2, limit_s=300.0)
    played = play((tests, MODEL), {"tests": Behaviour(took_s=HANGS)}, budget_s=60.0, missing={"model": "not there"})
    assert played.kills == [(60.0 - WRITING_S, "tests")]


@pytest.mark.parametrize("budget_s", [20.0, 60.0, 150.0, 320.0, 840.0])
@pytest.mark.parametrize("took_s", [0.5, 40.0, HANGS])
@pytest.mark.parametrize("status", [0, 1, CONTEXT_LOST])
@pytest.mark.parametrize("at_once", [1, 16])
def test_the_budget_is_never_exceeded(budget_s: float, took_s: float, status: int, at_once: int) -> None:
    first = plans()["first"]
    names = [each.name for each in first if not each.vital]
    modes = ("", " rest", " reference", " blocking", " memcheck")
    behaviours = {f"{name}{mode}": Behaviour(took_s=took_s, status=status) for name in names for mode in modes}
    played = play(first, behaviours, budget_s=budget_s, at_once=at_once, has_memcheck=True)
    assert 0.0 <= played.stopped_at <= budget_s - WRITING_S + 2 * TICK_S


def test_a_longer_budget_lengthens_limits_in_proportion() -> None:
    played = play((MODEL,), {"model": Behaviour(took_s=HANGS)}, budget_s=960.0)
    assert played.kills == [(90.0, "model")]


def test_whoever_ends_it_early_gets_what_runs_ended_and_nothing_begun() -> None:
    played = play(ALL, {"kernels": Behaviour(took_s=HANGS), "engine": Behaviour(took_s=HANGS)}, cut_at=12.0)
    assert played.kills == [(12.0, "kernels"), (12.0, "engine")]
    assert played.names == ORDER[:4]
    assert played.stopped_at == 12.5


def test_a_section_that_is_being_ended_is_not_ended_again() -> None:
    schedule = Schedule((LIMITS,), now=0.0, budget_s=320.0, at_once=1)
    assert [type(command) for command in schedule.handle(Tick(), 0.0)] == [Start]
    assert schedule.handle(Tick(), 30.0) == [Kill("limits")]
    assert schedule.handle(Tick(), 31.0) == schedule.handle(Cut(), 31.0) == []
    assert schedule.handle(Ended("limits", None), 32.0) == [Write(), Stop()]


def test_a_section_that_ends_by_itself_as_it_is_being_ended_has_its_own_status() -> None:
    tests = [section(name, 2, least_s=1.0) for name in ("one", "other")]
    schedule = Schedule(tests, now=0.0, budget_s=320.0, at_once=2)
    schedule.handle(Tick(), 0.0)
    assert schedule.handle(Ended("one", 0), 30.0) == [Write(), Kill("other")]
    assert schedule.handle(Ended("other", 0), 30.0) == [Write(), Stop()]


def test_files_are_written_after_every_section_and_before_the_next_one() -> None:
    schedule = Schedule((LIMITS, TRACES), now=0.0, budget_s=320.0, at_once=1)
    schedule.handle(Tick(), 0.0)
    assert [type(command) for command in schedule.handle(Ended("limits", 0), 5.0)] == [Write, Start]


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="budget: must be more than 15 s, not 15"):
        Schedule((LIMITS,), now=0.0, budget_s=15.0, at_once=1)
    with pytest.raises(ValueError, match="at_once: must be at least 1, not 0"):
        Schedule((LIMITS,), now=0.0, budget_s=320.0, at_once=0)
    with pytest.raises(ValueError, match="model: it does not run"):
        Schedule((LIMITS,), now=0.0, budget_s=320.0, at_once=1).handle(Ended("model", 0), 1.0)
